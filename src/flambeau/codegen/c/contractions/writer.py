"""The common base of all contraction kernels: loops over several variables, factors, and fused operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr
from flambeau.ir.index import Sym, as_index, volume
from flambeau.ir.lines import joined
from flambeau.ir.program import ContractKernel

from ...dialect import UNSIGNED, Dialect, Steps
from ..nest import NestWriter


class ContractWriter(NestWriter):
    def __init__(self, dialect: Dialect, kernel: ContractKernel) -> None:
        super().__init__(dialect, kernel)
        self.k = kernel
        self.dtype: DType = kernel.left.dtype
        # The type of sums: integers wrap around, which only unsigned types may do.
        self.kind = dialect.types[UNSIGNED.get(self.dtype, self.dtype)]
        # The expressions that follow the sum walk points as their own addresses do, often several variables as one.
        places = [Expr("index", torch.int64, (), address) for _, address in kernel.stores]
        exprs: tuple[Expr, ...] = (*(i.exprs[0] for i in kernel.items), *places)
        self.rows, exprs = joined(kernel.rows, *exprs)
        self.columns, exprs = joined(kernel.columns, *exprs)
        self.bodies = dict(zip((i.names[0] for i in kernel.items), exprs, strict=False))
        self.address = {name: e.attr if e.op == "index" else as_index(e.attr)
                        for (name, _), e in zip(kernel.stores, exprs[len(kernel.items):], strict=True)}

    def length(self, vars: Sequence[Sym]) -> str:
        return self.index(volume(vars))

    @contextmanager
    def walk(self, vars: Sequence[Sym], lo: str, hi: str, how: Steps | None = None) -> Iterator[str]:
        """Loops over joint positions of the variables from lo to hi; gives the distance from lo as text."""
        if not vars:
            with self.scope("{"):
                yield "0"
            return
        with self.lines(vars, lo, hi) as (first, end, off), self.loop(vars[-1], first, end, how=how):
            yield f"({off} + {self.sym(vars[-1])})"

    @contextmanager
    def lines(self, vars: Sequence[Sym], lo: str, hi: str) -> Iterator[tuple[str, str, str]]:
        """The same without the loop over the last variable: gives its first value, its end, and an offset to add."""
        *outer, last = vars
        long, off = self.d.long, self.fresh("off")
        if not outer:
            with self.scope("{"):
                self.line(f"const {long} {off} = -{lo};")
                yield lo, hi, off
            return
        at, first, end, rest = (self.fresh(x) for x in ("at", "first", "end", "q"))
        with self.scope(f"for ({long} {at} = {lo}; {at} < {hi};) {{", outer):
            self.line(f"const {long} {rest} = {at} / {self.extent(last)}, {first} = {at} % {self.extent(last)};")
            self.decompose(rest, outer)
            self.line(f"const {long} {end} = {self.fl}imin({self.extent(last)}, {first} + {hi} - {at});")
            self.line(f"const {long} {off} = {at} - {lo} - {first};")
            yield first, end, off
            self.line(f"{at} += {end} - {first};")

    def finish(self, total: str) -> None:
        """Writes everything that is computed from one sum, in the scope of its point."""
        sum = self.fresh("sum")
        self.line(f"const {self.d.types[self.dtype]} {sum} = {total};")
        scope = self.scopes[-1]
        scope.locals[self.k.name] = sum
        self.keep(self.k.name, sum)
        for name, body in self.bodies.items():
            text = scope.locals[name] = self.value(body)
            self.keep(name, text)

    def keep(self, name: str, text: str) -> None:
        if name in self.address:
            self.store(name, self.address[name], text)
