"""Contractions in Triton: tensor cores sum tiles of the result in registers.

What a factor is read from comes by the copy engine where its lines allow that (no masks, zeros beyond the end), and by
pointers otherwise, whatever expression it is: masks of a convolution, casts, scales. A tile's columns may come in
parts, each with sums of its own: 128 + 64 columns fit where 256 are too many. What follows the sum is in tiles.py.

Who sums what (`Way.how`):
once    a program for each tile
turns   programs take tile after tile, and the loop over these and the one over the depth are one for the compiler
        (`flatten`): a tile's first pieces are on their way while the results of the one before are written
shares  all steps of all tiles are divided equally. A program may begin within a tile's depth, and leaves that sum to
        the one that began the tile, which adds it to its own: always in the same order (shares.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flambeau.codegen.source import HOSTED
from flambeau.ir.dtypes import FP8, DType, is_float
from flambeau.ir.expr import Expr
from flambeau.ir.index import Sym, as_index, ceildiv, unflat, volume
from flambeau.ir.lines import joined
from flambeau.ir.nodes import unscaled
from flambeau.ir.program import ContractKernel, sites_of
from flambeau.ir.tuning import BLOCKS, TILES, UNSCALED, WAYS, ProductTile, Scale, Way

from ..blocks import NARROWED, PartDraft, count_text, padded_read, width_of
from ..dialect import ROUGH, TRITON
from .shares import SharedTiles
from .tensor_maps import matrix, whole_line

TALL = 64  # rows that tensor cores take at least on one side: on the other, eight are enough
SMALL = frozenset((torch.bfloat16, torch.float16, torch.int8, *FP8))  # multiplied as they are, and summed in 32 bits
REGISTERS = 160  # of a thread that sums may take


def multiplied(factor: Expr) -> tuple[Expr, Expr | None]:
    """What tensor cores take for a factor, the number before it was widened; and what the sum is scaled by for it."""
    small, scale = unscaled(factor)
    return (small, scale) if small.dtype in SMALL else (factor, None)


class ContractBlocks(SharedTiles):
    def __init__(self, k: ContractKernel, scale: Scale = UNSCALED) -> None:
        super().__init__(k.params, k.sizes, width_of(k, k.everything(), k.stores, k.batch, k.rows, k.columns, k.depth))
        self.sites = sites_of(k)
        self.d = ROUGH if all(self.dtypes[name].itemsize <= 2 for name, _ in k.stores) else TRITON
        sizes = [k.about(volume(vars), 1024) for vars in (k.rows, k.columns, k.depth, k.batch)]
        if self.is_turned(k, sizes):
            sizes[:2] = sizes[1::-1]
            k = replace(k, rows=k.columns, columns=k.rows, left=k.right, right=k.left,
                        more=tuple(p._replace(left=p.right, right=p.left) for p in k.more),
                        reductions=tuple(replace(r, rows=r.columns, columns=r.rows) for r in k.reductions))
        self.k, self.wide_kind = k, k.left.dtype
        found = [multiplied(e) for e in k.factors()]
        kinds = {e.dtype for e, _ in found}
        self.kind: DType = found[0][0].dtype
        if (len(kinds) > 1 and not kinds <= FP8) or (k.more and any(scale is not None for _, scale in found)):
            found, self.kind = [(e, None) for e in k.factors()], k.left.dtype
        sizes[1] *= len(k.products)
        ways = [Way(t, how) for t in TILES for how in WAYS if self.fits(t, how)] or [
            Way(min(TILES, key=lambda t: t.high * t.wide), "turns" if self.rows_in_parts else "once")]
        ways.sort(key=lambda way: replace(way, tile=self.all_sums(way.tile)).cost(sizes, self.kind.itemsize))
        self.t, self.how = (way := ways[min(scale.tile, len(ways) - 1)]).tile, way.how
        self.deep = max(self.t.deep // self.kind.itemsize, 16)
        self.deep = min(self.deep, k.promoted or self.deep)
        self.step = Sym("step", ceildiv(volume(k.depth), as_index(self.deep)))
        self.scales = [self.stepped(e) for _, e in found if e is not None]
        if any(s.name == "within" for e in self.scales for s in e.symbols()):  # which tensor cores cannot scale by
            found, self.scales, self.kind = [(e, None) for e in k.factors()], [], k.left.dtype
        self.pairs = [(found[i][0], found[i + 1][0]) for i in range(0, len(found), 2)]
        self.sums = torch.int32 if self.kind is torch.int8 else k.left.dtype

    @staticmethod
    def is_turned(k: ContractKernel, sizes: Sequence[int]) -> bool:
        """Whether columns take the side that needs more of them, or come in parts, as only rows do."""
        if k.ragged is not None and k.ragged.along != "depth":
            return k.ragged.along == "columns"
        return sizes[0] < sizes[1] and sizes[0] <= TALL

    def all_sums(self, t: ProductTile) -> ProductTile:
        """The tile with the columns of all products side by side: that is what its memory and its registers hold."""
        return replace(t, wides=t.wides * len(self.k.products))

    def fits(self, t: ProductTile, how: str) -> bool:
        k, several = self.k, len(t.wides) * len(self.k.products) > 1
        if k.ragged is not None and how != ("turns" if self.rows_in_parts else "once"):
            return False
        if how == "shares" and not k.shares:
            return False
        if how == "turns" and several and not self.rows_in_parts:
            return False  # sums that begin anew in one loop are summed one instruction after the other
        t = self.all_sums(t)
        factors, tile = t.shared(self.kind.itemsize), self.tail_bytes(t)
        registers = t.high * t.wide // (BLOCKS.warp * t.warps)
        beside = factors + tile if how == "turns" else max(factors, tile)  # otherwise no factors are left by then
        fits = beside <= BLOCKS.shared_most - 1024 and registers <= REGISTERS
        return fits and (not k.reductions or self.has_slots(t))

    def stepped(self, scale: Expr) -> Expr:
        """A scale at the points of a step of the depth; it says "within" if it differs between these."""
        at = as_index(self.step) * self.deep + Sym("within", self.deep)
        return scale.subs(dict(zip(self.k.depth, unflat(at, [v.size for v in self.k.depth]), strict=True)))

    # ---- the tiles -------------------------------------------------------------------------------------

    def render(self) -> PartDraft:
        k, t = self.k, self.t
        self.helpers = [HOSTED, "", ""]
        self.scopes[0].lines += ["if HOSTED:", "  fl.wait()"]
        sides = (k.rows, t.high), (k.columns, t.wide)
        high, wide = (count_text(volume(vars), side, self.index) for vars, side in sides)
        many, *others = (count_text(volume(vars), side, self.host) for vars, side in sides)
        if self.rows_in_parts:
            high, many = self.count_parts(many)
        self.line(f"high, wide = {high}, {wide}")
        total = f"high * wide * {self.index(volume(k.batch))}"
        grid, workspace = " * ".join([many, *others, self.host(volume(k.batch))]), ""
        most = f"{self.all_sums(t).resident(self.kind.itemsize)} * units"
        if self.how == "once":
            self.line("tile = tl.program_id(0)" + ("" if self.width is NARROWED else f".to({self.width.kind})"))
            loop = "if True:"
        elif self.how == "turns":
            loop = f"for tile in tl.range(tl.program_id(0), {total}, tl.num_programs(0), flatten=True):"
            grid = f"min({grid}, {most})"
        else:
            loop = self.begin_share(total)
            grid, workspace = self.share_grid(grid, most)
        with self.scope(loop, (*k.batch, *k.rows, *k.columns, *self.of_part), footer=""):
            if self.how == "shares":
                self.next_tile()
            self.line(f"at_row, at_column = fl.place(tile % (high * wide), high, wide, {t.group})")
            self.decompose("(tile // (high * wide))", k.batch)
            if self.rows_in_parts:
                self.enter_part()
            sums = [[self.fresh("sums") for _ in t.wides] for _ in k.products]
            for names in sums:
                for name, size in zip(names, t.wides, strict=True):
                    self.line(f"{name} = tl.zeros([{t.high}, {size}], {self.d.types[self.sums]})")
            self.depth_loop(sums)
            if self.how == "shares":
                self.leave_or_take([name for names in sums for name in names])
            with self.scope("if first == 0:" if self.how == "shares" else "if True:", footer=""):
                for part, (at, size) in enumerate(self.column_parts()):
                    self.finish([names[part] for names in sums], at, size)
            if self.how == "shares":
                self.line("at += last - first")
        return PartDraft(self, grid, t.warps, workspace, maps=tuple(self.maps.values()), waits=True,
                         signals=self.how == "shares")

    def column_parts(self) -> list[tuple[str, int]]:
        """Where each part of a tile's columns begins, and how many they are."""
        wides = self.t.wides
        starts = [sum(wides[:i]) for i in range(len(wides))]
        return [(f"at_column * {self.t.wide}" + (f" + {at}" if at else ""), n)
                for at, n in zip(starts, wides, strict=True)]

    # ---- the sum ---------------------------------------------------------------------------------------

    def depth_loop(self, sums: Sequence[Sequence[str]]) -> None:
        depth = volume(self.k.depth)
        # A loop that may have no rounds makes the compiler sum one instruction after the other: one round of zeros.
        begin, end, last = "0", self.index(depth) if depth.is_const else f"tl.maximum({self.index(depth)}, 1)", ""
        if self.depth_in_parts:
            begin, end, last = self.part_of_depth()
        elif self.how == "shares":
            begin, end = f"first * {self.deep}", f"last * {self.deep}"
            self.line("tl.assume(last > first)")
        steps = f"tl.range({begin}, {end}, {self.deep}, num_stages={self.t.stages})"
        with self.scope(f"for at_depth in {steps}:", footer=""):
            self.step_of_depth(sums, "" if last else None)
        if last:
            with self.scope(f"if {end} < {last}:", footer=""):
                self.line(f"at_depth = {end}")
                self.step_of_depth(sums, last)

    def step_of_depth(self, sums: Sequence[Sequence[str]], end: str | None) -> None:
        """`end`: where the sum ends, if that is not its size; empty where it does not end within the step."""
        k, t, known = self.k, self.t, dict[tuple[Expr, int, str], str]()

        def tile(e: Expr, axis: int, at: str, side: int) -> str:
            if (e, axis, at) not in known:
                known[e, axis, at] = self.factor(e, (k.rows, k.columns)[axis], at, side, axis, end)
            return known[e, axis, at]

        how = f', input_precision="{"tf32" if k.tf32 else "ieee"}"' if is_float(self.kind) else ""
        how += f", out_dtype={self.d.types[self.sums]}"
        each = [e for e in self.scales if self.step in e.symbols()]
        for (left, right), names in zip(self.pairs, sums, strict=True):
            x = tile(left, 0, self.row_start, t.high)
            tiles = [tile(right, 1, at, wide) for at, wide in self.column_parts()]
            for name, y, (at, wide) in zip(names, tiles, self.column_parts(), strict=True):
                if k.promoted or each:
                    by = "".join(f" * {s}" for s in self.scaled(at, wide, each))
                    self.line(f"{name} += tl.dot({x}, {y}{how}){by}")
                else:
                    self.line(f"{name} = tl.dot({x}, {y}, {name}{how})")

    def scaled(self, at: str, wide: int, scales: Sequence[Expr]) -> list[str]:
        """The scales of a tile's rows, and of its columns from `at` on, in a step of the depth."""
        k, t, out = self.k, self.t, [self.fresh("scale") for _ in scales]
        with self.scope("if True:", (*k.rows, *k.columns, self.step), footer=""):
            self.blocks, self.masks = [t.high, wide], {}
            self.walk_axis(k.rows, self.row_start, t.high, 0)
            self.walk_axis(k.columns, at, t.wide, 1)
            self.line(f"{self.sym(self.step)} = at_depth // {self.deep}")
            self.assign(out, [self.value(e) for e in scales])
        return out

    def factor(self, e: Expr, own: Sequence[Sym], at: str, side: int, axis: int, end: str | None) -> str:
        """A tile of a factor: its own points, from `at` on, along `axis`, and the depth along the other one."""
        k, name = self.k, self.fresh("x")
        deep = {v: Sym(f"{v.name}f{axis}", v.size) for v in k.depth}  # the other factor has it along the other axis
        own, (e,) = joined(own, e)
        depth, (e,) = joined(tuple(deep.values()), e.subs({v: as_index(to) for v, to in deep.items()}))
        plain = e.op == "load" and not e.args
        line, start, read = whole_line(e, depth, self.deep)
        found = matrix(read.attr[0], read.attr[1][0], (*k.batch, *self.of_part), (*own, *line), self.kind.itemsize) \
            if read.op == "load" and (plain or read is not e) and not end else None
        if found is not None and not self.begins_anywhere(found.vars[-1], own if axis == 0 else (), line):
            crossed = (found.vars[-1] is line[0]) != (axis == 0)
            deep_at = "at_depth" if start is None else f"{self.index(start)} + at_depth"
            there, tile = self.moved(found, {own[0]: (at, side), line[0]: (deep_at, self.deep)})
            with self.scope(there, footer=""):
                self.line(f"{name} = {tile}{'.T' if crossed else ''}")
            otherwise = "else:"
        else:
            otherwise = "if True:"
        with self.scope(otherwise, (*own, *depth), footer=""):
            self.blocks, self.masks = [side, self.deep] if axis == 0 else [self.deep, side], {}
            self.walk_axis(own, at, side if axis == 0 else self.t.wide, axis)
            self.walk_axis(depth, "at_depth", self.deep, 1 - axis, end)
            zeros = self.d.constant(0, self.kind)
            value = self.load(e.attr[0], e.attr[1][0], (), zeros) if plain else self.value(e)
            axes, beyond = self.axes_of(e), self.inside([1 - axis])
            value = value if axes == self.full() else self.spread(value, self.full())
            zero = 1 - axis in axes and (plain or (padded_read(e) is not None and e.args[2].attr == 0))
            self.line(f"{name} = {f'tl.where({beyond}, {value}, {zeros})' if beyond and not zero else value}")
        return name
