"""Contractions of ragged parts: each part of the rows has factors of its own, or each part of the depth has a result of
its own.

The ends of parts are data. Tiles of rows start afresh with each part, so that a tile has the factors of one part. Their
number is counted on the device, and persistent programs take them in turn. A part of the depth is summed in whole
steps, by the copy engine, and one more step through pointers, under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.expr import Expr, const, index_value, masked, where
from flambeau.ir.index import Index, Sym, as_index, volume
from flambeau.ir.tuning import Way

from ..blocks import power
from .tiles import TileWriter


class RaggedTiles(TileWriter):
    deep: int
    way: Way

    @property
    def rows_in_parts(self) -> bool:
        return self.k.ragged is not None and self.k.ragged.along != "depth"

    @property
    def depth_in_parts(self) -> bool:
        return self.k.ragged is not None and self.k.ragged.along == "depth"

    @property
    def halves(self) -> bool:
        """Whether a tile with at most half of its rows in its part is summed as one of half the height."""
        return self.rows_in_parts and self.way.halves

    @property
    def of_part(self) -> tuple[Sym, ...]:
        """The variable of parts, if it is not one of the batch."""
        return (self.k.ragged.part,) if self.k.ragged is not None and self.rows_in_parts else ()

    @property
    def row_start(self) -> str:
        return "first_row" if self.rows_in_parts else super().row_start

    @property
    def row_end(self) -> str | None:
        return "end_row" if self.rows_in_parts else None

    def begins_anywhere(self, contiguous: Sym, rows: Sequence[Sym], depth: Sequence[Sym]) -> bool:
        """Whether a part may begin within a contiguous line, where the copy engine cannot."""
        return contiguous in (rows if self.rows_in_parts else depth if self.depth_in_parts else ())

    def ends_at(self, part: Index, real: Expr) -> Expr:
        """Returns the end of a part; zero where there is no such part (`real` is false)."""
        assert self.k.ragged is not None
        ends = self.k.ragged.ends.subs({self.k.ragged.part: part})
        return where(real, masked(ends, real), const(0, ends.dtype))

    def within(self, end: str, vars: Sequence[Sym]) -> str:
        """Clamps the end of a part to its tensor, whatever the data say."""
        return f"tl.cast(tl.minimum({end}, {self.index(volume(vars))}), tl.int32)"

    def count_parts(self, most: str) -> tuple[str, str]:
        """Returns the number of tiles of rows on the device, and the host's upper bound of it. Writes where parts begin
        and end."""
        (part,), high = self.of_part, self.t.high
        each = Sym("parts", power(part.size.const))
        self.blocks, self.axes[each] = [power(part.size.const)], 0
        self.line(f"{self.sym(each)} = {self.arange(0)}")
        at, count = index_value(each), index_value(part.size)
        texts = self.value(self.ends_at(as_index(each) - 1, (at >= 1) & (at < count))), self.value(
            self.ends_at(as_index(each), at < count))
        self.assign(("begins", "ends"), [self.within(text, self.k.rows) for text in texts])
        return f"tl.sum(fl.pieces(begins, ends, {high}), 0)", f"({most} + {part.size.const})"

    def enter_part(self) -> None:
        self.line(f"{self.sym(self.of_part[0])}, first_row, end_row, at_column = fl.share("
                  f"tile % (high * wide), wide, begins, ends, {self.t.high}, {self.t.group})")

    def part_of_depth(self) -> tuple[str, str, str]:
        """Writes and returns where a part of the depth begins, where its last whole step ends, and where the part
        ends."""
        assert self.k.ragged is not None
        part, (begin, whole, end) = self.k.ragged.part, (self.fresh(name) for name in ("begin", "whole", "end"))
        self.blocks = []
        texts = [self.value(self.ends_at(as_index(part) - 1, index_value(part) >= 1)), self.value(self.k.ragged.ends)]
        self.assign((begin, end), [self.within(text, self.k.depth) for text in texts])
        self.line(f"{whole} = {begin} + tl.maximum({end} - {begin}, 0) // {self.deep} * {self.deep}")
        return begin, whole, end
