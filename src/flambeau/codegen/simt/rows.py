"""Row reductions on GPUs: a group reduces a row, and its work-items read adjacent elements.

Each work-item reduces its elements to a state, and the states are combined in local memory. A row that fits into the
registers of a group is read once, whatever is done with it. Scans of rows are in `scans.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr, index_children, loads, walk
from flambeau.ir.index import Sym, volume
from flambeau.ir.nodes import Combine
from flambeau.ir.program import Item, Kernel, LoopKernel, ScanKernel, exprs_of
from flambeau.ir.tuning import POINTS

from ..dialect import Dialect
from ..writer import Scope
from .dialect import Shape
from .points import PointLoops, States
from .wide_access import Several


def power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


class Rows(Several):
    """One group for each row, a point of some variables; it holds as many elements as fit into registers at once."""

    wide = 1  # points that a group has side by side
    returns = False  # whether a row is walked backwards: the elements read last are still in a cache

    def __init__(self, dialect: Dialect, kernel: Kernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        assert isinstance(kernel, LoopKernel | ScanKernel)
        self.about = kernel.about
        self._arrays: dict[tuple[str, int], str] = {}
        self._joined = False

    def divide(self, shape: Shape, words: int) -> None:
        """Chooses the work-items of a group and the elements of each, if an element takes `words` registers."""
        most, limit = max(self.lanes, power_below(max(POINTS.registers // words, 1))), shape.group
        lines = max(-(-self.about(self.number, 0) // self.lanes), 1)
        while limit <= shape.largest:  # larger groups if a row does not fit otherwise
            # A row of run-time size may be long after all.
            fitting = 2 * -(-lines // POINTS.lines) - 1 if self.number.is_const else limit
            self.group = power_below(max(min(fitting, limit), POINTS.smallest_group))
            self.each = -(-lines // self.group) * self.lanes
            if self.each <= most:
                self.each = self.each if self.number.is_const else max(self.each, min(most, POINTS.step))
                return
            limit *= 2
        if self.holds_a_part():  # the largest group
            self.group, self.each = power_below(shape.largest), most
            return
        self.group, self.each = power_below(shape.group), max(self.lanes, min(most, POINTS.step))

    def holds_a_part(self) -> bool:
        """Whether the first part of a row that does not fit stays in registers."""
        return False

    def is_held(self) -> bool:
        """Whether the work-items of a group hold all elements of a row at once."""
        return self.number.is_const and self.number.const <= self.at_once()

    @contextmanager
    def stretches(self) -> Iterator[str]:
        """Loops over the parts of a row; gives the position where a part begins."""
        base = "0" if self.is_held() else self.fresh("base")
        with self.scope("{" if self.is_held() else self.loop_over_parts(base)):
            yield base

    def loop_over_parts(self, base: str) -> str:
        """The head of the loop over the parts of a row; its variable is the position where each begins."""
        first, end, step = self.begin(), self.end(), self.at_once()
        if not self.returns:
            return f"for ({self.d.long} {base} = {first}; {base} < {end}; {base} += {step}) {{"
        last = f"{first} + ({end} - 1 - {first}) / {step} * {step}"
        return f"for ({self.d.long} {base} = {last}; {base} >= {first} && {base} < {end}; {base} -= {step}) {{"

    @contextmanager
    def groups(self, vars: Sequence[Sym]) -> Iterator[Scope]:
        row, start = self.fresh("row"), self.first_point(vars, 1)
        self.line(f"const int {self.me} = {self.d.lane};")
        self.line(f"const {self.d.long} {row} = {start};")
        with self.scope(f"if ({row} < {self.until}) {{" if self.bands else "{", vars) as s:
            self.decompose(row, vars)
            yield s

    def shared(self, dtypes: Sequence[DType], times: int = 1) -> list[str]:
        """Arrays in local memory, with `times` elements for each work-item; later calls reuse the same arrays."""
        kinds = [self.d.stored[dtype] for dtype in dtypes]
        keys = [(kind, kinds[:k].count(kind)) for k, kind in enumerate(kinds)]
        for key in keys:
            if key not in self._arrays:
                self._arrays[key] = self.fresh("r")
                # OpenCL allows local arrays only in the scope of the kernel function.
                self.scopes[0].lines.append(f"{self.d.local} {key[0]} {self._arrays[key]}[{times * self.group}];")
        return [self._arrays[key] for key in keys]


def words(bytes: int) -> int:
    """The number of 32-bit registers that hold so many bytes."""
    return max(-(-bytes // 4), 1)


def outside(exprs: Sequence[Expr], known: Collection[Expr]) -> Iterator[Expr]:
    """Yields some expressions and everything they are computed from, down to known values, which are included."""
    seen, stack = set[Expr](), [*reversed(exprs)]
    while stack:
        e = stack.pop()
        if e not in seen:
            seen.add(e)
            yield e
            if e not in known:
                stack += [*index_children(e), *reversed(e.args)]


class RowLoops(Rows, PointLoops):
    k: LoopKernel
    holding = False  # whether the elements processed now are held in registers
    again: list[Expr]

    def __init__(self, dialect: Dialect, kernel: LoopKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        self.flat = kernel.inner
        self.number = volume(self.k.inner)
        self.around = frozenset(kernel.outer)
        maps = {i.names[0] for i in kernel.items if i.combine is None and i.level == "full"}
        self.full = {name: a for name, a in kernel.stores if name in maps}
        exprs = kernel.everything()
        self.choose_lanes(exprs, self.full.items())
        # Buffers that all work-items read and one of them overwrites: not before all have read them.
        self.read_too = {p.name for p in kernel.params if p.written and p.aliased} | {e.attr[0] for e in loads(*exprs)}
        self.held = self.to_hold()
        self.made: dict[Expr, str] = {}  # values computed from the elements that are held as well, in arrays
        scratch = sum(max(self.dtype_of[name].itemsize, self.d.register_bytes) for name in kernel.scratch)
        taken = self.room(self.held) + scratch
        self.divide(shape, words(taken))
        if not self.is_held() and self.holds_a_part():
            made, reads = self.to_make()
            if (fewer := self.room([*made, *reads])) < taken:
                self.made, self.held, self.again = dict.fromkeys(made, ""), reads, reads
                self.divide(shape, words(fewer))

    def to_hold(self) -> list[Expr]:
        """The reads that are made before anything is computed, if a row fits into registers. The others are made in
        parts when they are needed: data that all rows read is in a cache, and data for a later stage can wait."""
        stages = [self.ahead(exprs_of(s)) for s in self.k.stages]
        first = next((reads for reads in stages if reads), [])
        own = [e for e in dict.fromkeys(e for reads in stages for e in reads)
               if not self.around or e.attr[1][0].symbols() & self.around]
        self.again = [e for e in own if sum(e in reads for reads in stages) > 1]
        return [e for e in own if e in first or e in self.again]

    def room(self, exprs: Iterable[Expr]) -> int:
        """The bytes of registers that these values of one element take."""
        return sum(max(e.dtype.itemsize, self.d.register_bytes) for e in exprs)

    def to_make(self) -> tuple[list[Expr], list[Expr]]:
        """The data of a row's elements that later stages need again: computed values, where one takes fewer registers
        than the reads it is computed from, and reads."""
        before, wanted = set[Expr](), dict[Expr, None]()
        for stage in self.k.stages:
            exprs = exprs_of(stage)
            wanted.update(dict.fromkeys(e for e in outside(exprs, before) if e in before))
            before |= self.of_elements(exprs)
        made, reads = list[Expr](), dict[Expr, None]()
        for e in wanted:
            if self.room([e]) < self.room(own := [r for r in self.ahead([e]) if r in self.again]):
                made.append(e)
            else:
                reads.update(dict.fromkeys(own))
        return made, [*reads]

    def of_elements(self, exprs: Sequence[Expr]) -> set[Expr]:
        """The values computed from reads that can be held, and from nothing else that changes along a row."""
        inner, reads = frozenset(self.flat), {*self.ahead(exprs)}
        own, others = set[Expr](), set[Expr]()
        for e in walk(*exprs):
            below = (*index_children(e), *e.args)
            if e.op in ("local", "fold", "carry") or any(x in others for x in below) or \
                    e.op == "load" and e not in reads and e.attr[1][0].symbols() & inner:
                others.add(e)
            elif e in reads or any(x in own for x in below):
                own.add(e)
        return own

    def holds_a_part(self) -> bool:
        return bool(self.again or self.made) and not self.k.scratch and self.k.bounds is None

    def begin(self) -> str:
        return str(self.at_once()) if self.holds_a_part() and not self.is_held() else super().begin()

    def write(self) -> None:
        exprs = self.k.everything()
        whole = self.is_held()
        assert whole or not self.k.scratch, "rows that registers do not hold have nothing else"
        for name in sorted(self.k.scratch):
            self.line(f"{self.d.stored[self.dtype_of[name]]} {self.scratch(name)}[{self.each}];")
        self.look(self.ahead(exprs), self.full)
        if not whole:
            self.held = self.again if self.holds_a_part() else []
        with self.groups(self.k.outer):
            if self.held or self.made or whole:
                self.fetch(self.held, "0")
                self.first_kept = {name: self.array(self.dtypes[name], "w") for name in self.full}
            self.first_fetched = dict(self.fetched)
            self.made = {e: self.array(e.dtype, "m") for e in self.made}
            for stage in self.k.stages:
                self.stage(stage)

    def emit(self, e: Expr) -> tuple[int, str]:
        if e.op == "local" and self.holding and self.local(e.attr) is None:
            array = self.scratch(e.attr) if e.attr in self.k.scratch else self.kept[e.attr]
            return len(self.scopes) - 1, self.as_value(f"{array}[{self.current}]", e.dtype)
        return super().emit(e)

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: States) -> None:
        stored = [n for i in items if i.combine is None for n in i.names if n in self.full]
        # A work-item has the same points in every stage, so it may read back what it stored.
        if self.held or self.made or self.is_held():
            self.fetched, self.kept, self.holding = dict(self.first_fetched), self.first_kept, True
            with self.scope("{"):
                self.stretch(items, states, stored, "0")
            self.holding = False
        self.returns = self.k.bounds is None and not reductions and items[0] not in self.k.stages[0]
        if not self.is_held():
            with self.stretches() as base:
                self.fetched = {}
                self.kept = {name: self.array(self.dtypes[name], "w") for name in stored}
                self.stretch(items, states, stored, base)
        for i in reductions:
            states.update(zip(i.names, self.joined(i.joins, [states[n] for n in i.names]), strict=True))

    def stretch(self, items: Sequence[Item], states: States, stored: Sequence[str], base: str) -> None:
        """Writes a stage for the elements that work-items hold at once."""
        every, known = exprs_of(items), {*self.first_fetched} if self.holding else set[Expr]()
        reads = self.ahead([e for e in outside(every, known) if e.op == "load" and e not in known])
        now = [e for e in outside(every, known) if self.holding and e in self.made and e not in known]
        for _ in self.in_parts(bool(reads) and self.holding):
            self.fetch(reads, base)
            with self.every() as self.current, self.element(self.current, base, "skip"):
                for e in now:
                    self.line(f"{self.made[e]}[{self.current}] = {self.value(e)};")
                self.body(items, states)
            self.flush(stored, base)
        self.first_fetched.update((e, self.made[e]) for e in now)

    def map_item(self, item: Item) -> None:
        name = item.names[0]
        if name in self.k.scratch:
            text = self.value(item.exprs[0])
            self.scopes[-1].locals[name] = text
            self.line(f"{self.scratch(name)}[{self.current}] = {text};")
        else:
            super().map_item(item)

    def joined(self, c: Combine, states: Sequence[str]) -> list[str]:
        """The states of all work-items combined into one, which all of them get: four into one while there are four."""
        if self.group == self.wide:
            return list(states)
        own = self.across(c, states, self.d.step) if self.d.step else states
        if self.group == self.d.step and self.wide == 1:
            return list(own)
        arrays = self.shared(c.dtypes)
        if self._joined:
            self.line(self.d.barrier)  # the previous states have been read
        self._joined = True
        return self.joined_in_step(c, own, arrays) if self.d.step else self.joined_in_tree(c, own, arrays)

    def joined_in_tree(self, c: Combine, states: Sequence[str], arrays: Sequence[str]) -> list[str]:
        for array, state in zip(arrays, states, strict=True):
            self.line(f"{array}[{self.me}] = {state};")
        self.line(self.d.barrier)
        odd = (self.group // self.wide).bit_length() % 2 == 0
        if odd:
            self.fold(c, arrays, str(self.group // 2), 2)
        with self.scope(f"for (int h = {self.group >> odd + 2}; h >= {self.wide}; h /= 4) {{"):
            self.fold(c, arrays, "h", 4)
        names = []
        for array, dtype in zip(arrays, c.dtypes, strict=True):
            names.append(self.fresh("v"))
            self.line(f"const {self.d.types[dtype]} {names[-1]} = {array}[{self.point()}];")
        return names

    def point(self) -> str:
        """The index of a work-item's point among those side by side."""
        return f"{self.me} % {self.wide}" if self.wide > 1 else "0"

    def joined_in_step(self, c: Combine, own: Sequence[str], arrays: Sequence[str]) -> list[str]:
        """The same where work-items run in step: each SIMD group has combined its own states, and now every SIMD group
        combines those of all."""
        step, wide = self.d.step, self.wide
        count, first = self.group // max(step, wide), f"{self.me} / {step}"
        place = first if wide == 1 else self.me if wide >= step else f"{first} * {wide} + {self.me} % {step}"
        with nullcontext() if wide >= step else self.scope(f"if ({self.me} % {step} < {wide}) {{"):
            for array, state in zip(arrays, own, strict=True):
                self.line(f"{array}[{place}] = {state};")
        self.line(self.d.barrier)

        def values(at: str) -> list[str]:
            return [self.as_value(f"{array}[{at}]", dtype) for array, dtype in zip(arrays, c.dtypes, strict=True)]

        if wide == 1:
            return self.across(c, values(f"{self.me} % {count}"), count)
        names = [self.fresh("v") for _ in own]
        for name, text, dtype in zip(names, values(self.point()), c.dtypes, strict=True):
            self.variable(dtype, name, text)
        with self.scope(f"for (int h = 1; h < {count}; ++h) {{"):
            self.combine_into(c, names, values(f"h * {wide} + {self.point()}"))
        return names

    def across(self, c: Combine, texts: Sequence[str], count: int) -> list[str]:
        """The values of `count` neighbours combined. The order of operands affects rounding, so all neighbours take the
        result of the first."""
        if count <= self.wide:
            return list(texts)
        slots = [self.fresh("v") for _ in texts]
        for slot, text, dtype in zip(slots, texts, c.dtypes, strict=True):
            self.variable(dtype, slot, text)
        with self.scope(f"for (int h = {count // 2}; h >= {self.wide}; h /= 2) {{"):
            others = [self.fresh("o") for _ in slots]
            for other, slot, dtype in zip(others, slots, c.dtypes, strict=True):
                self.line(f"const {self.d.types[dtype]} {other} = {self.d.across.format(slot, 'h')};")
            self.combine_into(c, slots, others)
        if self.wide == 1:
            self.assign(slots, [self.d.of_one.format(slot, 0) for slot in slots])
        return slots

    def fold(self, c: Combine, arrays: Sequence[str], left: str, fan: int) -> None:
        with self.scope(f"if ({self.me} < {left}) {{"):
            for k in range(1, fan):
                self.combine_into(c, [f"{a}[{self.me}]" for a in arrays],
                                  [f"{a}[{self.me} + {k} * {left}]" for a in arrays])
        self.line(self.d.barrier)

    def keep(self, name: str, level: str, text: str) -> None:
        if level == "full":
            self.line(f"{self.kept[name]}[{self.current}] = {text};")
            return
        if name in self.read_too:
            self.line(self.d.finished_reads)
        with self.scope(f"if ({self.first()}) {{"):
            super().keep(name, level, text)

    def first(self) -> str:
        """The condition that a work-item is the one that stores the result of a point."""
        return f"{self.me} == 0"
