"""Scatters: writes to computed places, in an order that does not depend on the threads.

Threads divide the variables that go straight into the target (no two of them can meet), or, where there are none,
each owns a range of the target and passes over what belongs to others. No atomics; the order of writes to one
element is always that of the source.
"""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.cost import cost_of
from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, cast
from flambeau.ir.index import Sym, product
from flambeau.ir.program import ScatterKernel

from .cfamily import Dialect
from .nest import NestWriter

ENOUGH = 16  # independent parts that keep threads busy

JOIN = {"add": "add", "mul": "mul", "min": "min", "max": "max"}


class ScatterWriter(NestWriter):
    def __init__(self, dialect: Dialect, kernel: ScatterKernel) -> None:
        super().__init__(dialect, kernel)
        self.k = kernel
        self.cost = cost_of([kernel.value])

    def render(self) -> list[str]:
        self.start()
        k = self.k
        free = [v for v in k.vars if v in k.free]
        bound = [v for v in k.vars if v not in k.free]
        # The last free variable walks the target's rows if it is the last of the source.
        rows = free[-1:] if free and k.vars[-1] is free[-1] else []
        outer = [v for v in free if v not in rows]
        parts = product(v.extent for v in outer if v.extent is not None)
        enough = outer and (not parts.is_const or parts.const >= ENOUGH)
        if enough:
            with self.nest(outer, self.parallel(k.vars, self.cost, len(outer))):
                self.deep([*bound, *rows])
        elif k.owner is not None and self.parallel(k.vars, self.cost, 1):
            apart = not any(v in k.owner.symbols() for v in rows)
            self.owned([*outer, *bound], rows) if apart else self.owned([*outer, *bound, *rows], [])
        else:
            with self.scope("{"):
                self.deep([*outer, *bound, *rows])
        return self.scopes[0].lines

    def start(self) -> None:
        k = self.k
        if k.init is None:
            return
        if not k.out_vars:
            with self.scope("{"):
                self.store(k.name, k.init_address, self.value(k.init))
            return
        *outer, last = k.out_vars
        cost = cost_of([k.init])
        pragma = self.parallel(k.out_vars, cost, max(len(outer), 1))
        if not outer:
            with self.loop(last, "0", self.extent(last), pragma=pragma or f"{self.d.simd} CHECKS"):
                self.store(k.name, k.init_address, self.value(k.init))
            return
        with self.nest(outer, pragma), self.loop(last, "0", self.extent(last), pragma=f"{self.d.simd} CHECKS"):
            self.store(k.name, k.init_address, self.value(k.init))

    def deep(self, vars: Sequence[Sym], guard: str = "") -> None:
        if not vars:
            self.write()
            return
        v, rest = vars[0], vars[1:]
        simd = f"{self.d.simd} CHECKS" if not rest and v in self.k.free else ""
        with self.loop(v, "0", self.extent(v), pragma=simd):
            self.deep(rest)

    def owned(self, bound: Sequence[Sym], rows: Sequence[Sym]) -> None:
        """Every thread reads every target index and writes those in its own range."""
        k = self.k
        assert k.owner is not None and k.owners is not None
        with self.scope("{", pragma="#pragma omp parallel CHECKS"):
            me, all_, lo, hi = (self.fresh(x) for x in ("me", "all", "lo", "hi"))
            self.line(f"const {self.d.long} {me} = fl::thread(), {all_} = fl::threads();")
            n = self.index(k.owners)
            self.line(f"const {self.d.long} {lo} = {n} * {me} / {all_}, {hi} = {n} * ({me} + 1) / {all_};")
            self.deep_owned(list(bound), list(rows), lo, hi)

    def deep_owned(self, bound: list[Sym], rows: list[Sym], lo: str, hi: str) -> None:
        if bound:
            with self.loop(bound[0], "0", self.extent(bound[0])):
                self.deep_owned(bound[1:], rows, lo, hi)
            return
        assert self.k.owner is not None
        at = self.index(self.k.owner)
        with self.scope(f"if ({at} >= {lo} && {at} < {hi}) {{"):
            self.deep(rows)

    def write(self) -> None:
        k = self.k
        mask = None if k.mask is None else self.value(k.mask)
        text = self.value(k.value)
        place = f"{self.short[k.name]}[{self.index(k.address)}]"
        if k.mode != "set":
            dtype = k.value.dtype
            wide = opmath(dtype)  # small floats join in float32 and round at each write, as ATen's do
            old, new = (cast(self.raw(t, dtype), wide) for t in (place, text))
            text = self.value(cast(Expr(JOIN[k.mode], wide, (old, new)), dtype))
        self.line(f"{f'if ({mask}) ' if mask else ''}{place} = {text};")
