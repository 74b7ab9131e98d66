"""The epilogue of a contraction, computed on the tile of sums: maps, results, and reductions of the tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr, loads
from flambeau.ir.index import Index, Sym, as_index, volume
from flambeau.ir.lines import joined
from flambeau.ir.program import ContractKernel, TileReduction
from flambeau.ir.tuning import ProductTile

from .tensor_maps import MapWriter, Matrix, matrix

SLOT = 64  # rows or columns of a tile that share a slot for their partial reduction


class TileWriter(MapWriter):
    k: ContractKernel
    t: ProductTile
    how: str  # how tiles are divided among programs
    sums: DType  # the dtype of the accumulated sums, which may differ from that of the results
    step: Sym
    scales: list[Expr]

    @property
    def row_start(self) -> str:
        return f"at_row * {self.t.high}"

    @property
    def row_end(self) -> str | None:
        """The text of where rows end; None if that is their number."""
        return None

    def walk_axis(self, vars: Sequence[Sym], start: str, length: int, axis: int, end: str | None = None) -> None:
        """Defines variables from their joint position along an axis of the tile, and the mask of what is beyond the
        end. No mask is needed where the size is a multiple of `length`; for columns that are split into parts, `length`
        is that of the whole tile."""
        self.axes.update(dict.fromkeys(vars, axis))
        size, at = volume(vars), self.fresh("at")
        self.line(f"{at} = {start} + {self.arange(axis)}")
        if end is None:
            end = "" if size.is_const and size.const % length == 0 else self.index(size)
        if end:
            self.masks[axis] = self.fresh("m")
            self.line(f"{self.masks[axis]} = {at} < {end}")
        self.decompose(at, vars)

    def tail_bytes(self, t: ProductTile) -> int:
        """Returns the bytes of shared memory that the epilogue needs: the largest result is staged for the copy engine,
        others and loads of the whole tile change their layout."""
        k = self.k
        first, *others = sorted((self.dtypes[n].itemsize for n, _ in k.stores), reverse=True) or [0]
        across = [e.dtype.itemsize for i in k.items for e in loads(*i.exprs)
                  if all(e.symbols() & set(vars) for vars in (k.rows, k.columns))]
        return t.high * max(t.wides) // t.ends * (first + max([*others, *across, 0]))

    @staticmethod
    def has_slots(t: ProductTile) -> bool:
        return all(side % SLOT == 0 for side in (t.high, *t.wides))

    def finish(self, sums: Sequence[str], at: str, wide: int) -> None:
        """Writes the epilogue for `wide` columns from `at` on."""
        k, t = self.k, self.t
        everything = [*(i.exprs[0] for i in k.items), *(e for r in k.reductions for e in r.item.exprs),
                      *(Expr("index", torch.int64, (), a) for _, a in k.stores),
                      *(Expr("index", torch.int64, (), a) for r in k.reductions for a in r.addresses)]
        rows, exprs = joined(k.rows, *everything)
        columns, exprs = joined(k.columns, *exprs)
        left = iter(exprs)
        bodies = {i.names[0]: next(left) for i in k.items}
        reduced = [[next(left) for _ in r.item.exprs] for r in k.reductions]
        stores = {name: address_of(next(left)) for name, _ in k.stores}
        places = [[address_of(next(left)) for _ in r.addresses] for r in k.reductions]
        largest = max((name for name, _ in k.stores), key=lambda name: self.dtypes[name].itemsize, default=None)
        own, starts = (*rows, *columns), (self.row_start, at)
        self.blocks, self.masks = [t.high, wide], {}
        with self.scope("if True:", own, footer="") as scope:
            self.walk_axis(rows, starts[0], t.high, 0, self.row_end)
            self.walk_axis(columns, starts[1], t.wide, 1)
            for product, summed in zip(k.products, sums, strict=True):
                text = self.d.cast(summed, self.sums, k.left.dtype)
                for e in (e for e in self.scales if self.step not in e.symbols()):
                    before, text = text, self.fresh()
                    self.line(f"{text} = {before} * {self.value(e)}")
                self.local_axes[product.name], scope.locals[product.name] = self.full(), text
            for name in (*(p.name for p in k.products), *bodies):
                value = self.keep_value(name, bodies[name]) if name in bodies else scope.locals[name]
                if name in stores:
                    # the compiler does not divide writes of the copy engine among groups of warps
                    by_engine = name == largest and self.row_end is None and self.how != "roles"
                    found = matrix(name, stores[name], k.batch, own, self.dtypes[name].itemsize) if by_engine else None
                    self.write(name, stores[name], value, found, own, starts)
            for r, values, addresses in zip(k.reductions, reduced, places, strict=True):
                self.reduce_tile(r, values, addresses, starts)

    def write(self, name: str, address: Index, value: str, m: Matrix | None, own: Sequence[Sym], starts: Sequence[str]
              ) -> None:
        value, full = f"tl.cast({value}, {self.d.types[self.dtypes[name]]})", self.full()
        if m is None:
            self.store(name, address, value, full)
            return
        crossed = m.vars[-1] is not own[-1]
        tile = dict(zip(own, zip(starts, self.blocks, strict=True), strict=True))
        there, text = self.moved(m, tile, self.spread(value, full) + (".T" if crossed else ""))
        with self.scope(there, footer=""):
            self.line(text)
        with self.scope("else:", footer=""):
            self.store(name, address, value, full)

    def reduce_tile(self, r: TileReduction, values: Sequence[Expr], addresses: Sequence[Index], starts: Sequence[str]
                    ) -> None:
        """Stores the tile's partial reduction in the first of the slots that it covers, and the identity in the
        others."""
        c = r.item.joins
        axes = [axis for axis, step in enumerate((r.rows, r.columns)) if step is not None]
        nothing = [self.d.constant(e.attr, e.dtype) for e in c.identity]
        inside = self.inside(axes)
        texts = []
        for e, start in zip(values, nothing, strict=True):
            text = self.spread(self.value(e), self.full())
            texts.append(f"tl.where({inside}, {text}, {start})" if inside else text)
        # In no order, a tile is reduced where it is; along one axis after the other, it goes through memory first.
        reduced = self.over("tl.reduce", c, texts, None) if len(axes) == 2 and c.level is None else (
            self.reduced(c, texts, *axes))
        # Slots are axes of their own, as many along each side as it covers.
        sides, holds, slot, place = list(self.blocks), [self.inside({0, 1} - {*axes})], [], ""
        for axis in axes:
            sides[axis] //= SLOT
            step, many = (r.rows, r.columns)[axis], volume((self.k.rows, self.k.columns)[axis])
            index = "tl.arange(0, {})[{}]".format(sides[axis], ":, None" if axis == 0 else "None, :")
            at = self.fresh("slot")
            self.line(f"{at} = ({starts[axis]}) // {SLOT} + {index}")
            holds.append(f"({at} * {SLOT} < {self.index(many)})")
            slot.append(f"({index} == 0)")
            place += f" + {at} * {self.index(step)}" if step is not None else ""
        for name, address, value, start in zip(r.item.names, addresses, reduced, nothing, strict=True):
            kept = f"tl.where({' & '.join(slot)}, {value}, {start})"
            holds_text = " & ".join(h for h in holds if h)
            self.line(f"tl.store({self.short[name]} + ({self.index(address)}){place} + tl.zeros({sides}, tl.int32), "
                      f"{kept}, {holds_text})")


def address_of(e: Expr) -> Index:
    return e.attr if e.op == "index" else as_index(e.attr)
