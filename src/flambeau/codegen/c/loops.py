"""Maps and reductions: how a LoopKernel becomes loops.

Row form: the vector variable is reduced. Each outer point walks its row in lanes, every lane with its own state,
and joins the lanes at the end. Column form: the vector variable is kept. A block of columns has its states side by
side and the rows go past. With many outer points threads divide those; with few, they divide the rows in chunks
whose number depends on the sizes alone, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from flambeau.ir.cost import cost_of
from flambeau.ir.expr import Expr, loads, rewrite, walk
from flambeau.ir.index import Index, Sym, as_index, ceildiv, is_positive, volume
from flambeau.ir.program import Item, LoopKernel, exprs_of, identities_of, reductions_of

from ..writer import APART, LANES, Dialect, Lanes, Scope, Shares, Steps
from .cascade_sums import FEW, JOINS, ROWS, CascadeWriter, Levels
from .loop_splitting import COPIED, SHORTEST, affordable, pieces, written
from .row_invariants import ROOM, WORTH, best_shared, gain, shared_values, with_offsets

LANE_BYTES = 128  # state of one reduction across its lanes: two vectors of 64 bytes
ABREAST = 4  # bodies that a compiler may write side by side, so that their vectors are under way at once
STEPS = 4  # of all lanes, that a row has at least; a shorter one has half as many lanes, as these must be joined
BLOCK = 512  # columns that are reduced side by side
REGISTERS = 512  # bytes of states that stay in registers
IN_STEP = 1024  # bytes of states of a block of columns that compilers keep in registers while rows go past
CHUNKS = 64  # parts of a long row
MANY = 32  # outer points that are enough to keep threads busy
TILE, LINE, GAP = 64, 256, 8  # its points one way, bytes the other way; between lines, which would meet in the cache
STACK = 1 << 20  # bytes that the states of a block of columns may take in all its chunks
SERIAL_SHARED = 65536  # element operations of a shared row below which threads cost more than they bring


def offset_items(items: Sequence[Item], rows: Sequence[Sym], v: Sym) -> list[Item]:
    made = iter(with_offsets(exprs_of(items), rows, v))
    return [replace(i, exprs=tuple(next(made) for _ in i.exprs)) for i in items]


def widest_of(stage: Sequence[Item]) -> int:
    """Bytes of the widest component of a state."""
    return max(d.itemsize for i in reductions_of(stage) for d in i.dtypes)


class LoopWriter(CascadeWriter):
    def __init__(self, dialect: Dialect, kernel: LoopKernel) -> None:
        super().__init__(dialect, kernel)
        self.k = kernel
        self.address = dict(kernel.stores)
        self.cost = cost_of(exprs_of(kernel.items))
        self.column = bool(kernel.inner) and kernel.vector in kernel.outer
        self.level_of = {n: i.level if i.combine is None else "outer" for i in kernel.items for n in i.names}
        self.dtype_of = kernel.dtype_of()
        self.origin: str | None = None  # first column of the current block
        self.shared_by_rows: dict[Expr, str] = {}  # what is the same for all rows of a block of columns
        self.narrowed: dict[Sym, Index] = {}  # variables that are known to stay in a part of their range, for now

    def render(self) -> list[str]:
        if not self.k.inner:
            self.pointwise()
        elif self.column:
            self.columns()
        else:
            self.rows()
        return self.scopes[0].lines

    # ---- reading what the kernel itself computed -------------------------------------------------------

    def emit(self, e: Expr) -> tuple[int, str]:
        if e.op == "local" and self.local(e.attr) is None:
            return len(self.scopes) - 1, self.reread(e.attr)
        return super().emit(e)

    def reread(self, name: str) -> str:
        """A value from an earlier stage: its column slot, its place in the scratch row, or memory."""
        if self.column and self.level_of[name] == "outer":
            assert self.k.vector is not None
            return f"o_{self.slot(name)}[{self.sym(self.k.vector)} - {self.origin}]"
        if name in self.k.scratch:
            return f"s_{self.slot(name)}[{self.index(self.k.inner_position())}]"
        return self.read(name, self.index(self.address[name]), self.dtype_of[name])

    def slot(self, name: str) -> str:
        return str(list(self.level_of).index(name))

    # ---- items ---------------------------------------------------------------------------------------

    def map_item(self, item: Item) -> None:
        name = item.names[0]
        text = self.value(item.exprs[0].subs(self.narrowed))
        if item.level == "outer" and self.column:
            assert self.k.vector is not None
            self.line(f"o_{self.slot(name)}[{self.sym(self.k.vector)} - {self.origin}] = {text};")
        self.scopes[-1].locals[name] = text
        if name in self.k.scratch:
            self.line(f"s_{self.slot(name)}[{self.index(self.k.inner_position())}] = {text};")
        if name in self.address:
            self.store(name, self.address[name].subs(self.narrowed), text)

    @contextmanager
    def inside(self, v: Sym, lo: int, hi: int) -> Iterator[None]:
        """Within this block v is known to lie in [lo, hi): comparisons that this decides fall away."""
        narrow = Sym(v.name, v.size, lo, hi - 1)
        self.names[narrow] = self.sym(v)
        self.ranges[v] = (str(lo), str(hi), narrow)
        before, self.narrowed = self.narrowed, {**self.narrowed, v: as_index(narrow)}
        yield
        self.narrowed = before
        del self.ranges[v]

    def vector_loop(self, v: Sym, lo: str, hi: str, items: Sequence[Item]) -> None:
        """The innermost loop of a map, cut where its masks change (padding, the parts of a concatenation) and where
        an index stops at a border, so that the long parts have none of that."""
        exprs = [e.subs(self.narrowed) for i in items for e in i.exprs]
        whole = lo == "0" and hi == self.extent(v)
        parts = pieces(exprs, v, addresses=True)
        long = [(a, b) for a, b in parts if b - a >= SHORTEST]
        if len(parts) < 2 or 2 * sum(b - a for a, b in long) < parts[-1][1] or not affordable(exprs, v, long):
            size = max((self.dtypes[name].itemsize for name, _ in self.k.accesses()), default=1)
            points = LANE_BYTES // size
            even = whole and v.size.is_const and v.size.const % points == 0
            self.map_loop(v, lo, hi, items, self.at_once(exprs, points, size) if even else LANES)
            return
        for a, b in long:
            with self.inside(v, a, b):
                self.map_loop(v, str(a) if whole else f"{self.fl}imax({lo}, {a})",
                              str(b) if whole else f"{self.fl}imin({hi}, {b})", items, LANES)
        if len(long) == len(parts):
            return
        # What is left are short ends and gaps: one plain loop steps over the long parts.
        name = self.sym(v)
        next_ = name
        for a, b in long:
            next_ = f"{self.fl}past({next_}, {a}, {b})"
        header = f"for ({self.d.long} {name} = {lo}; ({name} = {next_}) < {hi}; ++{name}) {{"
        before, self.unroll = self.unroll, self.unroll if written(exprs) <= COPIED else 0
        with self.scope(header, (v,)):
            for i in items:
                self.map_item(i)
        self.unroll = before

    def at_once(self, exprs: Sequence[Expr], points: int, size: int) -> Lanes:
        """So many points side by side, unless that would be much text for a compiler."""
        return Lanes(points, size) if written(exprs) * ABREAST <= COPIED else LANES

    def map_loop(self, v: Sym, lo: str, hi: str, items: Sequence[Item], how: Steps | None) -> None:
        """The points of v side by side; their windows, where those stay loops, in step."""
        exprs = [e.subs(self.narrowed) for i in items for e in i.exprs]
        with self.in_step(exprs, v, lo, hi, how) as (first, end), self.loop(v, first, end, how=how) as s:
            s.known.update(self.windows)
            for i in items:
                self.map_item(i)

    def finish(self, item: Item, texts: Sequence[str]) -> None:
        """A reduction's results become outer values (and memory, if anybody else wants them)."""
        for name, text in zip(item.names, texts, strict=True):
            held = self.fresh("v")  # a register, not an array element that every later loop would read again
            self.line(f"const {self.d.types[self.dtype_of[name]]} {held} = {text};")
            text = held
            self.scopes[-1].locals[name] = text
            if name in self.address:
                self.store(name, self.address[name], text)

    # ---- pointwise -----------------------------------------------------------------------------------

    def pointwise(self) -> None:
        k = self.k
        items = k.items
        if k.tile is not None:
            self.tiled(items)
            return
        v = k.vector
        if v is None:
            with self.nest(k.outer, self.parallel(k.outer, self.cost, len(k.outer)) if k.outer else None):
                for i in items:
                    self.map_item(i)
            return
        others = tuple(x for x in k.outer if x is not v)
        shared = best_shared(exprs_of(items), others, v)
        if shared is not None:
            self.rows_that_share(others, shared, v, items)
            return
        amount = self.work(others, 1)
        long = not v.size.is_const or v.size.const >= 8192
        if not others or (amount is not None and amount < MANY and long):
            self.chunked(others, v, items)
            return
        if is_positive(volume(others)):  # where there are no rows, eager does not look at the index either
            items = self.settled(items, v)
        exprs = exprs_of(items)
        for w in others:
            parts = pieces(exprs, w)
            if len(parts) > 1 and affordable(exprs, w, parts):
                for a, b in parts:
                    with self.inside(w, a, b):
                        self.vectors(others, v, items)
                return
        self.vectors(others, v, items)

    def rows_that_share(self, others: tuple[Sym, ...], c: Sym, v: Sym, items: Sequence[Item]) -> None:
        """For a block of points first what is the same for all c, then each c."""
        items = offset_items(items, (c,), v)
        values = shared_values(exprs_of(items), (c,), v)
        if not values:  # what seemed shared was an offset
            self.vectors(others, v, items)
            return
        width = max(64, min(512, ROOM // sum(e.dtype.itemsize for e in values) // 64 * 64))
        block = Sym(f"{v.name}s", v.size)
        start, end = self.sym(block), self.fresh("e")
        outer = tuple(x for x in others if x is not c)
        how = self.parallel(self.k.outer, self.cost, len(outer) + 1)
        with self.nest(outer, how, (block, self.extent(v), str(width))):
            self.line(f"const {self.d.long} {end} = {self.fl}imin({start} + {width}, {self.extent(v)});")
            known = self.side_by_side(values, v, start, end, width)
            with self.loop(c, "0", self.extent(c)), self.loop(v, start, end, how=LANES) as s:
                s.known.update(known)
                for i in items:
                    self.map_item(i)

    def side_by_side(self, values: Sequence[Expr], v: Sym, start: str, end: str, width: int) -> dict[Expr, str]:
        """Values at the points of a block, each in an array of its own: how to read them there."""
        known = {}
        for e in values:
            array = self.fresh("h")
            self.line(f"alignas(64) {self.d.types[e.dtype]} {array}[{width}];")
            known[e] = f"{array}[{self.sym(v)} - {start}]"
        with self.loop(v, start, end, how=LANES):
            for e, place in known.items():
                self.line(f"{place} = {self.value(e)};")
        return known

    def settled(self, items: list[Item], v: Sym) -> list[Item]:
        """An index that is the same in every row is checked once, before them all."""
        loops = frozenset(self.k.outer)
        again = [e for e in walk(*exprs_of(items))
                 if e.op == "check" and len(e.args) == 1 and e.symbols() & loops == {v}]
        if not again:
            return items
        with self.loop(v, "0", self.extent(v), how=LANES):
            for e in again:
                self.value(e)
        self.line("if (bad) return bad;")
        memo: dict[Expr, Expr] = {}

        def trusted(e: Expr) -> Expr:
            return e.args[0] if e in again else e

        return [replace(i, exprs=tuple(rewrite(e, trusted, None, memo) for e in i.exprs)) for i in items]

    def vectors(self, others: tuple[Sym, ...], v: Sym, items: Sequence[Item]) -> None:
        k = self.k
        with self.nest(others, self.parallel(k.outer, self.cost, len(others))):
            self.prefetch(exprs_of(items), others[-1], v)
            self.vector_loop(v, "0", self.extent(v), items)

    def chunked(self, others: tuple[Sym, ...], v: Sym, items: Sequence[Item]) -> None:
        """Few or no outer points: the contiguous variable itself is divided."""
        part = Sym(f"{v.name}b", v.size)
        step = 4096
        how = self.parallel(self.k.outer, self.cost, len(others) + 1)
        if not how:
            with self.nest(others):
                self.vector_loop(v, "0", self.extent(v), items)
            return
        with self.nest(others, how, (part, self.extent(v), str(step))):
            end = self.fresh("e")
            self.line(f"const {self.d.long} {end} = {self.fl}imin({self.sym(part)} + {step}, {self.extent(v)});")
            self.vector_loop(v, self.sym(part), end, items)

    def tiled(self, items: Sequence[Item]) -> None:
        """Two variables are each contiguous somewhere: walk them in tiles that fit the first cache.

        What is contiguous along the second one is turned around first: lines that lie a power of two apart would want
        the same place in the cache, and so each of them is read and written as a whole."""
        v, t = self.k.vector, self.k.tile
        assert v is not None and t is not None
        others = tuple(x for x in self.k.outer if x is not v and x is not t)
        tb, vb = Sym(f"{t.name}b", t.size), Sym(f"{v.name}b", v.size)
        how = self.parallel(self.k.outer, self.cost, len(others) + 2)
        turned = {e: self.fresh("turned") for e in self.k.turned()}
        side = TILE if turned else TILE // 2
        high = max(LINE // sum(e.dtype.itemsize for e in turned), 1) if turned else side
        with self.nest(others, how, (tb, self.extent(t), str(high)), (vb, self.extent(v), str(side))):
            ends = {}
            for b, x, n in ((tb, t, high), (vb, v, side)):
                ends[x] = self.end_of(self.sym(b), n, x.size)
            place = f"[({self.sym(t)} - {self.sym(tb)}) * {side + GAP} + {self.sym(v)} - {self.sym(vb)}]"
            for e, array in turned.items():
                self.line(f"alignas(64) {self.d.types[e.dtype]} {array}[{high * (side + GAP)}];")
                with self.loop(v, self.sym(vb), ends[v]), self.loop(t, self.sym(tb), ends[t], how=APART):
                    self.line(f"{array}{place} = {self.value(e)};")
            with self.loop(t, self.sym(tb), ends[t]), \
                    self.loop(v, self.sym(vb), ends[v], how=LANES) as scope:
                scope.known.update({e: array + place for e, array in turned.items()})
                for i in items:
                    self.map_item(i)

    # ---- rows ----------------------------------------------------------------------------------------

    def is_long(self, points: Index) -> bool:
        """Few outer points and long rows: threads must share a row."""
        length = volume(self.k.inner)
        few = points.is_const and points.const < MANY
        return few and self.k.bounds is None and (not length.is_const or length.const >= 8192)

    def rows(self) -> None:
        k = self.k
        points = volume(k.outer)
        if self.is_long(points):
            with self.nest(k.outer):
                self.stages(self.row_stage_chunked, self.outer_stage)
            return
        how = self.parallel((*k.outer, *k.inner), self.cost, len(k.outer)) if k.outer else None
        with self.nest(k.outer, how):
            for name in sorted(k.scratch):
                kind = self.d.types[self.dtype_of[name]]
                self.line(f"alignas(64) {kind} s_{self.slot(name)}[{self.index(volume(self.k.inner))}];")
            self.stages(self.row_stage, self.outer_stage)

    def stages(self, full: Callable[[Sequence[Item]], None], outer: Callable[[Sequence[Item]], None]) -> None:
        for stage in self.k.stages:
            (outer if stage[0].level == "outer" and stage[0].combine is None else full)(stage)

    def outer_stage(self, stage: Sequence[Item]) -> None:
        for i in stage:
            self.map_item(i)

    def lanes(self, reductions: Sequence[Item], length: Index | None) -> int:
        n = LANE_BYTES // widest_of(reductions)
        if length is None or not length.is_const:
            return n
        if n * STEPS > length.const:
            n //= 2
        while n > 1 and n > length.const:
            n //= 2
        return n

    def declare(self, reductions: Sequence[Item], count: int, prefix: str = "a") -> dict[str, str]:
        """One array of states per component, filled with the identity."""
        names: dict[str, str] = {}
        for name, identity in identities_of(reductions):
            names[name] = self.fresh(prefix)
            self.line(f"alignas(64) {self.d.types[identity.dtype]} {names[name]}[{count}];")
            self.fill(names[name], count, identity)
        return names

    def fill(self, array: str, count: int, identity: Expr) -> None:
        start = self.d.constant(identity.attr, identity.dtype)
        self.line(f"for (int l = 0; l < {count}; ++l) {array}[l] = {start};")

    def join(self, reductions: Sequence[Item], into: dict[str, str], parts: dict[str, str], there: str = "l") -> None:
        """Lane l of some states with a lane of others."""
        for i in reductions:
            self.combine_into(i.joins, [f"{into[n]}[l]" for n in i.names], [f"{parts[n]}[{there}]" for n in i.names])

    def join_lanes(self, reductions: Sequence[Item], arrays: dict[str, str], lanes: int,
                   joined: Callable[[int], None] = lambda lanes: None) -> None:
        """Halves onto halves, each written out: a loop whose length changes does not become vectors."""
        half = lanes // 2
        while half:
            with self.scope(f"for (int l = 0; l < {half}; ++l) {{", how=LANES):
                self.join(reductions, arrays, arrays, f"l + {half}")
            joined(half)
            half //= 2

    def lane_body(self, stage: Sequence[Item], arrays: dict[str, str], at: str) -> None:
        for i in stage:
            slots = [f"{arrays[n]}[{at}]" for n in i.names if n in arrays]
            if i.combine is None:
                self.map_item(i)
            elif i.combine.name == "sum" and (factors := self.factors(i.exprs[0])) is not None:
                self.line(f"{slots[0]} = {self.plus(slots[0], factors)};")
            else:
                self.combine_into(i.joins, slots, [self.value(e) for e in i.exprs])

    def row_walk(self, stage: Sequence[Item], arrays: dict[str, str], lanes: int, lo: str, hi: str,
                 length: Index | None) -> None:
        """The innermost variable from lo to hi, in whole steps of all lanes and a rest."""
        v = self.k.inner[-1]
        name = self.sym(v)
        if not arrays:
            with self.loop(v, lo, hi, how=LANES):
                self.lane_body(stage, arrays, "0")
            return
        if lanes == 1:
            with self.loop(v, lo, hi):
                self.lane_body(stage, arrays, "0")
            return
        start = self.fresh("r")
        with self.scope("{"):
            self.line(f"{self.d.long} {start} = {lo};")
            simd = self.at_once(exprs_of(stage), lanes, widest_of(stage))
            with self.scope(f"for (; {start} + {lanes} <= {hi}; {start} += {lanes}) {{"), \
                    self.scope(f"for (int l = 0; l < {lanes}; ++l) {{", (v,), how=simd):
                self.line(f"const {self.d.long} {name} = {start} + l;")
                self.lane_body(stage, arrays, "l")
            if not (length is not None and length.is_const and length.const % lanes == 0 and lo == "0"):
                # At most lanes - 1 elements are left; the bound says so to the compiler.
                with self.scope(f"for (int l = 0; l < {lanes - 1} && {start} + l < {hi}; ++l) {{", (v,)):
                    self.line(f"const {self.d.long} {name} = {start} + l;")
                    self.lane_body(stage, arrays, "l")

    def row_stage(self, stage: Sequence[Item]) -> None:
        k = self.k
        reductions = reductions_of(stage)
        v = k.inner[-1]
        segment = k.bounds is not None
        length = None if segment else v.size
        lanes = self.lanes(reductions, length) if reductions else 1
        lo, hi = ("0", self.extent(v)) if k.bounds is None else (self.value(k.bounds[0]), self.value(k.bounds[1]))
        arrays = self.declare(reductions, lanes)
        rest = length.const % lanes if length is not None and length.is_const and len(k.inner) == 1 else 0
        copies = bin(rest).count("1") * sum(1 for _ in walk(*exprs_of(stage)))
        if rest and copies <= COPIED:
            self.row_with_rest(stage, reductions, arrays, lanes, rest)
        elif segment:
            self.row_walk(stage, arrays, lanes, lo, hi, None)
            self.join_lanes(reductions, arrays, lanes)
        else:
            self.row_nest(stage, reductions, arrays, lanes, hi, length)
            self.join_lanes(reductions, arrays, lanes)
        for i in reductions:
            self.finish(i, [f"{arrays[n]}[0]" for n in i.names])

    def row_with_rest(self, stage: Sequence[Item], reductions: Sequence[Item], arrays: dict[str, str], lanes: int,
                      rest: int) -> None:
        """What is left of a row when all lanes were served joins them as these become fewer: 16, 8, 4, 2, 1 at a time.
        A state then stays in its register, where a loop over some of its lanes would send it through memory."""
        v = self.k.inner[-1]
        whole = v.size.const - rest
        self.row_nest(stage, reductions, arrays, lanes, str(whole), as_index(whole))

        def joined(width: int) -> None:
            if rest & width:
                at = whole + (rest & ~(2 * width - 1))
                with self.scope(f"for (int l = 0; l < {width}; ++l) {{", (v,), how=LANES):
                    self.line(f"const {self.d.long} {self.sym(v)} = {at} + l;")
                    self.lane_body(stage, arrays, "l")

        self.join_lanes(reductions, arrays, lanes, joined)

    def row_nest(self, stage: Sequence[Item], reductions: Sequence[Item], arrays: dict[str, str], lanes: int, hi: str,
                 length: Index | None) -> None:
        """One row, or all rows of a nest. Short ones rise by a level several at a time, long ones in parts."""
        outer = self.k.inner[:-1]
        assert length is not None
        steps = ceildiv(length, lanes)
        rows = volume(outer)
        if steps.is_const and steps.const <= 4 * FEW:  # lanes have small shares of the error
            levels = self.levels(reductions, arrays, lanes, rows, max(1, FEW // max(1, steps.const)))

            def row() -> None:
                self.row_walk(stage, arrays, lanes, "0", hi, length)
                self.rise(levels)
        else:
            levels = self.levels(reductions, arrays, lanes, rows * ceildiv(steps, FEW), 1)

            def row() -> None:
                self.row_parts(stage, arrays, lanes, "0", hi, levels, length)

        self.nested(outer, row)
        self.top(levels)

    def row_parts(self, stage: Sequence[Item], arrays: dict[str, str], lanes: int, lo: str, hi: str,
                  levels: Levels | None, length: Index | None = None) -> None:
        if levels is None:
            self.row_walk(stage, arrays, lanes, lo, hi, length)
            return
        with self.parts(lo, hi, FEW * lanes, levels) as (start, end):
            self.row_walk(stage, arrays, lanes, start, end, None)

    @contextmanager
    def parts(self, lo: str, hi: str, size: int, levels: Levels | None) -> Iterator[tuple[str, str]]:
        """From lo to hi in parts of this size, after each of which the states rise; in the loop over a part nothing
        else happens, so that they can stay in registers."""
        if levels is None:
            yield lo, hi
            return
        start, end = self.fresh("z"), self.fresh("e")
        with self.scope(f"for ({self.d.long} {start} = {lo}; {start} < {hi}; {start} += {size}) {{", (Sym(start),)):
            self.line(f"const {self.d.long} {end} = {self.fl}imin({start} + {size}, {hi});")
            yield start, end
            self.rise(levels)

    # ---- rows shared by threads ------------------------------------------------------------------------

    def chunks(self, total: Index, least: int, unit: int = 1) -> tuple[str, str, Index | None]:
        """(number of chunks, length of one, this length if it is certain) from the sizes alone."""
        if total.is_const:
            size = max(least, -(-total.const // CHUNKS))
            size = -(-size // unit) * unit
            return str(-(-total.const // size)), str(size), as_index(size)
        size_name = self.fresh("z")
        even = f"({self.index(total)} + {CHUNKS - 1}) / {CHUNKS}"
        self.line(f"const {self.d.long} {size_name} = {self.fl}imax({least}, {even});")
        count = self.fresh("m")
        # At least one, in which states have their identity.
        needed = f"({self.index(total)} + {size_name} - 1) / {size_name}"
        needed = needed if is_positive(total) else f"{self.fl}imax(1, {needed})"
        self.line(f"const {self.d.long} {count} = {needed};")
        return count, size_name, None

    def shared(self) -> Shares | None:
        amount = self.work((*self.k.outer, *self.k.inner), self.cost)
        small = amount is not None and amount < SERIAL_SHARED
        return None if small else Shares()

    def row_stage_chunked(self, stage: Sequence[Item]) -> None:
        k = self.k
        reductions = reductions_of(stage)
        single = len(k.inner) == 1
        v = k.inner[-1]
        split = volume(k.inner if single else k.inner[:-1])
        count, size, certain = self.chunks(split, 4096 if single else 1, 64 if single else 1)
        partial = self.declare(reductions, CHUNKS, "part")
        chunk, lo, hi = self.fresh("ch"), self.fresh("lo"), self.fresh("hi")
        marker = Sym(chunk, CHUNKS)
        with self.scope(f"for ({self.d.long} {chunk} = 0; {chunk} < {count}; ++{chunk}) {{", (marker,),
                        how=self.shared()):
            self.line(f"const {self.d.long} {lo} = {chunk} * {size}, "
                      f"{hi} = {self.fl}imin({lo} + {size}, {self.index(split)});")
            lanes = self.lanes(reductions, v.size) if reductions else 1
            arrays = self.declare(reductions, lanes)
            steps = certain if single or certain is None else certain * v.size
            levels = self.levels(reductions, arrays, lanes, steps and ceildiv(steps, FEW * lanes), 1)
            if single:
                self.row_parts(stage, arrays, lanes, lo, hi, levels)
            else:
                flat = self.fresh("fl")
                with self.scope(f"for ({self.d.long} {flat} = {lo}; {flat} < {hi}; ++{flat}) {{", k.inner[:-1]):
                    self.decompose(flat, k.inner[:-1])
                    self.row_parts(stage, arrays, lanes, "0", self.extent(v), levels, v.size)
            self.top(levels)
            self.join_lanes(reductions, arrays, lanes)
            for i in reductions:
                for n in i.names:
                    self.line(f"{partial[n]}[{chunk}] = {arrays[n]}[0];")
        self.join_chunks(reductions, partial, count)
        for i in reductions:
            self.finish(i, [f"{partial[n]}[0]" for n in i.names])

    def join_chunks(self, reductions: Sequence[Item], partial: dict[str, str], count: str) -> None:
        """Neighbours first, then neighbours of neighbours: rounding grows with the logarithm."""
        if not reductions or count == "1":
            return
        with self.scope(f"for (int h = 1; h < {count}; h *= 2) {{"), \
                self.scope(f"for (int l = 0; l + h < {count}; l += 2 * h) {{"):
            self.join(reductions, partial, partial, "l + h")

    # ---- columns -------------------------------------------------------------------------------------

    def columns(self) -> None:
        k = self.k
        v = k.vector
        assert v is not None
        others = tuple(x for x in k.outer if x is not v)
        width = max(1, min(BLOCK, v.size.const)) if v.size.is_const else BLOCK
        if k.bounds is not None:
            width = self.in_registers(v.size, width)
        blocks = ceildiv(v.size, width) * volume(others)
        long = self.is_long(blocks)
        if long:
            state = sum(self.dtype_of[n].itemsize for n, level in self.level_of.items() if level == "outer")
            width = min(width, max(16, STACK // (CHUNKS * state) // 16 * 16))
        self.width = width
        single = blocks.is_const and v.size.is_const and v.size.const == width
        block = Sym(f"{v.name}b", v.size)
        self.origin = "0" if single else self.sym(block)
        how = None if long else self.parallel((*k.outer, *k.inner), self.cost, len(others) + (not single))
        with self.nest(others, how, *(() if single else ((block, self.extent(v), str(width)),))):
            self.end = self.end_of(self.origin, width, v.size)  # which keeps the states in registers, if it is known
            for name, level in self.level_of.items():
                if level == "outer":
                    self.line(f"alignas(64) {self.d.types[self.dtype_of[name]]} o_{self.slot(name)}[{width}];")
            self.stages(self.column_stage_chunked if long else self.column_stage, self.column_outer)

    def in_registers(self, columns: Index, width: int) -> int:
        """The rows of a segment come from anywhere, so a narrow block costs nothing, and its states need not leave the
        registers: the widest that has room there and divides the columns, if there is one."""
        state = max(self.dtype_of[n].itemsize for n, level in self.level_of.items() if level == "outer")
        most = REGISTERS // state
        fitting = [w for w in range(most // 4, most + 1) if columns.is_const and columns.const % w == 0]
        return fitting[-1] if width > most and fitting else width

    def column_loop(self) -> AbstractContextManager[Scope]:
        assert self.k.vector is not None and self.origin is not None
        return self.loop(self.k.vector, self.origin, self.end, how=LANES)

    def column_outer(self, stage: Sequence[Item]) -> None:
        with self.column_loop():
            for i in stage:
                self.map_item(i)

    def column_walk(self, stage: Sequence[Item], arrays: dict[str, str], rows: int = 1) -> None:
        """A row of a block of columns goes past, or some rows at a time, which are joined first."""
        assert self.k.vector is not None
        at = f"{self.sym(self.k.vector)} - {self.origin}"
        with self.column_loop() as s:
            s.known.update(self.shared_by_rows)
            if rows == 1:
                self.lane_body(stage, arrays, at)
                return
            v = self.k.inner[-1]
            for i in stage:
                values = [[self.value(e.subs({v: as_index(v) + q})) for e in i.exprs] for q in range(rows)]
                while len(values) > 1:
                    values = [self.combined(i.joins, a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
                self.combine_into(i.joins, [f"{arrays[n]}[{at}]" for n in i.names], values[0])

    def rows_at_a_time(self, stage: Sequence[Item]) -> int:
        """Those that are written out: where states go through memory, nothing but sums happens, and not much."""
        exprs = exprs_of(stage)
        last = self.k.inner[-1].size
        if any(i.combine is None for i in stage) or last is None or last.is_const and last.const < 2 * ROWS:
            return 1
        if self.width * sum(self.dtype_of[n].itemsize for i in stage for n in i.names) <= IN_STEP:
            return 1
        if self.of_halves(stage):  # several rows of these are unpacked more slowly
            return 1
        inner = any(e.op == "local" and self.level_of[e.attr] != "outer" for e in walk(*exprs))
        return 1 if inner or ROWS * written(exprs) > COPIED else ROWS

    def column_rows(self, stage: Sequence[Item], arrays: dict[str, str], lo: str, hi: str, rows: int) -> None:
        """The rows of the innermost reduced variable from lo to hi."""
        v = self.k.inner[-1]
        if rows == 1:
            with self.loop(v, lo, hi):
                self.column_walk(stage, arrays)
            return
        name, start = self.sym(v), self.fresh("r")
        with self.scope("{"):
            self.line(f"{self.d.long} {start} = {lo};")
            for n in (rows, 1):
                with self.scope(f"for (; {start} + {n} <= {hi}; {start} += {n}) {{", (v,)):
                    self.line(f"const {self.d.long} {name} = {start};")
                    self.column_walk(stage, arrays, n)

    def column_nest(self, stage: Sequence[Item], reductions: Sequence[Item], arrays: dict[str, str]) -> None:
        """All rows of a nest: where the innermost loop is short they rise several at a time, where long in parts."""
        outer, v = self.k.inner[:-1], self.k.inner[-1]
        rows = self.rows_at_a_time(stage)
        size = self.part(stage, rows)
        repeats = volume(outer)
        if v.size.is_const and v.size.const <= size:
            levels = self.levels(reductions, arrays, self.width, repeats, max(1, size // max(1, v.size.const)))

            def walk_rows() -> None:
                self.column_rows(stage, arrays, "0", self.extent(v), rows)
                self.rise(levels)
        else:
            levels = self.levels(reductions, arrays, self.width, repeats * ceildiv(v.size, size), 1)

            def walk_rows() -> None:
                with self.parts("0", self.extent(v), size, levels) as (start, end):
                    self.column_rows(stage, arrays, start, end, rows)

        self.nested(outer, walk_rows)
        self.top(levels)

    @staticmethod
    def of_halves(stage: Sequence[Item]) -> bool:
        return any(e.dtype.itemsize < 4 for e in loads(*exprs_of(stage)))

    def part(self, stage: Sequence[Item], rows: int) -> int:
        """Rows of columns after which states rise. The errors of halves themselves are much larger than their sum's."""
        return rows * JOINS if rows > 1 else 4 * FEW if self.of_halves(stage) else FEW

    def column_finish(self, reductions: Sequence[Item]) -> None:
        """States are the outer values themselves; what others want goes to memory."""
        wanted = [n for i in reductions for n in i.names if n in self.address]
        if not wanted:
            return
        with self.column_loop():
            for n in wanted:
                self.store(n, self.address[n], self.reread(n))

    def set_identity(self, reductions: Sequence[Item], arrays: dict[str, str]) -> None:
        for name, identity in identities_of(reductions):
            self.fill(arrays[name], self.width, identity)

    def column_stage(self, stage: Sequence[Item]) -> None:
        k = self.k
        reductions = reductions_of(stage)
        arrays = {n: f"o_{self.slot(n)}" for i in reductions for n in i.names}
        self.set_identity(reductions, arrays)
        assert k.vector is not None and self.origin is not None
        if k.bounds is None and gain(exprs_of(stage), k.inner, k.vector) >= WORTH:
            stage = offset_items(stage, k.inner, k.vector)
            values = shared_values(exprs_of(stage), k.inner, k.vector)
            self.shared_by_rows = self.side_by_side(values, k.vector, self.origin, self.end, self.width)
            reductions = reductions_of(stage)
        if k.bounds is None:
            self.column_nest(stage, reductions, arrays)
        else:
            with self.loop(k.inner[0], self.value(k.bounds[0]), self.value(k.bounds[1])):
                if self.origin == "0":  # a block is a whole row
                    self.prefetch(exprs_of(stage), k.inner[0], k.vector)
                self.column_walk(stage, arrays)
        self.shared_by_rows = {}
        self.column_finish(reductions)

    def join_columns(self, reductions: Sequence[Item], states: dict[str, str], parts: dict[str, str]) -> None:
        with self.scope(f"for (int l = 0; l < {self.width}; ++l) {{", how=LANES):
            self.join(reductions, states, parts)

    def column_stage_chunked(self, stage: Sequence[Item]) -> None:
        k = self.k
        reductions = reductions_of(stage)
        total = volume(k.inner)
        v = k.inner[-1]
        # Rows that are next to each other in a chunk must be so in the nest as well.
        rows = self.rows_at_a_time(stage)
        if len(k.inner) > 1 and not (total.is_const and v.size.const % rows == 0):
            rows = 1
        count, size, certain = self.chunks(total, 32, rows)
        states = {n: f"o_{self.slot(n)}" for i in reductions for n in i.names}
        partial: dict[str, str] = {}
        for n in states:
            partial[n] = self.fresh("part")
            self.line(f"alignas(64) {self.d.types[self.dtype_of[n]]} {partial[n]}[{CHUNKS}][{self.width}];")
        chunk, lo, hi = self.fresh("ch"), self.fresh("lo"), self.fresh("hi")
        with self.scope(f"for ({self.d.long} {chunk} = 0; {chunk} < {count}; ++{chunk}) {{", (Sym(chunk, CHUNKS),),
                        how=self.shared()):
            self.line(f"const {self.d.long} {lo} = {chunk} * {size}, "
                      f"{hi} = {self.fl}imin({lo} + {size}, {self.index(total)});")
            arrays = {n: f"{partial[n]}[{chunk}]" for n in partial}
            self.set_identity(reductions, arrays)
            part = self.part(stage, rows)
            levels = self.levels(reductions, arrays, self.width, certain and ceildiv(certain, part), 1)
            with self.parts(lo, hi, part, levels) as (start, end):
                if len(k.inner) == 1:
                    self.column_rows(stage, arrays, start, end, rows)
                else:
                    flat = self.fresh("fl")
                    head = f"for ({self.d.long} {flat} = {start}; {flat} < {end}; {flat} += {rows}) {{"
                    with self.scope(head, k.inner):
                        self.decompose(flat, k.inner)
                        self.column_walk(stage, arrays, rows)
            self.top(levels)
        if reductions:
            if count != "1":
                with self.scope(f"for (int h = 1; h < {count}; h *= 2) {{"), \
                        self.scope(f"for (int c = 0; c + h < {count}; c += 2 * h) {{"):
                    self.join_columns(reductions, {n: f"{partial[n]}[c]" for n in partial},
                                      {n: f"{partial[n]}[c + h]" for n in partial})
            self.set_identity(reductions, states)
            self.join_columns(reductions, states, {n: f"{partial[n]}[0]" for n in partial})
            self.column_finish(reductions)

