"""The common base of maps and reductions in C: values of earlier stages, items, and partial results in arrays of lanes.

A map walks its contiguous variable (`maps.py`). In a reduction, either the vector variable is reduced: each outer point
walks its row in lanes (`rows.py`). Or it is kept: the states of a block of columns are side by side while its rows are
walked (`columns.py`). Threads divide the outer points if there are many; else they divide the rows in chunks, whose
number depends on the sizes alone, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import Expr, cost_of, walk
from flambeau.ir.index import Index, Sym, as_index, is_positive
from flambeau.ir.program import Item, LoopKernel, exprs_of, identities_of, reductions_of
from flambeau.ir.tuning import CPU

from ..dialect import LANES, Dialect, Lanes, Shares, Steps
from ..stages import S, StageWriter
from .cascade_sums import CascadeWriter, Levels
from .loop_splitting import affordable, pieces, written
from .row_invariants import with_offsets


def offset_items(items: Sequence[Item], rows: Sequence[Sym], v: Sym) -> list[Item]:
    made = iter(with_offsets(exprs_of(items), rows, v))
    return [replace(i, exprs=tuple(next(made) for _ in i.exprs)) for i in items]


def widest_of(stage: Sequence[Item]) -> int:
    """The bytes of the widest component of a state."""
    return max(d.itemsize for i in reductions_of(stage) for d in i.dtypes)


class LoopWriter(StageWriter[S], CascadeWriter):
    def __init__(self, dialect: Dialect, kernel: LoopKernel) -> None:
        super().__init__(dialect, kernel)
        self.k = kernel
        self.address = dict(kernel.stores)
        self.cost = cost_of(exprs_of(kernel.items))
        self.level_of = {n: i.level if i.combine is None else "outer" for i in kernel.items for n in i.names}
        self.dtype_of = kernel.dtype_of()
        self.narrowed: dict[Sym, Index] = {}  # variables that are limited to a part of their range at the moment

    def render(self) -> list[str]:
        raise NotImplementedError

    # ---- reading what the kernel itself computed -------------------------------------------------------

    def emit(self, e: Expr) -> tuple[int, str]:
        if e.op == "local" and self.local(e.attr) is None:
            return len(self.scopes) - 1, self.reread(e.attr)
        return super().emit(e)

    def reread(self, name: str) -> str:
        """A value from an earlier stage: its place in the scratch row, or memory."""
        if name in self.k.scratch:
            return f"s_{self.slot(name)}[{self.index(self.k.inner_position())}]"
        return self.read(name, self.index(self.address[name]), self.dtype_of[name])

    def slot(self, name: str) -> str:
        return str(list(self.level_of).index(name))

    # ---- items ---------------------------------------------------------------------------------------

    def map_item(self, item: Item) -> None:
        name = item.names[0]
        text = self.value(item.exprs[0].subs(self.narrowed))
        if item.level == "outer":
            self.hold(name, text)
        self.scopes[-1].locals[name] = text
        if name in self.k.scratch:
            self.line(f"s_{self.slot(name)}[{self.index(self.k.inner_position())}] = {text};")
        if name in self.address:
            self.store(name, self.address[name].subs(self.narrowed), text)

    def hold(self, name: str, text: str) -> None:
        """Keeps a value of the outer point for the stages that follow."""

    def become(self, name: str, text: str) -> None:
        held = self.fresh("v")  # a register, not an array element that every later loop would read again
        self.line(f"const {self.d.types[self.dtype_of[name]]} {held} = {text};")
        super().become(name, held)

    def keep(self, name: str, level: str, text: str) -> None:
        self.store(name, self.address[name], text)

    @contextmanager
    def inside(self, v: Sym, lo: int, hi: int) -> Iterator[None]:
        """Limits v to [lo, hi) within this block: comparisons that this decides are removed."""
        narrow = Sym(v.name, v.size, lo, hi - 1)
        self.names[narrow] = self.sym(v)
        self.ranges[v] = (str(lo), str(hi), narrow)
        before, self.narrowed = self.narrowed, {**self.narrowed, v: as_index(narrow)}
        yield
        self.narrowed = before
        del self.ranges[v]

    def at_once(self, exprs: Sequence[Expr], points: int, size: int) -> Lanes:
        """A vector loop over so many points, unless the unrolled text would be long for a compiler."""
        return Lanes(points, size) if written(exprs) * CPU.bodies <= CPU.copied else LANES

    @staticmethod
    def step_of(exprs: Sequence[Expr]) -> int:
        """The number of lanes of a vector of the widest dtype that is computed with."""
        return CPU.line_bytes // max((4, *(e.dtype.itemsize for e in walk(*exprs) if is_float(e.dtype))))

    def halving(self, exprs: Sequence[Expr], length: int) -> list[tuple[str, str]]:
        """Parts of a loop of that length that each fill a vector, or a half or a quarter of one: what is left after
        whole vectors, a compiler computes by halves and then one by one."""
        lanes = self.step_of(exprs)
        sizes = [length // lanes * lanes, *(length & few for k in range(1, lanes.bit_length())
                                            for few in (lanes >> k,))]
        sizes = [n for n in sizes if n]
        if (not CPU.is_ragged(length, CPU.line_bytes // lanes) or cost_of(exprs) < CPU.flat_work
                or len(sizes) * written(exprs) > CPU.copied):
            return [("0", str(length))]
        ends = [*accumulate(sizes)]
        return [(str(end - n), str(end)) for n, end in zip(sizes, ends, strict=True)]

    def vector_loop(self, v: Sym, lo: str, hi: str, items: Sequence[Item]) -> None:
        """Writes the innermost loop of a map, split where its masks change (padding, the parts of a concatenation) and
        where an index stops at a border, so that the long parts have neither."""
        exprs = [e.subs(self.narrowed) for i in items for e in i.exprs]
        whole = lo == "0" and hi == self.extent(v)
        parts = pieces(exprs, v, addresses=True)
        long = [(a, b) for a, b in parts if b - a >= CPU.shortest_part]
        if len(parts) < 2 or 2 * sum(b - a for a, b in long) < parts[-1][1] or not affordable(exprs, v, long):
            size = max((self.dtypes[name].itemsize for name, _ in self.k.accesses()), default=1)
            points = CPU.lane_bytes // size
            even = whole and v.size.is_const and v.size.const % points == 0
            how = self.at_once(exprs, points, size) if even else LANES
            for a, b in self.halving(exprs, v.size.const) if whole and v.size.is_const else [(lo, hi)]:
                self.map_loop(v, a, b, items, how)
            return
        for first, last in long:
            with self.inside(v, first, last):
                self.map_loop(v, str(first) if whole else f"{self.fl}imax({lo}, {first})",
                              str(last) if whole else f"{self.fl}imin({hi}, {last})", items, LANES)
        if len(long) == len(parts):
            return
        # Short ends and gaps are left: one plain loop covers them and skips the long parts.
        name = self.sym(v)
        next_ = name
        for first, last in long:
            next_ = f"{self.fl}past({next_}, {first}, {last})"
        header = f"for ({self.d.long} {name} = {lo}; ({name} = {next_}) < {hi}; ++{name}) {{"
        before, self.unroll = self.unroll, self.unroll if written(exprs) <= CPU.copied else 0
        with self.scope(header, (v,)):
            for i in items:
                self.map_item(i)
        self.unroll = before

    def map_loop(self, v: Sym, lo: str, hi: str, items: Sequence[Item], how: Steps | None) -> None:
        """A vector loop over v; window loops inside run in lockstep for all lanes."""
        exprs = [e.subs(self.narrowed) for i in items for e in i.exprs]
        with self.in_step(exprs, v, lo, hi, how) as (first, end), self.loop(v, first, end, how=how) as s:
            s.known.update(self.windows)
            for i in items:
                self.map_item(i)

    def side_by_side(self, values: Sequence[Expr], v: Sym, start: str, end: str, width: int) -> dict[Expr, str]:
        """Computes values at the points of a block, each into an array; returns how to read them there."""
        known = {}
        for e in values:
            array = self.fresh("h")
            self.line(f"alignas(64) {self.d.types[e.dtype]} {array}[{width}];")
            known[e] = f"{array}[{self.sym(v)} - {start}]"
        with self.loop(v, start, end, how=LANES):
            for e, place in known.items():
                self.line(f"{place} = {self.value(e)};")
        return known

    # ---- states --------------------------------------------------------------------------------------

    def arrays(self, reductions: Sequence[Item], count: int, prefix: str = "a") -> dict[str, str]:
        """One array of states per component, filled with the identity."""
        names: dict[str, str] = {}
        for name, identity in identities_of(reductions):
            names[name] = self.fresh(prefix)
            self.line(f"alignas(64) {self.d.types[identity.dtype]} {names[name]}[{count}];")
            self.fill(names[name], count, identity)
        return names

    def fill(self, array: str, count: int | str, identity: Expr) -> None:
        start = self.d.constant(identity.attr, identity.dtype)
        self.line(f"for (int l = 0; l < {count}; ++l) {array}[l] = {start};")

    def join(self, reductions: Sequence[Item], into: dict[str, str], parts: dict[str, str], there: str = "l") -> None:
        """Combines lane l of some states with a lane of others."""
        for i in reductions:
            self.combine_into(i.joins, [f"{into[n]}[l]" for n in i.names], [f"{parts[n]}[{there}]" for n in i.names])

    def take(self, i: Item, states: dict[str, str], at: str) -> None:
        """Combines the values of an item into the states of a lane."""
        slots = [f"{states[n]}[{at}]" for n in i.names if n in states]
        if i.joins.name == "sum" and (factors := self.factors(i.exprs[0])) is not None:
            self.line(f"{slots[0]} = {self.plus(slots[0], factors)};")
        else:
            self.combine_into(i.joins, slots, [self.value(e) for e in i.exprs])

    @contextmanager
    def parts(self, lo: str, hi: str, size: int, levels: Levels | None) -> Iterator[tuple[str, str]]:
        """Loops from lo to hi in parts of this size; after each part the states move up a level. The loop over a part
        does nothing else, so that the states can stay in registers."""
        if levels is None:
            yield lo, hi
            return
        start, end = self.fresh("z"), self.fresh("e")
        with self.scope(f"for ({self.d.long} {start} = {lo}; {start} < {hi}; {start} += {size}) {{", (Sym(start),)):
            self.line(f"const {self.d.long} {end} = {self.fl}imin({start} + {size}, {hi});")
            yield start, end
            self.rise(levels)

    def chunks(self, total: Index, least: int, unit: int = 1) -> tuple[str, str, Index | None]:
        """The number of chunks, the length of one, and this length if it is constant; all from the sizes alone."""
        if total.is_const:
            size = max(least, -(-total.const // CPU.chunks))
            size = -(-size // unit) * unit
            return str(-(-total.const // size)), str(size), as_index(size)
        size_name = self.fresh("z")
        even = f"({self.index(total)} + {CPU.chunks - 1}) / {CPU.chunks}"
        self.line(f"const {self.d.long} {size_name} = {self.fl}imax({least}, {even});")
        count = self.fresh("m")
        # At least one chunk, whose states hold the identity.
        needed = f"({self.index(total)} + {size_name} - 1) / {size_name}"
        needed = needed if is_positive(total) else f"{self.fl}imax(1, {needed})"
        self.line(f"const {self.d.long} {count} = {needed};")
        return count, size_name, None

    def shared(self) -> Shares | None:
        amount = self.work((*self.k.outer, *self.k.inner), self.cost)
        small = amount is not None and amount < CPU.serial_shared
        return None if small else Shares()
