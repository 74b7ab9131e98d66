"""Column reductions in C: the vectorised variable is kept, not reduced.

The states of a block of columns are side by side, and its rows are walked one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from flambeau.ir.expr import Expr, loads, walk
from flambeau.ir.index import Sym, as_index, ceildiv, volume
from flambeau.ir.program import Item, LoopKernel, exprs_of, identities_of, reductions_of
from flambeau.ir.tuning import CPU

from ..dialect import LANES, Dialect
from ..writer import Scope
from .loop_splitting import written
from .loops import LoopWriter, offset_items
from .row_invariants import gain, shared_values

Arrays = dict[str, str]


class ColumnWriter(LoopWriter[Arrays]):
    """One thread reduces a block of columns."""

    def __init__(self, dialect: Dialect, kernel: LoopKernel) -> None:
        super().__init__(dialect, kernel)
        self.origin: str | None = None  # first column of the current block
        self.used = ""  # columns of the current block
        self.shared_by_rows: dict[Expr, str] = {}  # values that are the same for all rows of a block

    def render(self) -> list[str]:
        k = self.k
        v = k.vector
        assert v is not None
        others = tuple(x for x in k.outer if x is not v)
        width, long = k.form.width, k.form.name == "shared columns"
        blocks = ceildiv(v.size, width) * volume(others)
        self.width = width
        single = blocks.is_const and v.size.is_const and v.size.const == width
        block = Sym(f"{v.name}b", v.size)
        self.origin = "0" if single else self.sym(block)
        how = None if long else self.parallel((*k.outer, *k.inner), self.cost, len(others) + (not single))
        with self.nest(others, how, *(() if single else ((block, self.extent(v), str(width)),))):
            self.end = self.end_of(self.origin, width, v.size)  # a known width keeps states in registers
            self.used = str(width)
            if not v.size.is_const:  # there may be few columns: states of a whole block would take longer
                self.used = self.fresh("w")
                self.line(f"const {self.d.long} {self.used} = {self.end} - {self.origin};")
            for name, level in self.level_of.items():
                if level == "outer":
                    self.line(f"alignas(64) {self.d.types[self.dtype_of[name]]} o_{self.slot(name)}[{width}];")
            for stage in k.stages:
                self.stage(stage)
        return self.scopes[0].lines

    def reread(self, name: str) -> str:
        return self.column_slot(name) if self.level_of[name] == "outer" else super().reread(name)

    def hold(self, name: str, text: str) -> None:
        self.line(f"{self.column_slot(name)} = {text};")

    def column_slot(self, name: str) -> str:
        assert self.k.vector is not None
        return f"o_{self.slot(name)}[{self.sym(self.k.vector)} - {self.origin}]"

    # ---- a stage ---------------------------------------------------------------------------------------

    def once(self, items: Sequence[Item]) -> None:
        for loop in self.column_loops(items):
            with loop:
                super().once(items)

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> Arrays:
        states = self.states_of(reductions)
        self.set_identity(reductions, states)
        return states

    def states_of(self, reductions: Sequence[Item]) -> Arrays:
        return {n: f"o_{self.slot(n)}" for i in reductions for n in i.names}

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: Arrays) -> None:
        k = self.k
        assert k.vector is not None and self.origin is not None
        if k.bounds is None and gain(exprs_of(items), k.inner, k.vector) >= CPU.shared_work:
            items = offset_items(items, k.inner, k.vector)
            values = shared_values(exprs_of(items), k.inner, k.vector)
            self.shared_by_rows = self.side_by_side(values, k.vector, self.origin, self.end, self.width)
            reductions = reductions_of(items)
        if k.bounds is None:
            self.column_nest(items, reductions, states)
        else:
            with self.loop(k.inner[0], self.value(k.bounds[0]), self.value(k.bounds[1])):
                if self.origin == "0":  # a block is a whole row
                    self.prefetch(exprs_of(items), k.inner[0], k.vector)
                self.column_walk(items, states)
        self.shared_by_rows = {}

    def finish(self, reductions: Sequence[Item], states: Arrays) -> None:
        """The accumulators are the results; those that other kernels read are stored."""
        wanted = [n for i in reductions for n in i.names if n in self.address]
        if not wanted:
            return
        for loop in self.column_loops():
            with loop:
                for n in wanted:
                    self.store(n, self.address[n], self.reread(n))

    # ---- columns ---------------------------------------------------------------------------------------

    def column_loops(self, items: Sequence[Item] = ()) -> Iterator[AbstractContextManager[Scope]]:
        """A loop over the columns of a block, or several over parts of them."""
        v = self.k.vector
        assert v is not None and self.origin is not None
        known = self.origin == "0" and v.size.is_const
        for lo, hi in self.halving(exprs_of(items), v.size.const) if known else [(self.origin, self.end)]:
            yield self.loop(v, lo, hi, how=LANES)

    def column_walk(self, stage: Sequence[Item], arrays: dict[str, str], rows: int = 1) -> None:
        """Accumulate one row of a block of columns, or several rows, which are combined with each other first."""
        assert self.k.vector is not None
        at = f"{self.sym(self.k.vector)} - {self.origin}"
        for loop in self.column_loops(stage):
            with loop as s:
                s.known.update(self.shared_by_rows)
                if rows == 1:
                    self.body(stage, arrays, at)
                    continue
                v = self.k.inner[-1]
                for i in stage:
                    values = [[self.value(e.subs({v: as_index(v) + q})) for e in i.exprs] for q in range(rows)]
                    while len(values) > 1:
                        values = [self.combined(i.joins, a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
                    self.combine_into(i.joins, [f"{arrays[n]}[{at}]" for n in i.names], values[0])

    def rows_at_a_time(self, stage: Sequence[Item]) -> int:
        """How many rows to unroll: several if accumulators spill to memory and the body is short and only reduces."""
        exprs = exprs_of(stage)
        last = self.k.inner[-1].size
        if any(i.combine is None for i in stage) or last is None or last.is_const and last.const < 2 * CPU.joined_rows:
            return 1
        if self.width * sum(self.dtype_of[n].itemsize for i in stage for n in i.names) <= CPU.held_bytes:
            return 1
        if self.of_halves(stage):  # unpacking several rows of half precision at once is slower
            return 1
        if any(len(i.names) > 1 for i in stage):  # chains of selects: compilers turn them into branches
            return 1
        inner = any(e.op == "local" and self.level_of[e.attr] != "outer" for e in walk(*exprs))
        return 1 if inner or CPU.joined_rows * written(exprs) > CPU.copied else CPU.joined_rows

    def column_rows(self, stage: Sequence[Item], arrays: dict[str, str], lo: str, hi: str, rows: int) -> None:
        """Accumulates the rows of the innermost reduced variable from lo to hi."""
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
        """Accumulate all rows of a nest: several short inner loops, or a part of a long one, make a cascade step."""
        outer, v = self.k.inner[:-1], self.k.inner[-1]
        rows = self.rows_at_a_time(stage)
        size = self.part(stage, rows)
        repeats = volume(outer)
        if v.size.is_const and v.size.const <= size:
            levels = self.levels(reductions, arrays, self.width, repeats, max(1, size // max(1, v.size.const)),
                                 self.used)

            def walk_rows() -> None:
                self.column_rows(stage, arrays, "0", self.extent(v), rows)
                self.rise(levels)
        else:
            levels = self.levels(reductions, arrays, self.width, repeats * ceildiv(v.size, size), 1, self.used)

            def walk_rows() -> None:
                with self.parts("0", self.extent(v), size, levels) as (start, end):
                    self.column_rows(stage, arrays, start, end, rows)

        self.nested(outer, walk_rows)
        self.top(levels)

    @staticmethod
    def of_halves(stage: Sequence[Item]) -> bool:
        return any(e.dtype.itemsize < 4 for e in loads(*exprs_of(stage)))

    def part(self, stage: Sequence[Item], rows: int) -> int:
        """The number of rows of a cascade step. Half precision rounds its inputs by much more than a long sum adds."""
        return rows * CPU.joins if rows > 1 else 4 * CPU.additions if self.of_halves(stage) else CPU.additions

    def set_identity(self, reductions: Sequence[Item], arrays: dict[str, str]) -> None:
        for name, identity in identities_of(reductions):
            self.fill(arrays[name], self.used, identity)


class SharedColumnWriter(ColumnWriter):
    """Threads divide the rows of a block in chunks."""

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> Arrays:
        return self.states_of(reductions)

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: Arrays) -> None:
        k = self.k
        total = volume(k.inner)
        v = k.inner[-1]
        # Rows that are next to each other in a chunk must be so in the nest as well.
        rows = self.rows_at_a_time(items)
        if len(k.inner) > 1 and not (total.is_const and v.size.const % rows == 0):
            rows = 1
        count, size, certain = self.chunks(total, CPU.column_chunk, rows)
        partial: dict[str, str] = {}
        for n in states:
            partial[n] = self.fresh("part")
            self.line(f"alignas(64) {self.d.types[self.dtype_of[n]]} {partial[n]}[{CPU.chunks}][{self.width}];")
        chunk, lo, hi = self.fresh("ch"), self.fresh("lo"), self.fresh("hi")
        with self.scope(f"for ({self.d.long} {chunk} = 0; {chunk} < {count}; ++{chunk}) {{", (Sym(chunk, CPU.chunks),),
                        how=self.shared()):
            self.line(f"const {self.d.long} {lo} = {chunk} * {size}, "
                      f"{hi} = {self.fl}imin({lo} + {size}, {self.index(total)});")
            arrays = {n: f"{partial[n]}[{chunk}]" for n in partial}
            self.set_identity(reductions, arrays)
            part = self.part(items, rows)
            levels = self.levels(reductions, arrays, self.width, certain and ceildiv(certain, part), 1, self.used)
            with self.parts(lo, hi, part, levels) as (start, end):
                if len(k.inner) == 1:
                    self.column_rows(items, arrays, start, end, rows)
                else:
                    flat = self.fresh("fl")
                    head = f"for ({self.d.long} {flat} = {start}; {flat} < {end}; {flat} += {rows}) {{"
                    with self.scope(head, k.inner):
                        self.decompose(flat, k.inner)
                        self.column_walk(items, arrays, rows)
            self.top(levels)
        if reductions:
            if count != "1":
                with self.scope(f"for (int h = 1; h < {count}; h *= 2) {{"), \
                        self.scope(f"for (int c = 0; c + h < {count}; c += 2 * h) {{"):
                    self.join_columns(reductions, {n: f"{partial[n]}[c]" for n in partial},
                                      {n: f"{partial[n]}[c + h]" for n in partial})
            self.set_identity(reductions, states)
            self.join_columns(reductions, states, {n: f"{partial[n]}[0]" for n in partial})

    def join_columns(self, reductions: Sequence[Item], states: dict[str, str], parts: dict[str, str]) -> None:
        with self.scope(f"for (int l = 0; l < {self.used}; ++l) {{", how=LANES):
            self.join(reductions, states, parts)
