"""Tiles of a contraction whose depth is cut into pieces: a program sums one piece of one tile, and leaves its sums.

A piece is a whole number of steps, and pieces differ in length by at most one step. Their sums lie in the workspace as
matrices, one after the other, so that a second launch (totals.py) adds them in the order of the depth: results do not
depend on the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.index import Index, as_index, ceildiv, volume

from ..blocks import NARROWED
from .shares import SharedTiles


class PieceTiles(SharedTiles):
    @property
    def pieces(self) -> int:
        """The number of pieces; an upper bound if the depth is known only at run time."""
        return min(self.way.pieces, max(self.steps.const, 1)) if self.steps.is_const else self.way.pieces

    @property
    def steps(self) -> Index:
        return ceildiv(volume(self.k.depth), as_index(self.deep))

    @property
    def program(self) -> str:
        return "tl.program_id(0)" + ("" if self.width is NARROWED else f".to({self.width.kind})")

    def count_pieces(self) -> str:
        """Defines `pieces` in the kernel; returns the host's text for their number."""
        if self.steps.is_const:
            self.line(f"steps, pieces = {max(self.steps.const, 1)}, {self.pieces}")
            return str(self.pieces)
        self.line(f"steps = tl.cast(tl.maximum({self.index(self.steps)}, 1), tl.int32)")
        self.line(f"pieces = tl.minimum(steps, {self.pieces})")
        return f"min(max({self.host(self.steps)}, 1), {self.pieces})"

    def begin_piece(self, grid: str) -> str:
        """Writes which tile and steps a program has; returns the grid."""
        grid = f"{grid} * {self.count_pieces()}"
        self.line(f"tile, piece = {self.program} // pieces, tl.program_id(0) % pieces")
        self.line("first, last = steps * piece // pieces, steps * (piece + 1) // pieces")
        return grid

    def matrix(self, at: str, wide: int, high: int) -> tuple[str, str]:
        """Returns pointers to a tile of the first matrix of the workspace, and the mask of what lies inside."""
        k, rows, columns = self.k, volume(self.k.rows), volume(self.k.columns)
        self.blocks, self.masks = [high, wide], {}
        row, column, place = (self.fresh(name) for name in ("row", "column", "place"))
        self.line(f"{row}, {column} = {self.row_start} + {self.arange(0)}, {at} + {self.arange(1)}")
        batch = "tile // (high * wide)" if k.batch else "0"
        self.line(f"{place} = work.to(tl.pointer_type({self.d.types[self.sums]})) + ((tl.cast({batch}, tl.int64) * "
                  f"{self.index(rows)} + {row}) * {self.index(columns)} + {column})")
        return place, f"({row} < {self.index(rows)}) & ({column} < {self.index(columns)})"

    def further(self, piece: str, product: int) -> str:
        """Returns the offset from the first matrix to that of a piece of a product."""
        sizes = " * ".join(self.index(volume(vars)) for vars in (self.k.rows, self.k.columns, self.k.batch))
        many = len(self.k.products)
        return f"(tl.cast({piece}, tl.int64) * {many} + {product}) * ({sizes})"

    def leave(self, sums: Sequence[str], at: str, wide: int) -> None:
        place, inside = self.matrix(at, wide, self.t.high)
        for product, name in enumerate(sums):
            self.line(f"tl.store({place} + {self.further('piece', product)}, {name}, {inside})")
