"""Column reductions on GPUs: a group takes adjacent columns. Segments are columns of different lengths.

Several work-items share a column and take its elements in turns; their results are combined as in a row (`rows.py`).
No work-item walks a long column alone, however few columns there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from flambeau.ir.expr import Expr
from flambeau.ir.index import Index, Sym, volume
from flambeau.ir.program import LoopKernel
from flambeau.ir.tuning import POINTS

from ..dialect import Dialect
from ..writer import Scope
from .dialect import Shape
from .rows import RowLoops, power_below


class ColumnLoops(RowLoops):
    def __init__(self, dialect: Dialect, kernel: LoopKernel, shape: Shape) -> None:
        self.wide = min(kernel.form.width, power_below(shape.group))
        self.points_in_all = volume(kernel.outer)
        super().__init__(dialect, kernel, shape)

    def choose_lanes(self, exprs: Sequence[Expr], stores: Iterable[tuple[str, Index]]) -> None:
        """Keeps single accesses: the elements of a column are not adjacent in memory."""

    def divide(self, shape: Shape, words: int) -> None:
        """Gives each work-item as few elements as a group allows if columns are held in registers; else several, to
        keep memory busy."""
        self.group, most = power_below(shape.group), power_below(max(POINTS.registers // words, 1))
        self.each = min(most, POINTS.part if self.k.bounds is None else POINTS.segment_step)
        length = self.about(self.number, 0)
        if self.k.bounds is not None or not length or not (self.k.reads_again() or self.k.scratch):
            return
        self.each = -(-length * self.wide // self.group)
        while self.each > min(most, POINTS.step) and 2 * self.group <= shape.largest:
            self.group *= 2
            self.each = -(-length * self.wide // self.group)
        self.each = min(self.each if self.number.is_const else max(self.each, POINTS.part), most)

    def is_held(self) -> bool:
        return self.k.bounds is None and super().is_held()

    def is_whole(self) -> bool:
        return self.k.bounds is None and super().is_whole()

    def place(self, s: str, base: str) -> str:
        return f"{base} + {s} * {self.group // self.wide} + {self.me} / {self.wide}"

    def at_once(self) -> int:
        return self.each * self.group // self.wide

    @contextmanager
    def stretches(self) -> Iterator[str]:
        if self.k.bounds is not None:
            self._begin, self._end = (self.value(b) for b in self.k.bounds)
        with super().stretches() as base:
            yield base

    def begin(self) -> str:
        return super().begin() if self.k.bounds is None else self._begin

    def end(self) -> str:
        return super().end() if self.k.bounds is None else self._end

    @contextmanager
    def groups(self, vars: Sequence[Sym]) -> Iterator[Scope]:
        long, start = self.d.long, self.first_point(vars, self.wide)
        self.line(f"const int {self.me} = {self.d.lane};")
        self.line(f"const {long} column = {start} + {self.me} % {self.wide};")
        with self.scope("{", vars) as s:
            # Work-items beyond the last column compute it again, and store nothing.
            last = self.d.minimum.format("column", f"({long})({self.until} - 1)")
            self.decompose("column" if self.is_even() else last, vars)
            yield s

    def is_even(self) -> bool:
        return self.bands is None and self.points_in_all.is_const and self.points_in_all.const % self.wide == 0

    def flush(self, names: Sequence[str], base: str) -> None:
        with nullcontext() if self.is_even() or not names else self.scope(f"if ({self.inside()}) {{"):
            super().flush(names, base)

    def inside(self) -> str:
        return f"column < {self.until}"

    def first(self) -> str:
        return f"{self.me} < {self.wide}" if self.is_even() else f"{self.me} < {self.wide} && {self.inside()}"
