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
        self.needed = kernel.combine.needed([e for n, e in zip(kernel.names, kernel.finish, strict=True)
                                             if n in self.address])

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

    def step(self, slots: dict[int, str]) -> None:
        k = self.k
        values = [self.value(e) for e in k.exprs]
        left = [slots.get(j, value) for j, value in enumerate(values)]  # what nobody needs has no slot, and no reader
        new = self.combined(k.combine, left, values, slots)
        for slot, text in zip(slots.values(), new, strict=True):
            self.line(f"{slot} = {text};")
        running = {k.combine.left[j]: self.raw(slot, k.combine.left[j].dtype) for j, slot in slots.items()}
        for name, e in zip(k.names, k.finish, strict=True):
            if name in self.address:
                kept = cast(rewrite(e, lambda x: running.get(x, x)), self.dtypes[name])  # may be narrower
                self.store(name, self.address[name], self.value(kept))

    def rows(self) -> None:
        k = self.k
        pragma = self.parallel((*k.outer, k.axis), self.cost, len(k.outer)) if k.outer else ""
        with self.nest(k.outer, pragma):
            slots = {}
            for j in self.needed:
                ident = k.combine.identity[j]
                slots[j] = self.fresh("s")
                self.line(f"{self.d.types[ident.dtype]} {slots[j]} = {self.d.constant(ident.attr, ident.dtype)};")
            taken = self.taken()
            if taken is None:
                with self.axis_loop():
                    self.step(slots)
            else:
                self.choose(slots, taken)

    def taken(self) -> Expr | None:
        """When all that runs is the new value or the old one by the same condition: that condition."""
        c = self.k.combine
        conditions = {c.result[j].args[0] if c.result[j].op == "where" and c.result[j].args[1:] == (c.right[j], c.left[j])
                      else None for j in self.needed}
        return conditions.pop() if len(conditions) == 1 else None

    def choose(self, slots: dict[int, str], taken: Expr) -> None:
        """A running extremum seldom changes. A branch foresees that: no step waits for the one before, and what is
        stored is worked out when it changes."""
        k = self.k
        stored = {name: e for name, e in zip(k.names, k.finish, strict=True) if name in self.address}
        kept = {name: self.fresh("k") for name in stored}

        def finish(running: dict[Expr, Expr], declare: bool) -> None:
            for name, e in stored.items():
                text = self.value(cast(rewrite(e, lambda x: running.get(x, x)), self.dtypes[name]))
                self.line(f"{f'{self.d.types[self.dtypes[name]]} ' if declare else ''}{kept[name]} = {text};")

        finish(dict(zip(k.combine.left, k.combine.identity, strict=True)), True)
        with self.axis_loop():
            values = {right: self.raw(self.value(e), e.dtype) for right, e in zip(k.combine.right, k.exprs, strict=True)}
            values |= {k.combine.left[j]: self.raw(slot, k.combine.left[j].dtype) for j, slot in slots.items()}
            condition = self.value(rewrite(taken, lambda x: values.get(x, x)))
            with self.scope(f"if (__builtin_expect({condition}, 0)) {{"):
                for j, slot in slots.items():
                    self.line(f"{slot} = {self.value(values[k.combine.right[j]])};")
                finish({k.combine.left[j]: self.raw(slot, k.combine.left[j].dtype) for j, slot in slots.items()}, False)
            for name in stored:
                self.store(name, self.address[name], kept[name])

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
            arrays = {}
            for j in self.needed:
                ident = k.combine.identity[j]
                arrays[j] = self.fresh("s")
                self.line(f"alignas(64) {self.d.types[ident.dtype]} {arrays[j]}[{width}];")
                self.line(f"for (int l = 0; l < {width}; ++l) {arrays[j]}[l] = "
                          f"{self.d.constant(ident.attr, ident.dtype)};")
            with self.axis_loop(), self.loop(v, b, end, pragma=f"{self.d.simd} CHECKS"):
                self.step({j: f"{a}[{self.sym(v)} - {b}]" for j, a in arrays.items()})
