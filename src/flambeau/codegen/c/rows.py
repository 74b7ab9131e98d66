"""Row reductions in C: the vectorised variable is reduced.

Each outer point walks its row in lanes, every lane with its own state, and joins the lanes at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flambeau.ir.expr import cost_of, loads, walk
from flambeau.ir.index import Index, Sym, as_index, ceildiv, volume
from flambeau.ir.program import Item, exprs_of
from flambeau.ir.tuning import CPU

from ..dialect import LANES
from ..stages import S
from .cascade_sums import Levels
from .loop_splitting import written
from .loops import LoopWriter, widest_of


class Rows(LoopWriter[S]):
    def render(self) -> list[str]:
        self.rows()
        return self.scopes[0].lines

    def rows(self) -> None:
        raise NotImplementedError

    def lanes(self, reductions: Sequence[Item], length: Index | None) -> int:
        n = CPU.lane_bytes // widest_of(reductions)
        if length is None or not length.is_const:
            return n
        if n * CPU.row_steps > length.const:
            n //= 2
        while n > 1 and n > length.const:
            n //= 2
        return n

    def join_lanes(self, reductions: Sequence[Item], arrays: dict[str, str], lanes: int,
                   joined: Callable[[int], None] = lambda lanes: None) -> None:
        """Combine the lanes as a tree, each level unrolled: a loop of variable length does not vectorise."""
        half = lanes // 2
        while half:
            with self.scope(f"for (int l = 0; l < {half}; ++l) {{", how=LANES):
                self.join(reductions, arrays, arrays, f"l + {half}")
            joined(half)
            half //= 2

    def row_walk(self, stage: Sequence[Item], arrays: dict[str, str], lanes: int, lo: str, hi: str,
                 length: Index | None) -> None:
        """Walks the innermost variable from lo to hi, in whole steps of all lanes and a rest."""
        v = self.k.inner[-1]
        name = self.sym(v)
        if not arrays:
            if lo == "0" and length is not None and self.ends_again(stage, length):
                self.whole_steps(stage, hi, length)
                return
            with self.loop(v, lo, hi, how=LANES):
                self.body(stage, arrays, "0")
            return
        if lanes == 1:
            with self.loop(v, lo, hi):
                self.body(stage, arrays, "0")
            return
        start = self.fresh("r")
        with self.scope("{"):
            self.line(f"{self.d.long} {start} = {lo};")
            simd = self.at_once(exprs_of(stage), lanes, widest_of(stage))
            with self.scope(f"for (; {start} + {lanes} <= {hi}; {start} += {lanes}) {{"), \
                    self.scope(f"for (int l = 0; l < {lanes}; ++l) {{", (v,), how=simd):
                self.line(f"const {self.d.long} {name} = {start} + l;")
                self.body(stage, arrays, "l")
            if not (length is not None and length.is_const and length.const % lanes == 0 and lo == "0"):
                for few in self.fewer(stage, lanes):  # in halving steps, as the lanes of a state are joined
                    with self.scope(f"for (; {start} + {few} <= {hi}; {start} += {few}) {{"), \
                            self.scope(f"for (int l = 0; l < {few}; ++l) {{", (v,), how=LANES):
                        self.line(f"const {self.d.long} {name} = {start} + l;")
                        self.body(stage, arrays, "l")
                # At most lanes - 1 elements are left; the bound says so to the compiler.
                with self.scope(f"for (int l = 0; l < {lanes - 1} && {start} + l < {hi}; ++l) {{", (v,)):
                    self.line(f"const {self.d.long} {name} = {start} + l;")
                    self.body(stage, arrays, "l")

    def fewer(self, stage: Sequence[Item], lanes: int) -> list[int]:
        """The sizes of smaller steps for the rest of a row of any length, if it would take long element by element."""
        steps = [few for few in (lanes // 2, lanes // 4, lanes // 8) if few >= CPU.vector_least // 2]
        exprs = exprs_of(stage)
        costly = cost_of(exprs) >= CPU.flat_work and len(steps) * written(exprs) <= CPU.copied
        return steps if costly else []

    def ends_again(self, stage: Sequence[Item], length: Index) -> bool:
        """Whether the last whole step of a row may compute some points again, because no stored value is read, and
        whether that pays."""
        exprs = exprs_of(stage)
        stored = {n for i in stage for n in i.names if n in self.address or n in self.k.scratch}
        read = {e.attr[0] for e in loads(*exprs)} | {e.attr for e in walk(*exprs) if e.op == "local"}
        lanes = self.step_of(exprs)
        ragged = not length.is_const or length.const >= lanes and CPU.is_ragged(length.const, CPU.line_bytes // lanes)
        costly = cost_of(exprs) >= CPU.flat_work and 2 * written(exprs) <= CPU.copied
        return ragged and costly and not (stored & read or any(p.aliased for p in self.k.params))

    def whole_steps(self, stage: Sequence[Item], hi: str, length: Index) -> None:
        """Walks a row in whole vectors, the last of which ends where the row ends; a row shorter than a vector, element
        by element."""
        v, lanes, start = self.k.inner[-1], self.step_of(exprs_of(stage)), self.fresh("r")
        name = self.sym(v)
        if not length.is_const:
            with self.loop(v, "0", f"({hi} < {lanes} ? {hi} : 0)"):
                self.body(stage, {}, "0")
        last = f"{hi} - {lanes}" if not length.is_const else str(length.const - lanes)
        bound = f"({hi} < {lanes} ? 0 : {hi})" if not length.is_const else hi
        with self.scope(f"for ({self.d.long} {start} = 0; {start} < {bound}; {start} += {lanes}) {{"):
            self.line(f"const {self.d.long} {name}s = {self.fl}imin({start}, {last});")
            with self.scope(f"for (int l = 0; l < {lanes}; ++l) {{", (v,), how=LANES):
                self.line(f"const {self.d.long} {name} = {name}s + l;")
                self.body(stage, {}, "l")

    def row_parts(self, stage: Sequence[Item], arrays: dict[str, str], lanes: int, lo: str, hi: str,
                  levels: Levels | None, length: Index | None = None) -> None:
        if levels is None:
            self.row_walk(stage, arrays, lanes, lo, hi, length)
            return
        with self.parts(lo, hi, CPU.additions * lanes, levels) as (start, end):
            self.row_walk(stage, arrays, lanes, start, end, None)


@dataclass(frozen=True)
class Row:
    """The states of `lanes` lanes, and the range of the innermost variable that they reduce."""

    arrays: dict[str, str]
    lanes: int
    lo: str
    hi: str


class RowWriter(Rows[Row]):
    """One thread reduces a row."""

    def rows(self) -> None:
        k = self.k
        how = self.parallel((*k.outer, *k.inner), self.cost, len(k.outer)) if k.outer else None
        with self.nest(k.outer, how):
            for name in sorted(k.scratch):
                kind = self.d.types[self.dtype_of[name]]
                self.line(f"alignas(64) {kind} s_{self.slot(name)}[{self.index(volume(self.k.inner))}];")
            for stage in k.stages:
                self.stage(stage)

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> Row:
        k, v = self.k, self.k.inner[-1]
        lanes = self.lanes(reductions, v.size if k.bounds is None else None) if reductions else 1
        lo, hi = ("0", self.extent(v)) if k.bounds is None else (self.value(k.bounds[0]), self.value(k.bounds[1]))
        return Row(self.arrays(reductions, lanes), lanes, lo, hi)

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: Row) -> None:
        k, arrays, lanes = self.k, states.arrays, states.lanes
        length = None if k.bounds is not None else k.inner[-1].size
        rest = length.const % lanes if length is not None and length.is_const and len(k.inner) == 1 else 0
        copies = bin(rest).count("1") * sum(1 for _ in walk(*exprs_of(items)))
        if rest and copies <= CPU.copied:
            self.row_with_rest(items, reductions, arrays, lanes, rest)
            return
        if length is None:
            self.row_walk(items, arrays, lanes, states.lo, states.hi, None)
        else:
            self.row_nest(items, reductions, arrays, lanes, states.hi, length)
        self.join_lanes(reductions, arrays, lanes)

    def together(self, i: Item, states: Row) -> list[str]:
        return [f"{states.arrays[n]}[0]" for n in i.names]

    def row_with_rest(self, stage: Sequence[Item], reductions: Sequence[Item], arrays: dict[str, str], lanes: int,
                      rest: int) -> None:
        """Reduces a row whose length is not a multiple of the lanes. The rest is added while the lanes are joined and
        become fewer: 16, 8, 4, 2, 1 elements at a time. A state then stays in its register; a loop over some of its
        lanes would send it through memory."""
        v = self.k.inner[-1]
        whole = v.size.const - rest
        self.row_nest(stage, reductions, arrays, lanes, str(whole), as_index(whole))

        def joined(width: int) -> None:
            if rest & width:
                at = whole + (rest & ~(2 * width - 1))
                with self.scope(f"for (int l = 0; l < {width}; ++l) {{", (v,), how=LANES):
                    self.line(f"const {self.d.long} {self.sym(v)} = {at} + l;")
                    self.body(stage, arrays, "l")

        self.join_lanes(reductions, arrays, lanes, joined)

    def row_nest(self, stage: Sequence[Item], reductions: Sequence[Item], arrays: dict[str, str], lanes: int, hi: str,
                 length: Index | None) -> None:
        """Reduces one row, or all rows of a nest: several short rows, or a part of a long one, make a cascade step."""
        outer = self.k.inner[:-1]
        assert length is not None
        steps = ceildiv(length, lanes)
        rows = volume(outer)
        if steps.is_const and steps.const <= 4 * CPU.additions:  # split among lanes, the error stays small
            levels = self.levels(reductions, arrays, lanes, rows, max(1, CPU.additions // max(1, steps.const)))

            def row() -> None:
                self.row_walk(stage, arrays, lanes, "0", hi, length)
                self.rise(levels)
        else:
            levels = self.levels(reductions, arrays, lanes, rows * ceildiv(steps, CPU.additions), 1)

            def row() -> None:
                self.row_parts(stage, arrays, lanes, "0", hi, levels, length)

        self.nested(outer, row)
        self.top(levels)


@dataclass(frozen=True)
class Chunks:
    """The states of the parts of a row; the number of parts, the length of each, and that length if it is constant."""

    partial: dict[str, str]
    count: str
    size: str
    certain: Index | None


class SharedRowWriter(Rows[Chunks]):
    """Threads divide each row in chunks."""

    def rows(self) -> None:
        with self.nest(self.k.outer):
            for stage in self.k.stages:
                self.stage(stage)

    def split(self) -> Index:
        """The number of points that threads divide: those of the row, or the rows of a nest."""
        inner = self.k.inner
        return volume(inner if len(inner) == 1 else inner[:-1])

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> Chunks:
        least, unit = (CPU.chunk, CPU.chunk_even) if len(self.k.inner) == 1 else (1, 1)
        count, size, certain = self.chunks(self.split(), least, unit)
        return Chunks(self.arrays(reductions, CPU.chunks, "part"), count, size, certain)

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: Chunks) -> None:
        k, partial, count, size, certain = self.k, states.partial, states.count, states.size, states.certain
        single, v, split = len(k.inner) == 1, k.inner[-1], self.split()
        chunk, lo, hi = self.fresh("ch"), self.fresh("lo"), self.fresh("hi")
        marker = Sym(chunk, CPU.chunks)
        with self.scope(f"for ({self.d.long} {chunk} = 0; {chunk} < {count}; ++{chunk}) {{", (marker,),
                        how=self.shared()):
            self.line(f"const {self.d.long} {lo} = {chunk} * {size}, "
                      f"{hi} = {self.fl}imin({lo} + {size}, {self.index(split)});")
            lanes = self.lanes(reductions, v.size) if reductions else 1
            arrays = self.arrays(reductions, lanes)
            steps = certain if single or certain is None else certain * v.size
            levels = self.levels(reductions, arrays, lanes, steps and ceildiv(steps, CPU.additions * lanes), 1)
            if single:
                self.row_parts(items, arrays, lanes, lo, hi, levels)
            else:
                flat = self.fresh("fl")
                with self.scope(f"for ({self.d.long} {flat} = {lo}; {flat} < {hi}; ++{flat}) {{", k.inner[:-1]):
                    self.decompose(flat, k.inner[:-1])
                    self.row_parts(items, arrays, lanes, "0", self.extent(v), levels, v.size)
            self.top(levels)
            self.join_lanes(reductions, arrays, lanes)
            for i in reductions:
                for n in i.names:
                    self.line(f"{partial[n]}[{chunk}] = {arrays[n]}[0];")
        self.join_chunks(reductions, partial, count)

    def together(self, i: Item, states: Chunks) -> list[str]:
        return [f"{states.partial[n]}[0]" for n in i.names]

    def join_chunks(self, reductions: Sequence[Item], partial: dict[str, str], count: str) -> None:
        """Combines neighbours first, then neighbours of neighbours, so that rounding grows with the logarithm."""
        if not reductions or count == "1":
            return
        with self.scope(f"for (int h = 1; h < {count}; h *= 2) {{"), \
                self.scope(f"for (int l = 0; l + h < {count}; l += 2 * h) {{"):
            self.join(reductions, partial, partial, "l + h")
