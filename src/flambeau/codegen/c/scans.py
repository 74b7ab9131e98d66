"""Scans in C: the running combine along one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import Expr, cast, cost_of, rewrite
from flambeau.ir.index import ONE, Sym
from flambeau.ir.program import ScanKernel
from flambeau.ir.tuning import CPU

from ..dialect import LANES, Dialect
from ..writer import Scope
from .nest import NestWriter


class ScanWriter(NestWriter):
    def __init__(self, dialect: Dialect, kernel: ScanKernel) -> None:
        super().__init__(dialect, kernel)
        self.k = kernel
        self.address = dict(kernel.stores)
        self.cost = cost_of([*kernel.exprs, *kernel.combine.result])
        self.stored = {name: e for name, e in zip(kernel.names, kernel.finish, strict=True) if name in self.address}
        self.needed = kernel.combine.needed([*self.stored.values()])

    def render(self) -> list[str]:
        {"rows": self.rows, "parts": self.rows_in_parts, "columns": self.columns}[self.k.form.name]()
        return self.scopes[0].lines

    def axis_loop(self, lo: str = "0", hi: str = "") -> AbstractContextManager[Scope]:
        """The axis from its lo-th element up to its hi-th, in the order of the scan."""
        a = self.k.axis
        n = self.extent(a)
        if not self.k.reverse:
            return self.loop(a, lo, hi or n)
        name = self.sym(a)
        header = f"for ({self.d.long} {name} = {n} - 1 - {lo}; {name} >= {n} - {hi or n}; --{name}) {{"
        return self.scope(header, (a,))

    # ---- states ----------------------------------------------------------------------------------------

    def declare(self, components: Sequence[int], count: int = 0) -> dict[int, str]:
        """A variable for each of the components, or an array of them, that holds the identity."""
        out = {}
        for j in components:
            ident = self.k.combine.identity[j]
            kind, start = self.d.types[ident.dtype], self.d.constant(ident.attr, ident.dtype)
            name = out[j] = self.fresh("st")
            self.line(f"alignas(64) {kind} {name}[{count}];" if count else f"{kind} {name} = {start};")
            if count:
                self.line(f"for (int l = 0; l < {count}; ++l) {name}[l] = {start};")
        return out

    def copied(self, slots: Mapping[int, str]) -> dict[int, str]:
        """Copies of some slots in new variables."""
        names = {}
        for j, slot in slots.items():
            names[j] = self.fresh("st")
            self.variable(self.k.combine.left[j].dtype, names[j], slot)
        return names

    def running(self, slots: dict[int, str]) -> dict[Expr, Expr]:
        return {self.k.combine.left[j]: self.raw(slot, self.k.combine.left[j].dtype) for j, slot in slots.items()}

    def finished(self, name: str, running: dict[Expr, Expr]) -> str:
        """The value to store, computed from the running values; its dtype may be narrower."""
        return self.value(cast(rewrite(self.stored[name], lambda x: running.get(x, x)), self.dtypes[name]))

    def advance(self, slots: dict[int, str], values: Sequence[str]) -> None:
        left = [slots.get(j, value) for j, value in enumerate(values)]  # a component that nothing reads has no slot
        self.assign(slots.values(), self.combined(self.k.combine, left, values, slots))

    def step(self, slots: dict[int, str], store: bool = True) -> None:
        self.advance(slots, [self.value(e) for e in self.k.exprs])
        if store:
            running = self.running(slots)
            for name in self.stored:
                self.store(name, self.address[name], self.finished(name, running))

    # ---- rows ------------------------------------------------------------------------------------------

    def rows_in_parts(self) -> None:
        """Scans few, long rows."""
        with self.nest(self.k.outer):
            if not self.exact():
                self.long_row()
                return
            # A single thread scans the row directly: the result is the same.
            with self.scope(f"if ({self.fl}most_threads() == 1) {{"):
                self.stretch(self.declare(self.needed))
            with self.scope("else {"):
                self.long_row()

    def rows(self) -> None:
        k = self.k
        how = self.parallel((*k.outer, k.axis), self.cost, len(k.outer)) if k.outer else None
        with self.nest(k.outer, how):
            self.stretch(self.declare(self.needed))

    def stretch(self, slots: dict[int, str], lo: str = "0", hi: str = "", store: bool = True) -> None:
        """Scans a part of a row, element by element."""
        taken = self.taken()
        if taken is not None:
            self.choose(slots, taken, lo, hi, [*self.stored] if store else [])
            return
        with self.axis_loop(lo, hi):
            self.step(slots, store)

    def taken(self) -> Expr | None:
        """The condition, if every component becomes the new value or stays the old one by the same condition."""
        c = self.k.combine
        conditions = {e.args[0] if e.op == "where" and e.args[1:] == (c.right[j], c.left[j]) else None
                      for j in self.needed for e in (c.result[j],)}
        return conditions.pop() if len(conditions) == 1 else None

    def exact(self) -> bool:
        """Whether nothing is rounded and no step waits long for the one before."""
        return self.taken() is not None or not any(is_float(self.k.combine.left[j].dtype) for j in self.needed)

    def choose(self, slots: dict[int, str], taken: Expr, lo: str, hi: str, stored: Sequence[str]) -> None:
        """Scans with a branch. A running extremum seldom changes, and the branch is predicted: no step waits for the
        one before, and the values to store are computed only when it changes."""
        c = self.k.combine
        kept = {}
        running = self.running(slots)
        for name in stored:
            text = self.finished(name, running)
            kept[name] = self.fresh("k")
            self.line(f"{self.d.types[self.dtypes[name]]} {kept[name]} = {text};")
        with self.axis_loop(lo, hi):
            new = {right: self.raw(self.value(e), e.dtype) for right, e in zip(c.right, self.k.exprs, strict=True)}
            both = {**new, **self.running(slots)}
            condition = self.value(rewrite(taken, lambda x: both.get(x, x)))
            with self.scope(f"if ({self.d.unlikely.format(condition)}) {{"):
                for j, slot in slots.items():
                    self.line(f"{slot} = {self.value(new[c.right[j]])};")
                running = self.running(slots)
                for name in stored:
                    self.line(f"{kept[name]} = {self.finished(name, running)};")
            for name in stored:
                self.store(name, self.address[name], kept[name])

    def long_row(self) -> None:
        """Scans few, long rows, each cut into parts. The total of every part is computed first; then each part is
        scanned from the total before it. Parts go side by side, because a single one waits for each of its steps."""
        every = self.k.combine.needed([*self.stored.values()], stretches=True)
        size = self.fresh("z")
        # Parts must not be a power of two of bytes apart, or all would compete for the same lines of the cache.
        self.line(f"const {self.d.long} {size} = {self.extent(self.k.axis)} / {CPU.scan_parts + 1} / 16 * 16;")
        states = self.declare(every, CPU.scan_parts)
        self.parts(states, size, every, store=False)
        carry = self.declare(every)
        with self.scope(f"for (int c = 0; c < {CPU.scan_parts}; ++c) {{"):
            own = [f"{states[j]}[c]" if j in states else "0" for j in range(len(self.k.combine.left))]
            new = self.combined(self.k.combine, [carry.get(j, "0") for j in range(len(own))], own, every)
            for j, text in zip(every, new, strict=True):
                self.line(f"{states[j]}[c] = {carry[j]};")
                self.line(f"{carry[j]} = {text};")
        self.parts(states, size, self.needed, store=True)
        self.stretch({j: carry[j] for j in self.needed}, f"{CPU.scan_parts} * {size}", self.extent(self.k.axis))

    def parts(self, states: dict[int, str], size: str, components: Sequence[int], store: bool) -> None:
        k = self.k
        together = 1 if self.exact() else CPU.scan_side_by_side
        b, n = self.fresh("b"), self.extent(k.axis)
        head = f"for ({self.d.long} {b} = 0; {b} < {CPU.scan_parts}; {b} += {together}) {{"
        with self.scope(head, how=self.parallel((*k.outer, k.axis), self.cost, 1)):
            if together == 1:
                slots = self.copied({j: f"{states[j]}[{b}]" for j in components})
                lo, hi = f"{b} * {size}", f"({b} + 1) * {size}"
                self.stretch(slots, lo, hi, store)
                ends = {j: f"{states[j]}[{b}] = {slot};" for j, slot in slots.items()}
            else:
                arrays = self.declare(components, together)
                each = f"for (int l = 0; l < {together}; ++l)"
                for j, array in arrays.items():
                    self.line(f"{each} {array}[l] = {states[j]}[{b} + l];")
                with self.scope(f"for ({self.d.long} w = 0; w < {size}; ++w) {{"), \
                        self.scope(f"{each} {{", (k.axis,), how=LANES):
                    at = f"({b} + l) * {size} + w"
                    self.line(f"const {self.d.long} {self.sym(k.axis)} = {f'{n} - 1 - ({at})' if k.reverse else at};")
                    self.step({j: f"{array}[l]" for j, array in arrays.items()}, store)
                ends = {j: f"{each} {states[j]}[{b} + l] = {array}[l];" for j, array in arrays.items()}
            if not store:
                for line in ends.values():
                    self.line(line)

    # ---- columns ---------------------------------------------------------------------------------------

    def columns(self) -> None:
        k, v = self.k, self.k.vector
        assert v is not None
        others = tuple(x for x in k.outer if x is not v)
        width = max(1, min(CPU.scan_columns, v.size.const)) if v.size.is_const else CPU.scan_columns
        apart = any(a.coefficient(v) is not ONE for a in self.address.values())
        if apart:
            width = min(width, CPU.scan_side_by_side if len(k.names) == 1 else CPU.scan_side_by_side // 2)
        # Enough blocks for the threads if there are few columns.
        if not others and v.size.is_const:
            width = max(min(width, 16), min(width, -(-v.size.const // 8)))
        block = Sym(f"{v.name}b", v.size)
        with self.nest(others, self.parallel((*k.outer, k.axis), self.cost, len(others) + 1),
                       (block, self.extent(v), str(width))):
            b = self.sym(block)
            end = self.end_of(b, width, v.size)
            arrays = self.declare(self.needed, width)
            # Gathering and scattering takes longer than single accesses, unless the combine between is expensive.
            one_by_one = apart and cost_of(k.combine.result) <= CPU.expensive_combine
            slots = {j: f"{a}[{self.sym(v)} - {b}]" for j, a in arrays.items()}
            if one_by_one:
                self.strips(v, b, end, slots)
                return
            with self.axis_loop(), self.loop(v, b, end, how=LANES if width >= CPU.scan_lanes else None):
                self.step(slots)

    def strips(self, v: Sym, b: str, end: str, slots: dict[int, str]) -> None:
        """Scans rows that are far apart in memory, some elements of each in turn: a cache line is used up before it may
        be evicted, and the rows still do not wait for each other."""
        first, axis = self.fresh("f"), self.k.axis
        step = CPU.scan_strip
        with self.scope(f"for ({self.d.long} {first} = 0; {first} < {self.extent(axis)}; {first} += {step}) {{"):
            last = self.end_of(first, step, axis.size)
            with self.loop(v, b, end):
                own = self.copied(slots)
                with self.axis_loop(first, f"({last})"):
                    self.step(own)
                self.assign(slots.values(), own.values())
