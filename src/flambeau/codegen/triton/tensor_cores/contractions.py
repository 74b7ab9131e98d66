"""Contractions in Triton: tensor cores sum tiles of the result in registers.

The copy engine loads a factor's memory where the layout of its lines allows that (no masks, zeros beyond the end).
Otherwise the tile is loaded through pointers, whatever expression it is: masks of a convolution, casts, scales. A
tile's columns may be split into parts, each with sums of its own: 128 + 64 columns fit where 256 are too many. The
epilogue that follows the sum is in tiles.py.

How the work is divided among programs (`Way.how`):
once    one program for each tile
turns   persistent programs that take tile after tile. The compiler merges this loop with the one over the depth
        (`flatten`), so that the next tile's first loads are in flight while results of the last are written
roles   like turns, but one warp group of a program loads tiles, also the next one's, and the others sum them: the
        compiler divides the loop's text among them (`warp_specialize`)
shares  all steps of all tiles are divided equally. A program may begin within a tile's depth, and then leaves its sum
        to the program that began the tile, which adds it to its own: always in the same order (shares.py)
pieces  the depth of each tile is cut into pieces, one program each. All of them leave their sums in memory, and a
        second launch adds these up and computes the epilogue (pieces.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from flambeau.codegen.source import HOSTED
from flambeau.ir.dtypes import FP8, DType, is_float
from flambeau.ir.expr import Expr, cost_of
from flambeau.ir.index import Sym, as_index, ceildiv, unflat, volume
from flambeau.ir.lines import joined
from flambeau.ir.nodes import unscaled
from flambeau.ir.program import ContractKernel, sites_of
from flambeau.ir.tuning import BLOCKS, PIECES, TILES, UNSCALED, WAYS, ProductTile, Scale, Way

from ..blocks import PartDraft, count_text, padded_read, width_of
from ..dialect import ROUGH, TRITON
from .pieces import PieceTiles
from .tensor_maps import matrix, whole_line

# multiplied in their own dtype, and summed in 32 bits
SMALL = frozenset((torch.bfloat16, torch.float16, torch.int8, *FP8))
REGISTERS = 160  # registers of a thread that sums may take
# registers of a thread that sums and factors may take together, where factors are loaded through registers
WITH_FACTORS = 208


def multiplied(factor: Expr) -> tuple[Expr, Expr | None]:
    """Returns what tensor cores multiply for a factor (its value before it was widened), and the scale to apply to the
    sum, or None."""
    small, scale = unscaled(factor)
    return (small, scale) if small.dtype in SMALL else (factor, None)


@lru_cache(maxsize=256)
def ranked(ways: tuple[Way, ...], sizes: tuple[int, ...], products: int, itemsize: int, memory: float, parts: int
           ) -> list[Way]:
    """The candidates worth timing: all whose modelled cost is within `near` of the best, with one orientation and one
    number of pieces for each tile shape. The cheapest comes first, and the three cheapest of each way to divide the
    work come before others, as not all are timed. If the `memory` traffic dominates, only the first. `parts`: of the
    rows, in the last tile of each of which half of the rows are empty on average."""
    found: dict[tuple[ProductTile, str], tuple[float, Way]] = {}
    for way in ways:
        rows, columns, *others = sizes if not way.turned else (sizes[1], sizes[0], *sizes[2:])
        tile = replace(way.tile, wides=way.tile.wides * products)
        rows += parts * tile.high // (4 if way.halves else 2)
        for n in PIECES if way.how == "pieces" else (1,):
            cost = Way(tile, way.how, n).cost((rows, columns * products, *others), itemsize)
            if (way.tile, way.how) not in found or cost < found[way.tile, way.how][0]:
                found[way.tile, way.how] = cost, replace(way, pieces=n)
    costs = sorted(found.values(), key=lambda at: at[0])
    least = costs[0][0] if costs else 0
    at_most = least if least * 100 < memory * BLOCKS.near else least * BLOCKS.near / 100
    near = [way for cost, way in costs if cost <= at_most]
    before = [sum(other.how == way.how for other in near[:k]) for k, way in enumerate(near)]
    return [near[k] for k in sorted(range(len(near)), key=lambda k: before[k] // 3)]


def turned(k: ContractKernel) -> ContractKernel:
    """Returns the same contraction with rows and columns swapped."""
    return replace(k, rows=k.columns, columns=k.rows, left=k.right, right=k.left,
                   more=tuple(p._replace(left=p.right, right=p.left) for p in k.more),
                   reductions=tuple(replace(r, rows=r.columns, columns=r.rows) for r in k.reductions))


class ContractBlocks(PieceTiles):
    def __init__(self, k: ContractKernel, scale: Scale = UNSCALED) -> None:
        super().__init__(k.params, k.sizes, width_of(k, k.everything(), k.stores, k.batch, k.rows, k.columns, k.depth))
        self.sites = sites_of(k)
        self.d = ROUGH if all(self.dtypes[name].itemsize <= 2 for name, _ in k.stores) else TRITON
        found = [multiplied(e) for e in k.factors()]
        kinds = {e.dtype for e, _ in found}
        self.kind: DType = found[0][0].dtype
        if (len(kinds) > 1 and not kinds <= FP8) or (k.more and any(scale is not None for _, scale in found)):
            found, self.kind = [(e, None) for e in k.factors()], k.left.dtype
        self.k, self.forms = k, {False: k, True: turned(k)}
        ways = self.ways()
        self.way = ways[min(scale.tile, len(ways) - 1)]
        self.k = k = self.forms[self.way.turned]
        if self.way.turned:
            found = [f for pair in zip(found[1::2], found[::2], strict=True) for f in pair]
        self.t, self.how = self.way.tile, self.way.how
        self.deep = max(self.t.deep // self.kind.itemsize, 16)
        self.deep = min(self.deep, k.promoted or self.deep)
        self.step = Sym("step", ceildiv(volume(k.depth), as_index(self.deep)))
        self.scales = [self.stepped(e) for _, e in found if e is not None]
        # tensor cores cannot apply a scale that varies within a step
        if any(s.name == "within" for e in self.scales for s in e.symbols()):
            found, self.scales, self.kind = [(e, None) for e in k.factors()], [], k.left.dtype
        self.pairs = [(found[i][0], found[i + 1][0]) for i in range(0, len(found), 2)]
        self.sums = torch.int32 if self.kind is torch.int8 else k.left.dtype

    def tiles(self) -> dict[str, list[ProductTile]]:
        """The candidate tiles of each way. A program that owns a single tile needs no more memory than that tile's
        depth takes."""
        k = self.k
        depth = k.about(volume(k.depth), 1024)
        follows = [*(e for i in k.items for e in i.exprs), *(e for r in k.reductions for e in r.item.exprs)]
        loose = not all(map(self.by_engine, k.factors()))
        tiles = [replace(t, tail=cost_of(follows), loose=loose) for t in TILES]
        cut = tiles if k.ragged is not None or k.promoted else [t.cut(depth, self.kind.itemsize) for t in tiles]
        # with a single step there is nothing to divide
        shared = [t for t in tiles if t.deep < depth * self.kind.itemsize]
        roles = tiles if k.ragged is None and all(self.by_engine(e, always=True) for e in k.factors()) else []
        # beside factors, results may fit in halves
        turns = [t if self.fits(t, "turns") else replace(t, ends=2) for t in tiles]
        return {"once": cut, "turns": turns, "roles": roles, "shares": shared, "pieces": shared}

    def by_engine(self, factor: Expr, always: bool = False) -> bool:
        """Whether the copy engine can load a factor, at sizes like those that were captured, or at any (`always`)."""
        e, k = multiplied(factor)[0], self.k
        own = k.rows if set(k.rows) & e.symbols() else k.columns
        sides: list[Sym] = []
        for vars in (own, k.depth):
            vars, (e,) = joined(vars, e)
            sides += vars
        read = e if e.op == "load" and not e.args else padded_read(e)
        if read is None:
            return False
        found = matrix(read.attr[0], read.attr[1][0], (*k.batch, *self.of_part), sides, self.kind.itemsize)
        return found is not None and all(not always and k.about(as_index(s), 1) % 16 == 0 for s in found.even)

    def all_sums(self, t: ProductTile) -> ProductTile:
        """Returns the tile with the columns of all products side by side: this is what its memory and registers have to
        hold."""
        return replace(t, wides=t.wides * len(self.k.products))

    def ways(self) -> list[Way]:
        """The candidates to be timed, cheapest first (`ranked`); never empty. A contraction of ragged parts fixes the
        orientation: the ragged side is that of rows."""
        along = self.k.ragged.along if self.k.ragged is not None else "depth"
        sizes = tuple(self.k.about(volume(vars), 1024)
                      for vars in (self.k.rows, self.k.columns, self.k.depth, self.k.batch))
        found: list[Way] = []
        for turn in (True,) if along == "columns" else (False,) if along == "rows" else (False, True):
            self.k = self.forms[turn]
            tiles = self.tiles()
            found += [Way(t, how, turned=turn) for how in WAYS for t in tiles[how] if self.fits(t, how)]
        smallest = min(TILES, key=lambda t: t.high * t.wide)
        rows, columns, depth, batch = sizes
        moved = batch * ((rows + columns * len(self.k.products)) * depth * self.kind.itemsize
                         + rows * columns * sum(self.dtypes[name].itemsize for name, _ in self.k.stores))
        parts = k.ragged.part.size.const if (k := self.k).ragged is not None and self.rows_in_parts else 0
        return ranked(tuple(found), sizes, len(k.products), self.kind.itemsize, moved / BLOCKS.cycle_bytes, parts) or [
            Way(smallest, "turns" if self.rows_in_parts else "once", turned=along == "columns")]

    def fits(self, t: ProductTile, how: str) -> bool:
        k, several = self.k, len(t.wides) * len(self.k.products) > 1
        if k.ragged is not None and how not in (("once", "turns") if self.rows_in_parts else ("once",)):
            return False
        if how == "shares" and not k.shares or how in ("pieces", "roles") and k.reductions:
            return False
        if how == "roles":  # The compiler gives each half of 128 rows to a group of four warps.
            widest = max((self.dtypes[name].itemsize for name, _ in k.stores), default=0)
            stored = t.high * t.wide * (1 if widest == 2 else widest)  # 16 bits are stored in two turns
            return not several and (t.high, t.warps) == (128, 4) and (
                t.shared(self.kind.itemsize) + stored <= BLOCKS.shared_most - 1024)
        if how == "turns" and several and not self.rows_in_parts:
            return False  # sums that begin anew within one loop are summed one instruction after the other
        t = self.all_sums(t)
        factors, tile = t.shared(self.kind.itemsize), self.tail_bytes(t)
        registers = t.high * t.wide // (BLOCKS.warp * t.warps)
        # otherwise the factors are no longer needed by then
        beside = factors + tile if how == "turns" else max(factors, tile)
        fits = beside <= BLOCKS.shared_most - 1024 and registers <= REGISTERS
        fits = fits and t.registers(self.kind.itemsize) <= WITH_FACTORS
        return fits and (not k.reductions or self.has_slots(t))

    def stepped(self, scale: Expr) -> Expr:
        """Returns a scale at the points of a step of the depth. It contains the symbol "within" if it varies within the
        step."""
        at = as_index(self.step) * self.deep + Sym("within", self.deep)
        return scale.subs(dict(zip(self.k.depth, unflat(at, [v.size for v in self.k.depth]), strict=True)))

    # ---- the tiles -------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.helpers = [HOSTED, "", ""]
        self.scopes[0].lines += ["if HOSTED:", "  fl.wait()", "  fl.release()"]

    def render(self) -> PartDraft:
        k, t = self.k, self.t
        self.begin()
        sides = (k.rows, t.high), (k.columns, t.wide)
        high, wide = (count_text(volume(vars), side, self.index) for vars, side in sides)
        many, *others = (count_text(volume(vars), side, self.host) for vars, side in sides)
        if self.rows_in_parts:
            high, many = self.count_parts(many)
        self.line(f"high, wide = {high}, {wide}")
        total = f"high * wide * {self.index(volume(k.batch))}"
        grid, workspace = " * ".join([many, *others, self.host(volume(k.batch))]), ""
        most = f"{1 if self.how == 'roles' else self.all_sums(t).resident(self.kind.itemsize)} * units"
        if self.how == "once":
            self.line(f"tile = {self.program}")
            loop = f"if tile < {total}:" if self.rows_in_parts else "if True:"
        elif self.how == "pieces":
            loop, sizes = "if True:", " * ".join(self.host(volume(vars)) for vars in (k.rows, k.columns, k.batch))
            workspace = f"{self.sums.itemsize * self.pieces * len(k.products)} * {sizes}"
            grid = self.begin_piece(grid)
        elif self.how == "turns":
            loop = f"for tile in tl.range(tl.program_id(0), {total}, tl.num_programs(0), flatten=True):"
            grid = f"min({grid}, {most})"
        elif self.how == "roles":
            loop = f"for tile in tl.range(tl.program_id(0), {total}, tl.num_programs(0), warp_specialize=True):"
            grid = f"min({grid}, {most})"
        else:
            loop = self.begin_share(total)
            grid, workspace = self.share_grid(grid, most)
        with self.scope(loop, (*k.batch, *k.rows, *k.columns, *self.of_part), footer=""):
            if self.how == "shares":
                self.next_tile()
            self.decompose("(tile // (high * wide))", k.batch)
            if self.rows_in_parts:
                self.enter_part()
            else:
                self.line(f"at_row, at_column = fl.place(tile % (high * wide), high, wide, {t.group})")
            if self.halves:
                # not "else", which Triton wants to define variables of the same shapes
                for test, tall in (">", t.high), ("<=", t.high // 2):
                    self.t = replace(t, high=tall)
                    with self.scope(f"if end_row - first_row {test} {t.high // 2}:", footer=""):
                        self.sum_tile()
                self.t = t
            else:
                self.sum_tile()
            if self.how == "shares":
                self.line("at += last - first")
        stages = t.stages if self.how == "roles" else None
        return PartDraft(self, grid, t.warps, workspace, stages, tuple(self.maps.values()), waits=True,
                         signals=self.how == "shares", fills=self.how in ("shares", "pieces"))

    def sum_tile(self) -> None:
        """Writes the sum of a tile, and what follows it."""
        t = self.t
        sums = [[self.fresh("sums") for _ in t.wides] for _ in self.k.products]
        for names in sums:
            for name, size in zip(names, t.wides, strict=True):
                self.line(f"{name} = tl.zeros([{t.high}, {size}], {self.d.types[self.sums]})")
        self.depth_loop(sums)
        if self.how == "shares":
            self.leave_or_take([name for names in sums for name in names])
        with self.scope("if first == 0:" if self.how == "shares" else "if True:", footer=""):
            for part, (at, size) in enumerate(self.column_parts()):
                end = self.leave if self.how == "pieces" else self.finish
                found = [names[part] for names in sums]
                for names, start in self.halved(found, at, size) if t.ends == 2 else ((found, at),):
                    end(names, start, size // t.ends)

    def halved(self, sums: Sequence[str], at: str, wide: int) -> list[tuple[list[str], str]]:
        """Writes the halves of sums' columns; returns their names and where they start."""
        halves: tuple[list[str], list[str]] = [], []
        for name in sums:
            for half in halves:
                half.append(self.fresh("half"))
            self.line(f"{halves[0][-1]}, {halves[1][-1]} = tl.split(tl.permute(tl.reshape("
                      f"{name}, [{self.t.high}, 2, {wide // 2}]), [0, 2, 1]))")
        return [(halves[0], at), (halves[1], f"{at} + {wide // 2}")]

    def column_parts(self) -> list[tuple[str, int]]:
        """Returns the start and the length of each part of a tile's columns."""
        wides = self.t.wides
        starts = [sum(wides[:i]) for i in range(len(wides))]
        return [(f"at_column * {self.t.wide}" + (f" + {at}" if at else ""), n)
                for at, n in zip(starts, wides, strict=True)]

    # ---- the sum ---------------------------------------------------------------------------------------

    def depth_loop(self, sums: Sequence[Sequence[str]]) -> None:
        depth = volume(self.k.depth)
        # If the loop may have no iterations, the compiler sums one instruction after the other: do one iteration of
        # zeros.
        begin, end, last = "0", self.index(depth) if depth.is_const else f"tl.maximum({self.index(depth)}, 1)", ""
        if self.depth_in_parts:
            begin, end, last = self.part_of_depth()
        elif self.how in ("shares", "pieces"):
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
        """Writes one step of the sum. `end`: where the sum ends, None if that is the size of the depth; a step that
        ends within a part is masked and avoids the copy engine."""
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
        """Computes the scales of a tile's rows, and of its columns from `at` on, for a step of the depth; returns their
        names."""
        k, t, out = self.k, self.t, [self.fresh("scale") for _ in scales]
        with self.scope("if True:", (*k.rows, *k.columns, self.step), footer=""):
            self.blocks, self.masks = [t.high, wide], {}
            self.walk_axis(k.rows, self.row_start, t.high, 0)
            self.walk_axis(k.columns, at, t.wide, 1)
            self.line(f"{self.sym(self.step)} = at_depth // {self.deep}")
            self.assign(out, [self.value(e) for e in scales])
        return out

    def factor(self, e: Expr, own: Sequence[Sym], at: str, side: int, axis: int, end: str | None) -> str:
        """Loads a tile of a factor: its own variables from `at` on along `axis`, the depth along the other axis."""
        k, name = self.k, self.fresh("x")
        # fresh variables, because the other factor has the depth along the other axis
        deep = {v: Sym(f"{v.name}f{axis}", v.size) for v in k.depth}
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
