"""Scans: the running combine along one axis."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flambeau.ir.cost import cost_of
from flambeau.ir.expr import cast, rewrite
from flambeau.ir.index import ONE, Sym
from flambeau.ir.program import ScanKernel

from .cfamily import Dialect, Scope
from .nest import NestWriter

BLOCK = 256  # columns that are scanned side by side
ABREAST = 8  # contiguous rows that are: more would be more streams than a cache likes


class ScanWriter(NestWriter):
    def __init__(self, dialect: Dialect, kernel: ScanKernel) -> None:
        super().__init__(dialect, kernel)
        self.k = kernel
        self.address = dict(kernel.stores)
        self.cost = cost_of([*kernel.exprs, *kernel.combine.result])

    def render(self) -> list[str]:
        if self.k.vector is None:
            self.rows()
        else:
            self.columns(self.k.vector)
        return self.scopes[0].lines

    def axis_loop(self) -> AbstractContextManager[Scope]:
        a = self.k.axis
        if not self.k.reverse:
            return self.loop(a, "0", self.extent(a))
        name = self.sym(a)
        return self.scope(f"for ({self.d.long} {name} = {self.extent(a)} - 1; {name} >= 0; --{name}) {{", (a,))

    def step(self, slots: list[str]) -> None:
        k = self.k
        self.combine_into(k.combine, slots, [self.value(e) for e in k.exprs])
        running = {c: self.raw(slot, c.dtype) for c, slot in zip(k.combine.left, slots, strict=True)}
        for name, e in zip(k.names, k.finish, strict=True):
            if name in self.address:
                kept = cast(rewrite(e, lambda x: running.get(x, x)), self.dtypes[name])  # may be narrower
                self.store(name, self.address[name], self.value(kept))

    def rows(self) -> None:
        k = self.k
        pragma = self.parallel((*k.outer, k.axis), self.cost, len(k.outer)) if k.outer else ""
        with self.nest(k.outer, pragma):
            slots = []
            for ident in k.combine.identity:
                slots.append(self.fresh("s"))
                self.line(f"{self.d.types[ident.dtype]} {slots[-1]} = {self.d.constant(ident.attr, ident.dtype)};")
            with self.axis_loop():
                self.step(slots)

    def columns(self, v: Sym) -> None:
        k = self.k
        assert v.extent is not None
        others = tuple(x for x in k.outer if x is not v)
        width = max(1, min(BLOCK, v.extent.const)) if v.extent.is_const else BLOCK
        if any(a.coefficient(v) is not ONE for a in self.address.values()):
            width = min(width, ABREAST if len(k.names) == 1 else ABREAST // 2)
        # Enough blocks for the threads where there are few columns.
        if not others and v.extent.is_const:
            width = max(min(width, 16), min(width, -(-v.extent.const // 8)))
        block = Sym(f"{v.name}b", v.extent)
        with self.nest(others, self.parallel((*k.outer, k.axis), self.cost, len(others) + 1),
                       (block, self.extent(v), str(width))):
            b = self.sym(block)
            known = v.extent.is_const and v.extent.const % width == 0
            end = f"{b} + {width}" if known else self.fresh("e")
            if not known:
                self.line(f"const {self.d.long} {end} = fl::imin({b} + {width}, {self.extent(v)});")
            arrays = []
            for ident in k.combine.identity:
                arrays.append(self.fresh("s"))
                self.line(f"alignas(64) {self.d.types[ident.dtype]} {arrays[-1]}[{width}];")
                self.line(f"for (int l = 0; l < {width}; ++l) {arrays[-1]}[l] = "
                          f"{self.d.constant(ident.attr, ident.dtype)};")
            with self.axis_loop(), self.loop(v, b, end, pragma=f"{self.d.simd} CHECKS"):
                self.step([f"{a}[{self.sym(v)} - {b}]" for a in arrays])
