"""The launches of a contraction: one, or two if its depth is cut into pieces. The second adds up the sums of the pieces
and computes the epilogue."""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.index import ONE, Index, Sym, volume
from flambeau.ir.program import ContractKernel
from flambeau.ir.tuning import BLOCKS, ProductTile, Scale

from ..blocks import PartDraft, count_text, power
from .contractions import ContractBlocks
from .tensor_maps import Matrix


def write_product(k: ContractKernel, scale: Scale) -> list[PartDraft]:
    sums = ContractBlocks(k, scale)
    drafts = [sums.render()]
    if sums.how == "pieces":
        drafts.append(TotalBlocks(k, scale).render())
    return drafts


class TotalBlocks(ContractBlocks):
    """The second launch. A program has a tile of a few rows, and loads all pieces of it."""

    def __init__(self, k: ContractKernel, scale: Scale) -> None:
        super().__init__(k, scale)
        rows, columns = (self.k.about(volume(vars), 1024) for vars in (self.k.rows, self.k.columns))
        threads = BLOCKS.total_threads if rows * columns >= BLOCKS.total_points else BLOCKS.warp
        points = threads * BLOCKS.total_thread
        wide = min(power(columns), BLOCKS.warp * BLOCKS.total_thread)
        # such results are contiguous along the rows
        if any(at.coefficient(v) is ONE for _, at in self.k.stores for v in self.k.rows):
            wide = max(min(wide, points // BLOCKS.total_across), points // power(rows), 1)
        self.t = ProductTile(points // wide, (wide,), 0, 1, threads // BLOCKS.warp)

    def render(self) -> PartDraft:
        k, t = self.k, self.t
        self.begin()
        sides = (k.rows, t.high), (k.columns, t.wide)
        high, wide = (count_text(volume(vars), side, self.index) for vars, side in sides)
        grid = " * ".join([*(count_text(volume(vars), side, self.host) for vars, side in sides),
                           self.host(volume(k.batch))])
        self.line(f"high, wide = {high}, {wide}")
        self.count_pieces()
        self.line(f"tile = {self.program}")
        with self.scope("if True:", (*k.batch, *k.rows, *k.columns), footer=""):
            self.line("at_row, at_column = tile // wide % high, tile % wide")
            self.decompose("(tile // (high * wide))", k.batch)
            at, names = f"at_column * {t.wide}", []
            place, inside = self.matrix(at, t.wide, t.high)
            for product in range(len(k.products)):
                names.append(self.fresh("sums"))
                for piece in range(self.pieces):
                    there = inside if self.steps.is_const else f"{inside} & ({piece} < pieces)"
                    self.line(f"{names[-1]} {'+=' if piece else '='} "
                              f"tl.load({place} + {self.further(str(piece), product)}, {there}, 0)")
            self.finish(names, at, t.wide)
        return PartDraft(self, grid, t.warps, waits=True, fills=True)

    def write(self, name: str, address: Index, value: str, m: Matrix | None, own: Sequence[Sym], starts: Sequence[str]
              ) -> None:
        super().write(name, address, value, None, own, starts)  # a few rows need no copy engine
