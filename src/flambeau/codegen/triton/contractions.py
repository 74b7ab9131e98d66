"""Contractions in Triton: tensor cores sum tiles of the result in registers, a tile for each program or one after the other.

What a factor is read from comes by the copy engine where its lines allow that (no masks, zeros beyond the end), and by
pointers otherwise, whatever expression it is: masks of a convolution, casts, scales. Where programs take several tiles,
the loop over the tiles and the one over the depth are one loop for the compiler (`flatten`), so that a tile's first pieces
are on their way while the results of the one before are written. What follows the sum is written over the tile, like any
map. A tile's columns may come in parts, each with sums of its own: 128 + 64 columns fit where 256 are too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from flambeau.ir.dtypes import FP8, DType, is_float
from flambeau.ir.expr import Expr, const, index_value, loads, masked, where
from flambeau.ir.index import Index, Sym, as_index, ceildiv, unflat, volume
from flambeau.ir.lines import joined
from flambeau.ir.nodes import unscaled
from flambeau.ir.program import ContractKernel, sites_of
from flambeau.ir.tuning import BLOCKS, TILES, UNSCALED, ProductTile, Scale

from ..source import HOSTED
from .blocks import NARROWED, PartDraft, count_text, padded_read, power, width_of
from .dialect import ROUGH, TRITON
from .tensor_maps import MapWriter, Matrix, matrix, whole_line

TALL = 64  # rows that tensor cores take at least on one side: on the other, eight are enough
SMALL = frozenset((torch.bfloat16, torch.float16, torch.int8, *FP8))  # multiplied as they are, and summed in 32 bits


def multiplied(factor: Expr) -> tuple[Expr, Expr | None]:
    """What tensor cores take for a factor, the number before it was widened; and what the sum is scaled by for it."""
    small, scale = unscaled(factor)
    return (small, scale) if small.dtype in SMALL else (factor, None)


class ContractBlocks(MapWriter):
    def __init__(self, k: ContractKernel, scale: Scale = UNSCALED) -> None:
        super().__init__(k.params, k.sizes, width_of(k, k.everything(), k.stores, k.batch, k.rows, k.columns, k.depth))
        self.sites = sites_of(k)
        self.d = ROUGH if all(self.dtypes[name].itemsize <= 2 for name, _ in k.stores) else TRITON
        (self.left, of_left), (self.right, of_right) = multiplied(k.left), multiplied(k.right)
        if self.left.dtype is not self.right.dtype and not {self.left.dtype, self.right.dtype} <= FP8:
            self.left, self.right, of_left, of_right = k.left, k.right, None, None
        self.kind: DType = self.left.dtype
        self.sums = torch.int32 if self.kind is torch.int8 else k.left.dtype
        # What is read and written whole goes through shared memory beside the factors.
        self.across = [e.dtype.itemsize for i in k.items for e in loads(*i.exprs)
                       if all(e.symbols() & set(vars) for vars in (k.rows, k.columns))]
        sizes = [k.about(volume(vars), 1024) for vars in (k.rows, k.columns, k.depth, k.batch)]
        along = None if k.ragged is None else k.ragged.along
        if along == "columns" or (along != "rows" and sizes[0] < sizes[1] and sizes[0] <= TALL):
            k = replace(k, rows=k.columns, columns=k.rows)
            self.left, self.right, sizes[:2] = self.right, self.left, sizes[1::-1]
            of_left, of_right = of_right, of_left
        self.k, self.ragged = k, k.ragged
        tiles = [t for t in TILES if self.room(t) >= 0]
        self.t = sorted(tiles, key=lambda t: t.cost(sizes, self.kind.itemsize))[min(scale.tile, len(tiles) - 1)]
        self.deep = max(self.t.deep // self.kind.itemsize, 16)
        self.deep = min(self.deep, k.promoted or self.deep)
        self.step = Sym("step", ceildiv(volume(k.depth), as_index(self.deep)))
        self.scales = [None if e is None else self.stepped(e) for e in (of_left, of_right)]
        if any(e is not None and "within" in {s.name for s in e.symbols()} for e in self.scales):
            self.left, self.right, self.scales = k.left, k.right, [None, None]
            self.kind = self.sums = k.left.dtype

    def render(self) -> PartDraft:
        k, t = self.k, self.t
        self.helpers = [HOSTED, "", ""]
        self.scopes[0].lines += ["if HOSTED:", "  fl.wait()"]
        sides = (k.rows, t.high), (k.columns, t.wide)
        high, wide = (count_text(volume(vars), side, self.index) for vars, side in sides)
        many, *others = (count_text(volume(vars), side, self.host) for vars, side in sides)
        if self.rows_in_parts:
            high = f"tl.sum(fl.pieces({', '.join(self.ends_of_parts())}, {t.high}), 0)"
            many = f"({many} + {self.host(self.ragged.part.size)})"
        self.line(f"high, wide = {high}, {wide}")
        total = f"high * wide * {self.index(volume(k.batch))}"
        tiles = " * ".join([many, *others, self.host(volume(k.batch))])
        most = f"{t.resident(self.kind.itemsize)} * units"
        loop = f"for tile in tl.range(tl.program_id(0), {total}, tl.num_programs(0), flatten={not self.depth_in_parts}):"
        if self.at_once(t):
            self.line("tile = tl.program_id(0)" + ("" if self.width is NARROWED else f".to({self.width.kind})"))
            loop, most = "if True:", ""
        with self.scope(loop, (*k.batch, *k.rows, *k.columns, *((self.ragged.part,) if self.ragged else ())), footer=""):
            self.line(f"at_row, at_column = fl.place(tile % (high * wide), high, wide, {t.group})")
            self.decompose("(tile // (high * wide))", k.batch)
            if self.rows_in_parts:
                self.line(f"{self.sym(self.ragged.part)}, first_row, end_row = fl.share(at_row, begins, ends, {t.high})")
            sums = [self.fresh("sums") for _ in t.wides]
            for name, wide in zip(sums, t.wides, strict=True):
                self.line(f"{name} = tl.zeros([{t.high}, {wide}], {self.d.types[self.sums]})")
            self.depth_loop(sums)
            self.finish(sums)
        return PartDraft(self, f"min({tiles}, {most})" if most else tiles, t.warps, maps=tuple(self.maps.values()),
                         waits=True)

    def at_once(self, t: ProductTile) -> bool:
        """Whether there are no more tiles than programs that run at once."""
        k = self.k
        if self.rows_in_parts:
            return False
        sides = volume(k.batch), ceildiv(volume(k.rows), as_index(t.high)), ceildiv(volume(k.columns), as_index(t.wide))
        return all(n.is_const for n in sides) and prod(n.const for n in sides) <= BLOCKS.processors * t.resident(
            self.kind.itemsize)

    def stepped(self, scale: Expr) -> Expr:
        """A scale at the points of a step of the depth, which it does not depend on unless it differs within one."""
        at = as_index(self.step) * self.deep + Sym("within", self.deep)
        return scale.subs(dict(zip(self.k.depth, unflat(at, [v.size for v in self.k.depth]), strict=True)))

    # ---- the sum ---------------------------------------------------------------------------------------

    def column_parts(self) -> list[tuple[str, int]]:
        """Where each part of a tile's columns begins, and how many they are."""
        wides = self.t.wides
        starts = [sum(wides[:i]) for i in range(len(wides))]
        return [(f"at_column * {self.t.wide}" + (f" + {at}" if at else ""), n)
                for at, n in zip(starts, wides, strict=True)]

    def depth_loop(self, sums: Sequence[str]) -> None:
        begin, end = "0", self.index(volume(self.k.depth))
        if self.depth_in_parts:
            begin, last = self.part_of_depth()
            end = self.fresh("whole")
            self.line(f"{end} = {begin} + tl.maximum({last} - {begin}, 0) // {self.deep} * {self.deep}")
        with self.scope(f"for at_depth in tl.range({begin}, {end}, {self.deep}, num_stages={self.t.stages}):", footer=""):
            self.step_of_depth(sums, None if not self.depth_in_parts else "")
        if self.depth_in_parts:
            with self.scope(f"if {end} < {last}:", footer=""):
                self.line(f"at_depth = {end}")
                self.step_of_depth(sums, last)

    def step_of_depth(self, sums: Sequence[str], end: str | None) -> None:
        """`end`: where the sum ends, if that is not its size; none where it does not end within the step."""
        k, t = self.k, self.t
        left = self.factor(self.left, k.rows, self.row_start, t.high, 0, end)
        rights = [self.factor(self.right, k.columns, at, wide, 1, end) for at, wide in self.column_parts()]
        how = f', input_precision="{"tf32" if k.tf32 else "ieee"}"' if is_float(self.kind) else ""
        how += f", out_dtype={self.d.types[self.sums]}"
        each = [e for e in self.scales if e is not None and self.step in e.symbols()]
        for name, right, (at, wide) in zip(sums, rights, self.column_parts(), strict=True):
            if k.promoted or each:
                by = "".join(f" * {s}" for s in self.scaled(at, wide, each))
                self.line(f"{name} += tl.dot({left}, {right}{how}){by}")
            else:
                self.line(f"{name} = tl.dot({left}, {right}, {name}{how})")

    def scaled(self, at: str, wide: int, scales: Sequence[Expr]) -> list[str]:
        """The scales of a tile's rows, and of its columns from `at` on."""
        k, t, out = self.k, self.t, [self.fresh("scale") for _ in scales]
        with self.scope("if True:", (*k.rows, *k.columns, self.step), footer=""):
            self.blocks, self.masks = [t.high, wide], {}
            self.walk_axis(k.rows, self.row_start, t.high, 0)
            self.walk_axis(k.columns, at, wide, 1)
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
        outside = (*k.batch, *((self.ragged.part,) if self.rows_in_parts else ()))
        found = matrix(read.attr[0], read.attr[1][0], outside, (*own, *line), self.kind.itemsize) \
            if read.op == "load" and (plain or read is not e) and not end else None
        begins_anywhere = line if self.depth_in_parts else own if self.rows_in_parts and axis == 0 else ()
        if found is not None and found.vars[-1] in begins_anywhere:
            found = None  # the engine begins at multiples of 16 bytes of a line
        if found is not None:
            crossed = (found.vars[-1] is line[0]) != (axis == 0)
            deep_at = "at_depth" if start is None else f"{self.index(start)} + at_depth"
            there, tile = self.moved(found, {own[0]: (at, side), line[0]: (deep_at, self.deep)})
            with self.scope(there, footer=""):
                self.line(f"{name} = {tile}{'.T' if crossed else ''}")
        with self.scope("else:" if found else "if True:", (*own, *depth), footer=""):
            self.blocks, self.masks = [side, self.deep] if axis == 0 else [self.deep, side], {}
            self.walk_axis(own, at, side, axis)
            self.walk_axis(depth, "at_depth", self.deep, 1 - axis, end)
            value = self.load(e.attr[0], e.attr[1][0], (), "0") if plain else self.value(e)
            axes, beyond = self.axes_of(e), self.inside([1 - axis])
            value = value if axes == self.full() else self.spread(value, self.full())
            zero = 1 - axis in axes and (plain or (padded_read(e) is not None and e.args[2].attr == 0))
            self.line(f"{name} = {f'tl.where({beyond}, {value}, 0)' if beyond and not zero else value}")
        return name

    def walk_axis(self, vars: Sequence[Sym], start: str, length: int, axis: int, end: str | None = None) -> None:
        """Variables from their joint position along an axis of the tile, and the mask of what is beyond the end."""
        self.axes.update(dict.fromkeys(vars, axis))
        size, at = volume(vars), self.fresh("at")
        self.line(f"{at} = {start} + {self.arange(axis)}")
        if end is None:
            end = "" if size.is_const and size.const % length == 0 else self.index(size)
        if end:
            self.masks[axis] = self.fresh("m")
            self.line(f"{self.masks[axis]} = {at} < {end}")
        self.decompose(at, vars)

    # ---- rows, or a depth, in parts ----------------------------------------------------------------------

    @property
    def rows_in_parts(self) -> bool:
        return self.ragged is not None and self.ragged.along != "depth"

    @property
    def depth_in_parts(self) -> bool:
        return self.ragged is not None and self.ragged.along == "depth"

    @property
    def row_start(self) -> str:
        return "first_row" if self.rows_in_parts else f"at_row * {self.t.high}"

    def ends_at(self, part: Index, real: Expr) -> Expr:
        """Where a part ends, zero for none."""
        assert self.ragged is not None
        ends = self.ragged.ends.subs({self.ragged.part: part})
        return where(real, masked(ends, real), const(0, ends.dtype))

    def ends_of_parts(self) -> tuple[str, str]:
        """Where parts begin and end, all of them side by side."""
        assert self.ragged is not None
        size = self.ragged.part.size
        each = Sym("parts", power(size.const))
        self.blocks, self.axes[each] = [power(size.const)], 0
        self.line(f"{self.sym(each)} = {self.arange(0)}")
        at, most = index_value(each), index_value(size)
        texts = self.value(self.ends_at(as_index(each) - 1, (at >= 1) & (at < most))), self.value(
            self.ends_at(as_index(each), at < most))
        self.assign(("begins", "ends"), [self.within(text, self.k.rows) for text in texts])
        return "begins", "ends"

    def within(self, end: str, vars: Sequence[Sym]) -> str:
        """Whatever data say, no part goes beyond its tensor."""
        return f"tl.cast(tl.minimum({end}, {self.index(volume(vars))}), tl.int32)"

    def part_of_depth(self) -> tuple[str, str]:
        assert self.ragged is not None
        at, names = index_value(self.ragged.part), (self.fresh("begin"), self.fresh("end"))
        self.blocks = []
        texts = [self.value(self.ends_at(as_index(self.ragged.part) - 1, at >= 1)), self.value(self.ragged.ends)]
        self.assign(names, [self.within(text, self.k.depth) for text in texts])
        return names

    # ---- what follows ----------------------------------------------------------------------------------

    def room(self, t: ProductTile) -> int:
        """Bytes of shared memory that are left beside the factors and what is written, or read, whole: one result goes to
        the copy engine, while others change their layout. A program of one tile has no factors any more by then."""
        first, *others = sorted((self.dtypes[n].itemsize for n, _ in self.k.stores), reverse=True)
        factors, tile = t.shared(self.kind.itemsize), t.high * max(t.wides) * (first + max([*others, *self.across, 0]))
        return BLOCKS.shared_most - 1024 - (max(factors, tile) if self.at_once(t) else factors + tile)

    def finish(self, sums: Sequence[str]) -> None:
        k, t = self.k, self.t
        rows, exprs = joined(k.rows, *(i.exprs[0] for i in k.items),
                             *(Expr("index", torch.int64, (), a) for _, a in k.stores))
        columns, exprs = joined(k.columns, *exprs)
        bodies = dict(zip((i.names[0] for i in k.items), exprs, strict=False))
        stores = {name: e.attr if e.op == "index" else as_index(e.attr)
                  for (name, _), e in zip(k.stores, exprs[len(bodies):], strict=True)}
        largest, own = max(k.stores, key=lambda s: self.dtypes[s[0]].itemsize)[0], (*rows, *columns)
        for summed, (at, wide) in zip(sums, self.column_parts(), strict=True):
            self.blocks, self.masks = [t.high, wide], {}
            starts = self.row_start, at
            with self.scope("if True:", own, footer="") as scope:
                self.walk_axis(rows, starts[0], t.high, 0, "end_row" if self.rows_in_parts else None)
                self.walk_axis(columns, starts[1], wide, 1)
                text = self.d.cast(summed, self.sums, k.left.dtype)
                for e in self.scales:
                    if e is not None and self.step not in e.symbols():
                        before, text = text, self.fresh()
                        self.line(f"{text} = {before} * {self.value(e)}")
                self.local_axes[k.name], scope.locals[k.name] = self.full(), text
                for name in (k.name, *bodies):
                    value = self.keep_value(name, bodies[name]) if name in bodies else text
                    if name in stores:
                        found = matrix(name, stores[name], k.batch, own, self.dtypes[name].itemsize) \
                            if name == largest and not self.rows_in_parts else None
                        tile = dict(zip(own, zip(starts, self.blocks, strict=True), strict=False))
                        self.write(name, stores[name], value, *(() if found is None else (found, tile)))

    def write(self, name: str, address: Index, value: str, m: Matrix | None = None,
              tile: dict[Sym, tuple[str, int]] | None = None) -> None:
        value, full = f"tl.cast({value}, {self.d.types[self.dtypes[name]]})", self.full()
        if m is None or tile is None:
            self.store(name, address, value, full)
            return
        crossed = m.vars[-1] is not [*tile][-1]
        there, text = self.moved(m, tile, self.spread(value, full) + (".T" if crossed else ""))
        with self.scope(there, footer=""):
            self.line(text)
        with self.scope("else:", footer=""):
            self.store(name, address, value, full)
