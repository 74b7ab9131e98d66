"""Scans on GPUs: a group scans a row, or several adjacent columns.

It walks them part by part, and carries the combined value of the elements before each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, ceildiv, volume
from flambeau.ir.program import ScanKernel
from flambeau.ir.tuning import POINTS

from ..c.scans import ScanWriter
from ..dialect import UNROLLED
from .dialect import Shape, SimtDialect
from .rows import Rows, power_below


class GroupScan(Rows, ScanWriter):
    def __init__(self, dialect: SimtDialect, kernel: ScanKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        self.flat, self.number, self.around = (kernel.axis,), kernel.axis.size, frozenset(kernel.outer)
        needed = kernel.combine.needed([*self.stored.values()], stretches=True)
        self.kinds = {j: kernel.combine.left[j].dtype for j in needed}
        self.words = sum(-(-kind.itemsize // 4) for kind in self.kinds.values())

    def bind(self, at: str) -> None:
        n = self.extent(self.k.axis)
        self.line(f"const {self.d.long} {self.sym(self.k.axis)} = {f'{n} - 1 - ({at})' if self.k.reverse else at};")

    def put(self, slots: Mapping[int, str], values: Mapping[int, str]) -> None:
        for j, slot in slots.items():
            self.line(f"{slot} = {values[j]};")

    def joined(self, left: Mapping[int, str], right: Mapping[int, str]) -> dict[int, str]:
        lefts, rights = ([side.get(j, "0") for j in range(len(self.k.combine.left))] for side in (left, right))
        return dict(zip(self.kinds, self.combined(self.k.combine, lefts, rights, self.kinds), strict=True))

    def run_elements(self, base: str) -> dict[int, str]:
        """The values to be scanned, each combined with those before it in its run; the identity beyond the end."""
        k = self.k
        own = {j: self.array(kind, "e") for j, kind in self.kinds.items()}
        with self.every() as s:
            if not self.is_whole():
                starts = {j: self.d.constant(e.attr, e.dtype) for j in own for e in (k.combine.identity[j],)}
                self.put({j: f"{own[j]}[{s}]" for j in own}, starts)
            with self.element(s, base, "skip"):
                self.put({j: f"{own[j]}[{s}]" for j in own}, {j: self.value(k.exprs[j]) for j in own})
        with self.every(start=1) as s, self.scope(f"if ({s} % {self.lanes} != 0) {{"):
            now = {j: f"{own[j]}[{s}]" for j in own}
            self.put(now, self.joined({j: f"{own[j]}[{s} - 1]" for j in own}, now))
        return own


class RowScan(GroupScan):
    """A row is cut into runs of adjacent elements, each of one work-item. The totals of all runs are scanned together:
    in a tree or, where work-items run in step, first within a SIMD group and then across SIMD groups."""

    runs = True

    def __init__(self, dialect: SimtDialect, kernel: ScanKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        self.choose_lanes(kernel.exprs, self.address.items())
        if kernel.reverse and not (self.number.is_const and self.number.const % self.lanes == 0):
            self.lined = False  # counted from the end, lines are not aligned for wide accesses
        self.lanes = self.lanes if self.lined else POINTS.scan_run
        self.backward = kernel.reverse
        self.divide(shape, 2 * self.words)
        while self.each > self.lanes and self.each // self.lanes * self.group * 4 * self.words > shape.local:
            self.each = max(self.each // 2 // self.lanes, 1) * self.lanes
        self.lines = self.each // self.lanes

    def write(self) -> None:
        k = self.k
        reads = self.ahead(k.exprs)
        self.look(reads, self.address)
        with self.groups(k.outer):
            carry = self.declare([*self.kinds])
            with self.stretches() as base:
                self.fetched.clear()
                self.fetch(reads, base)
                own = self.run_elements(base)
                sums = dict(zip(self.kinds, self.shared([*self.kinds.values()], self.lines), strict=True))
                with self.each_line() as line:
                    last = f"({line} + 1) * {self.lanes} - 1"
                    self.put({j: self.at(sums[j], line) for j in own}, {j: f"{own[j]}[{last}]" for j in own})
                (self.in_step if self.d.step else self.tree)(sums)
                self.kept = {name: self.array(self.dtypes[name], "w") for name in self.stored}
                with self.each_line() as line:
                    self.join(own, sums, carry, line)
                if not self.is_held():
                    self.line(self.d.barrier)
                self.flush([*self.stored], base)

    def each_line(self) -> AbstractContextManager[str]:
        return self.every(1, self.lines)

    def at(self, array: str, line: str, item: str = "me") -> str:
        return f"{array}[{line} * {self.group} + {item}]"

    def tree(self, sums: Mapping[int, str]) -> None:
        """Combines the total of each run with those of the runs 1, 2 and 3, then 4, 8 and 12, then 16 ... before it."""
        self.line(self.d.barrier)
        with self.scope(f"for (int h = 1; h < {self.group}; h *= 4) {{"):
            own = self.arrays()
            with self.each_line() as line:
                now = {j: f"{own[j]}[{line}]" for j in own}
                self.put(now, {j: self.at(sums[j], line) for j in own})
                for f in (1, 2, 3):
                    with self.scope(f"if ({self.me} >= {f} * h) {{"):
                        self.put(now, self.joined({j: self.at(sums[j], line, f"me - {f} * h") for j in own}, now))
            self.line(self.d.barrier)
            with self.each_line() as line:
                self.put({j: self.at(sums[j], line) for j in own}, {j: f"{own[j]}[{line}]" for j in own})
            self.line(self.d.barrier)

    def in_step(self, sums: Mapping[int, str]) -> None:
        """Combines the total of each run with those before it in its SIMD group; then with the total of all SIMD groups
        before, which every SIMD group computes for itself."""
        step, steps, lane = self.d.step, self.group // self.d.step, f"{self.me} % {self.d.step}"
        with self.each_line() as line:
            mine = {j: self.at(sums[j], line) for j in self.kinds}
            self.put(mine, self.joined_before(mine, lane, step))
        self.line(self.d.barrier)
        if steps == 1:
            return
        own = self.arrays()
        with self.each_line() as line:
            now = {j: f"{own[j]}[{line}]" for j in own}
            last = self.d.minimum.format(lane, str(steps - 1))  # the SIMD group whose total a lane reads
            every = self.joined_before({j: self.at(sums[j], line, f"{last} * {step} + {step - 1}") for j in own}, lane,
                                       steps)
            before = f"({self.me} < {step} ? 0 : {self.me} / {step} - 1)"
            others = self.copied({j: self.d.of_one.format(every[j], before) for j in own})
            self.put(now, {j: self.at(sums[j], line) for j in own})
            with self.scope(f"if ({self.me} >= {step}) {{"):
                self.put(now, self.joined(others, now))
        self.line(self.d.barrier)
        with self.each_line() as line:
            self.put({j: self.at(sums[j], line) for j in own}, {j: f"{own[j]}[{line}]" for j in own})
        self.line(self.d.barrier)

    def joined_before(self, values: Mapping[int, str], lane: str, count: int) -> dict[int, str]:
        """Variables with the values of each of `count` work-items in step, combined with those of all before it."""
        now = self.copied(values)
        with self.scope(f"for (int h = 1; h < {count}; h *= 2) {{"):
            others = self.copied({j: self.d.of_one.format(now[j], f"({lane} < h ? 0 : {lane} - h)") for j in now})
            with self.scope(f"if ({lane} >= h) {{"):
                self.put(now, self.joined(others, now))
        return now

    def arrays(self) -> dict[int, str]:
        """Declares arrays with a value for each run of a work-item."""
        own = {j: self.fresh("o") for j in self.kinds}
        for j, kind in self.kinds.items():
            self.line(f"{self.d.stored[kind]} {own[j]}[{self.lines}];")
        return own

    def join(self, own: Mapping[int, str], sums: Mapping[int, str], carry: Mapping[int, str], line: str) -> None:
        """Combines a run with everything before it, to be stored."""
        before = self.copied(carry)
        with self.scope(f"if ({self.me} > 0) {{"):
            self.put(before, self.joined(carry, {j: self.at(sums[j], line, "me - 1") for j in own}))
        s = self.fresh("st")
        header = f"for (int {s} = {line} * {self.lanes}; {s} < ({line} + 1) * {self.lanes}; ++{s}) {{"
        with self.scope(header, how=UNROLLED):
            running = self.running(self.joined(before, {j: f"{own[j]}[{s}]" for j in own}))
            for name in self.stored:
                self.line(f"{self.kept[name]}[{s}] = {self.finished(name, running)};")
        self.put(carry, self.joined(carry, {j: self.at(sums[j], line, str(self.group - 1)) for j in own}))


class ColumnScan(GroupScan):
    """Adjacent columns; a work-item has a stretch of consecutive elements of one column."""

    def __init__(self, dialect: SimtDialect, kernel: ScanKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        column = kernel.column(POINTS.scan_columns)
        assert column is not None
        self.column = column
        self.others = [x for x in kernel.outer if x is not column]
        # Groups that access adjacent memory follow one another.
        places = [*(a for _, a in kernel.stores), *(e.attr[1][0] for e in loads(*kernel.exprs))]
        self.others_first = not any(a.coefficient(x) is ONE for x in self.others for a in places)
        self.wide = kernel.form.width
        self.group = power_below(shape.group)
        self.each = self.lanes = power_below(max(POINTS.registers // 2 // self.words, 1))

    def at_once(self) -> int:
        return self.each * self.group // self.wide

    def place(self, s: str, base: str) -> str:
        return f"{base} + {self.me} / {self.wide} * {self.each} + {s}"

    def write(self) -> None:
        v, long = self.column, self.d.long
        blocks, others = ceildiv(v.size, self.wide), volume(self.others)
        self.total = others * blocks * self.group
        inside = self.index(blocks if self.others_first else others)
        self.line(f"const int {self.me} = {self.d.lane};")
        self.line(f"const {long} slow = {self.d.group} / {inside}, fast = {self.d.group} % {inside};")
        other, block = ("slow", "fast") if self.others_first else ("fast", "slow")
        self.line(f"const {long} column = {block} * {self.wide} + {self.me} % {self.wide};")
        sums = dict(zip(self.kinds, self.shared([*self.kinds.values()]), strict=True))
        with self.scope("{", self.k.outer):
            self.decompose(other, self.others)
            # Work-items beyond the last column scan it again, and store nothing.
            last = self.d.minimum.format("column", f"({long})({self.extent(v)} - 1)")
            self.line(f"const {long} {self.sym(v)} = {last};")
            carry = self.declare([*self.kinds])
            with self.stretches() as base:
                self.fetched.clear()
                self.fetch(self.ahead(self.k.exprs), base)
                own = self.run_elements(base)
                self.put({j: f"{sums[j]}[{self.me}]" for j in own}, {j: f"{own[j]}[{self.each - 1}]" for j in own})
                self.line(self.d.barrier)
                before = self.join(sums, carry)
                self.kept = {name: self.array(self.dtypes[name], "w") for name in self.stored}
                with self.every() as s:
                    running = self.running(self.joined(before, {j: f"{own[j]}[{s}]" for j in own}))
                    for name in self.stored:
                        self.line(f"{self.kept[name]}[{s}] = {self.finished(name, running)};")
                with self.scope(f"if (column < {self.extent(v)}) {{"):
                    self.flush([*self.stored], base)
                if not self.is_held():
                    self.line(self.d.barrier)

    def join(self, sums: Mapping[int, str], carry: Mapping[int, str]) -> dict[int, str]:
        """The prefix before the elements of this work-item; `carry` becomes the total so far."""
        before = self.copied(carry)
        with self.scope(f"for (int k = 0; k < {self.group // self.wide}; ++k) {{", how=UNROLLED):
            with self.scope(f"if (k == {self.me} / {self.wide}) {{"):
                self.put(before, carry)
            self.put(carry, self.joined(carry, {j: f"{sums[j]}[k * {self.wide} + {self.me} % {self.wide}]"
                                                for j in self.kinds}))
        return before
