"""Contractions in Triton: persistent programs compute tiles of the result on tensor cores.

What a factor is read from comes by the copy engine where its lines allow that (one place a tile, no masks, zeros beyond
the end), and by pointers otherwise, whatever expression it is: masks of a convolution, casts, scales. The loop over the
tiles and the one over the depth are one loop for the compiler (`flatten`), so that a tile's first pieces are on their
way while the results of the one before are written. What follows the sum is written over the tile, like any map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flambeau.ir.dtypes import DType, is_float
from flambeau.ir.expr import Expr, loads
from flambeau.ir.index import ONE, Index, Sym, as_index, volume
from flambeau.ir.lines import joined
from flambeau.ir.program import ContractKernel, sites_of
from flambeau.ir.tuning import BLOCKS, TILES, UNSCALED, ProductTile, Scale

from ..source import ALIGNED
from .blocks import NARROWED, BlockWriter, PartDraft, count_text, padded_read, width_of
from .dialect import ROUGH, TRITON

LINE = 16  # bytes of which steps between lines are multiples, where the copy engine reads them
TALL = 64  # columns that tensor cores take at least on one side: on the other, eight are enough
SMALL = frozenset((torch.bfloat16, torch.float16, torch.int8))  # multiplied as they are, and summed in 32 bits


def multiplied(factor: Expr) -> Expr:
    """What tensor cores take for a factor: the number before it was widened."""
    return factor.args[0] if factor.op == "cast" and factor.args[0].dtype in SMALL else factor


@dataclass(frozen=True)
class Matrix:
    """Memory that the copy engine reads or writes a tile of: along each dimension a variable, or several as one."""

    buffer: str
    start: Index
    vars: tuple[Sym, ...]  # the contiguous one last
    steps: tuple[Index, ...]


def matrix(buffer: str, address: Index, batch: Sequence[Sym], own: Sequence[Sym], itemsize: int) -> Matrix | None:
    """An access as a matrix of two variables for each point of the batch, if it is one: one of the two is contiguous,
    and lines begin where the engine can read."""
    steps = {v: s for v in (*batch, *own) if (s := address.coefficient(v)) is not None and s.is_const and s.const > 0}
    start = address - sum((s * v for v, s in steps.items()), as_index(0))
    starts = [start, *(s for s in steps.values() if s is not ONE)]
    if len(own) != 2 or not all(v in steps for v in own) or len(steps) != len(starts) or len(steps) > 5 or not all(
            s.is_const and s.const % (LINE // itemsize) == 0 for s in starts):
        return None
    dims = sorted(steps, key=lambda v: (v in own, steps[v] is ONE))
    return Matrix(buffer, start, tuple(dims), tuple(steps[v] for v in dims)) if steps[dims[-1]] is ONE else None


def whole_line(e: Expr, depth: Sequence[Sym], deep: int) -> tuple[Sequence[Sym], Index | None, Expr]:
    """Of a read that ends where a sum does which is cut into pieces, the last of them shorter: the variable of all the
    sum, where the piece begins in it, and the read along it, beyond whose end the copy engine reads zeros. What is no
    such read comes back as it is."""
    read = padded_read(e)
    test = e.args[0] if read is not None else e
    if read is None or len(depth) != 1 or test.op != "lt" or e.args[1] is not read or e.args[2].attr != 0 \
            or any(a.op not in ("index", "const") for a in test.args):
        return depth, None, e
    place, size = (as_index(a.attr) for a in test.args)
    piece, (v,) = place - depth[0], depth
    if v in piece.symbols() or any(n % deep for n in (piece.const, *(n for _, n in piece.terms))):
        return depth, None, e
    whole = Sym(f"{v.name}w", size)
    return (whole,), piece, Expr("load", e.dtype, (), (read.attr[0], (
        read.attr[1][0].subs({v: as_index(whole) - piece}),)))


class ContractBlocks(BlockWriter):
    def __init__(self, k: ContractKernel, scale: Scale = UNSCALED) -> None:
        super().__init__(k.params, k.sizes, width_of(k, k.everything(), k.stores, k.batch, k.rows, k.columns, k.depth))
        self.k, self.sites = k, sites_of(k)
        self.d = ROUGH if all(self.dtypes[name].itemsize <= 2 for name, _ in k.stores) else TRITON
        self.left, self.right = multiplied(k.left), multiplied(k.right)
        if self.left.dtype is not self.right.dtype:
            self.left, self.right = k.left, k.right
        self.kind: DType = self.left.dtype
        self.sums = torch.int32 if self.kind is torch.int8 else k.left.dtype
        # What is read and written whole goes through shared memory beside the factors.
        self.across = [e.dtype.itemsize for i in k.items for e in loads(*i.exprs)
                       if all(e.symbols() & set(vars) for vars in (k.rows, k.columns))]
        sizes = [k.about(volume(vars), 1024) for vars in (k.rows, k.columns, k.depth, k.batch)]
        if sizes[0] < sizes[1] and sizes[0] <= TALL:
            self.k = k = replace(k, rows=k.columns, columns=k.rows)
            self.left, self.right, sizes[:2] = self.right, self.left, sizes[1::-1]
        tiles = [t for t in TILES if self.room(t, False) >= 0]
        self.t = sorted(tiles, key=lambda t: t.cost(sizes, self.kind.itemsize))[min(scale.tile, len(tiles) - 1)]
        self.deep = max(self.t.deep // self.kind.itemsize, 16)
        self.engine: dict[Matrix, str] = {}  # a name for each matrix of the copy engine

    def render(self) -> PartDraft:
        k, t = self.k, self.t
        sides = (k.rows, t.high), (k.columns, t.wide)
        high, wide = (count_text(volume(vars), side, self.index) for vars, side in sides)
        self.line(f"high, wide = {high}, {wide}")
        total = f"high * wide * {self.index(volume(k.batch))}"
        with self.scope(f"for tile in tl.range(tl.program_id(0), {total}, tl.num_programs(0), flatten=True):",
                        (*k.batch, *k.rows, *k.columns), footer=""):
            self.line(f"at_row, at_column = fl.place(tile % (high * wide), high, wide, {t.group})")
            self.decompose("(tile // (high * wide))", k.batch)
            self.line(f"sums = tl.zeros([{t.high}, {t.wide}], {self.d.types[self.sums]})")
            self.depth_loop()
            self.finish()
        tiles = [count_text(volume(vars), side, self.host) for vars, side in sides]
        total = " * ".join([*tiles, self.host(volume(k.batch))])
        return PartDraft(self, f"min({total}, {t.resident(self.kind.itemsize)} * units)", t.warps)

    # ---- the sum ---------------------------------------------------------------------------------------

    def depth_loop(self) -> None:
        k, t = self.k, self.t
        end = self.index(volume(k.depth))
        with self.scope(f"for at_depth in tl.range(0, {end}, {self.deep}, num_stages={t.stages}):", footer=""):
            left = self.factor(self.left, k.rows, f"at_row * {t.high}", t.high, 0)
            right = self.factor(self.right, k.columns, f"at_column * {t.wide}", t.wide, 1)
            how = f', input_precision="{"tf32" if k.tf32 else "ieee"}"' if is_float(self.kind) else ""
            self.line(f"sums = tl.dot({left}, {right}, sums{how}, out_dtype={self.d.types[self.sums]})")

    def factor(self, e: Expr, own: Sequence[Sym], at: str, side: int, axis: int) -> str:
        """A tile of a factor: its own points, from `at` on, along `axis`, and the depth along the other one."""
        k, name = self.k, self.fresh("x")
        deep = {v: Sym(f"{v.name}f{axis}", v.size) for v in k.depth}  # the other factor has it along the other axis
        own, (e,) = joined(own, e)
        depth, (e,) = joined(tuple(deep.values()), e.subs({v: as_index(to) for v, to in deep.items()}))
        plain = e.op == "load" and not e.args
        line, start, read = whole_line(e, depth, self.deep)
        found = matrix(read.attr[0], read.attr[1][0], k.batch, (*own, *line), self.kind.itemsize) \
            if read.op == "load" and (plain or read is not e) and self.t.engine else None
        if found is not None:
            crossed = (found.vars[-1] is line[0]) != (axis == 0)
            with self.scope("if ALIGNED:", footer=""):
                deep_at = "at_depth" if start is None else f"{self.index(start)} + at_depth"
                tile = self.moved(found, {own[0]: (at, side), line[0]: (deep_at, self.deep)})
                self.line(f"{name} = {tile}{'.T' if crossed else ''}")
        with self.scope("else:" if found else "if True:", (*own, *depth), footer=""):
            self.blocks, self.masks = [side, self.deep] if axis == 0 else [self.deep, side], {}
            self.walk_axis(own, at, side, axis)
            self.walk_axis(depth, "at_depth", self.deep, 1 - axis)
            value = self.load(e.attr[0], e.attr[1][0], (), "0") if plain else self.value(e)
            axes, beyond = self.axes_of(e), self.inside([1 - axis])
            value = value if axes == self.full() else self.spread(value, self.full())
            zero = 1 - axis in axes and (plain or (padded_read(e) is not None and e.args[2].attr == 0))
            self.line(f"{name} = {f'tl.where({beyond}, {value}, 0)' if beyond and not zero else value}")
        return name

    def walk_axis(self, vars: Sequence[Sym], start: str, length: int, axis: int) -> None:
        """Variables from their joint position along an axis of the tile, and the mask of what is beyond."""
        self.axes.update(dict.fromkeys(vars, axis))
        size, at = volume(vars), self.fresh("at")
        self.line(f"{at} = {start} + {self.arange(axis)}")
        if not (size.is_const and size.const % length == 0):
            self.masks[axis] = self.fresh("m")
            self.line(f"{self.masks[axis]} = {at} < {self.index(size)}")
        self.decompose(at, vars)

    # ---- the copy engine -------------------------------------------------------------------------------

    def moved(self, m: Matrix, places: dict[Sym, tuple[str, int]], value: str = "") -> str:
        """A tile read, or a value written."""
        sides = [places[v][1] if v in places else 1 for v in m.vars]
        where = [places[v][0] if v in places else self.sym(v) for v in m.vars]
        if self.width is not NARROWED:
            where = [f"tl.cast({at}, tl.int32)" for at in where]
        if m not in self.engine:  # described before the loop over tiles
            self.helpers = self.helpers or [ALIGNED, "", ""]
            name = self.engine[m] = self.fresh("matrix")
            shape, steps = (", ".join(map(self.index, given)) for given in ([v.size for v in m.vars], m.steps))
            start = f"{self.short[m.buffer]} + {m.start.const}" if m.start.const else self.short[m.buffer]
            self.scopes[0].lines += [
                "if ALIGNED:", f"  {name} = tl.make_tensor_descriptor({start}, [{shape}], [{steps}], {sides})"]
        if value:
            return f"{self.engine[m]}.store([{', '.join(where)}], {value}.reshape({sides}))"
        return f"{self.engine[m]}.load([{', '.join(where)}]).reshape({sides[-2:]})"

    # ---- what follows ----------------------------------------------------------------------------------

    def room(self, t: ProductTile, engine: bool) -> int:
        """Bytes of shared memory that are left, with one result written by the copy engine or none."""
        first, *others = sorted((self.dtypes[n].itemsize for n, _ in self.k.stores), reverse=True)
        beside = max([*others, *self.across, 0]) + first if engine else max([first, *self.across])
        return BLOCKS.shared_most - 1024 - t.shared(self.kind.itemsize) - t.high * t.wide // t.parts * beside

    def finish(self) -> None:
        k, t = self.k, self.t
        rows, exprs = joined(k.rows, *(i.exprs[0] for i in k.items),
                             *(Expr("index", torch.int64, (), a) for _, a in k.stores))
        columns, exprs = joined(k.columns, *exprs)
        bodies = dict(zip((i.names[0] for i in k.items), exprs, strict=False))
        stores = {name: e.attr if e.op == "index" else as_index(e.attr)
                  for (name, _), e in zip(k.stores, exprs[len(bodies):], strict=True)}
        sums = [self.d.cast("sums", self.sums, k.left.dtype)]
        if t.parts == 2:
            sums = [self.fresh("half"), self.fresh("half")]
            apart = f"tl.permute(tl.reshape(sums, [{t.high}, 2, {t.wide // 2}]), (0, 2, 1))"
            self.line(f"{', '.join(sums)} = tl.split({apart})")
        wide, largest = t.wide // t.parts, max(k.stores, key=lambda s: self.dtypes[s[0]].itemsize)[0]
        by_engine = largest if t.engine and self.room(t, True) >= 0 else None
        for part, text in enumerate(sums):
            self.blocks, self.masks = [t.high, wide], {}
            places = f"at_row * {t.high}", f"at_column * {t.wide}" + (f" + {part * wide}" if part else "")
            with self.scope("if True:", (*rows, *columns), footer="") as scope:
                self.walk_axis(rows, places[0], t.high, 0)
                self.walk_axis(columns, places[1], wide, 1)
                self.local_axes[k.name], scope.locals[k.name] = self.full(), text
                for name in (k.name, *bodies):
                    value = self.keep_value(name, bodies[name]) if name in bodies else text
                    own = (*rows, *columns)
                    found = matrix(name, stores[name], k.batch, own, self.dtypes[name].itemsize) \
                        if name == by_engine else None
                    if found is not None and found.vars[-1] is columns[0]:
                        self.write(name, stores[name], value, found, {v: (at, side) for v, at, side in zip(
                            own, places, self.blocks, strict=True)})
                    elif name in stores:
                        self.write(name, stores[name], value)

    def write(self, name: str, address: Index, value: str, m: Matrix | None = None,
              places: dict[Sym, tuple[str, int]] | None = None) -> None:
        value, full = f"tl.cast({value}, {self.d.types[self.dtypes[name]]})", self.full()
        if m is None or places is None:
            self.store(name, address, value, full)
            return
        with self.scope("if ALIGNED:", footer=""):
            self.line(self.moved(m, places, self.spread(value, full)))
        with self.scope("else:", footer=""):
            self.store(name, address, value, full)
