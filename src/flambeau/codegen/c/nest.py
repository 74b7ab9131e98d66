"""The common base of all kernels: parameters, stores, combines, and parallel loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr, loads, rewrite
from flambeau.ir.faults import access
from flambeau.ir.index import Index, Sym, volume
from flambeau.ir.nodes import Combine
from flambeau.ir.program import Kernel, sites_of
from flambeau.ir.tuning import CPU

from ..dialect import Dialect, Shares, Steps
from ..writer import Scope, Writer
from .prefetch import coming


def extent_names(pointer: str) -> tuple[str, str]:
    """The names of the first element that may be accessed, and of the end."""
    return f"{pointer}_first", f"{pointer}_end"


class NestWriter(Writer):
    def __init__(self, dialect: Dialect, kernel: Kernel) -> None:
        super().__init__(dialect)
        self.short = {p.name: f"p{k}" for k, p in enumerate(kernel.params)}
        self.dtypes = {p.name: p.dtype for p in kernel.params}
        self.sizes = kernel.sizes
        self.sites = sites_of(kernel)
        self.ranges: dict[Sym, tuple[str, str, Sym]] = {}  # parts of a variable's range: first, end, its name there

    @contextmanager
    def loop(self, var: Sym, lo: str, hi: str, step: str = "1", how: Steps | None = None) -> Iterator[Scope]:
        with super().loop(var, lo, hi, step, how) as s:
            if var in self.ranges:
                s.vars.add(self.ranges[var][2])
            yield s

    def read(self, buffer: str, address: str, dtype: DType) -> str:
        return self.if_within(buffer, address, f"{self.short[buffer]}[{address}]", dtype)

    def store(self, name: str, address: Index, text: str) -> None:
        at = self.index(address)
        with self.accessed(name, at):
            self.line(f"{self.short[name]}[{at}] = {text};")

    # ---- accesses that are checked -----------------------------------------------------------------------

    def within(self, name: str, address: str) -> str:
        """The condition that an address is in the buffer; it reports a fault if not."""
        self.scopes[-1].checks = True
        site = self.d.constant(access(list(self.short).index(name)), torch.int64)
        first, end = extent_names(self.short[name])
        return f"{self.fl}within({address}, {first}, {end}, bad, {site})"

    def if_within(self, name: str, address: str, read: str, dtype: DType) -> str:
        return f"({self.within(name, address)} ? {read} : {self.zero(dtype)})" if self.d.bounded else read

    @contextmanager
    def accessed(self, name: str, address: str) -> Iterator[None]:
        """The scope of a statement that writes to an address, which is checked if the dialect is bounded."""
        with self.scope(f"if ({self.within(name, address)}) {{") if self.d.bounded else nullcontext():
            yield

    def prefetch(self, exprs: Sequence[Expr], step: Sym, along: Sym) -> None:
        """Prefetch the rows (along a variable) that these expressions will read some steps from now."""
        if not self.d.prefetch:
            return
        known = {along, *self.sizes}.union(*(s.vars for s in self.scopes))  # excludes places in a window
        for name, address in dict.fromkeys((e.attr[0], e.attr[1][0]) for e in loads(*exprs)):
            row = None if address.symbols() - known else coming(address, self.dtypes[name].itemsize, step, along)
            if row is not None:
                self.line(self.d.prefetch.format(row.length, f"{self.short[name]}[{self.index(row.address)}]"))

    def raw(self, text: str, dtype: DType) -> Expr:
        """A leaf that stands for this text in the current scope."""
        e = Expr("raw", dtype, (), self.fresh("x"))
        self.scopes[-1].known[e] = text
        return e

    def combined(self, c: Combine, left: Sequence[str], right: Sequence[str], which: Iterable[int] | None = None
                 ) -> list[str]:
        """The texts of combine(left, right), or some components of it, each in a variable of the current scope."""
        stand = {**{a: self.raw(t, a.dtype) for a, t in zip(c.left, left, strict=True)},
                 **{b: self.raw(t, b.dtype) for b, t in zip(c.right, right, strict=True)}}
        memo: dict[Expr, Expr] = {}
        out = []
        for e in c.result if which is None else (c.result[j] for j in which):
            text = self.value(rewrite(e, lambda x: stand.get(x, x), None, memo))
            name = self.fresh("c")
            self.line(f"const {self.d.types[e.dtype]} {name} = {text};")
            out.append(name)
        return out

    def combine_into(self, c: Combine, slots: Sequence[str], values: Sequence[str]) -> None:
        self.assign(slots, self.combined(c, slots, values))

    def factors(self, e: Expr) -> tuple[str, str] | None:
        """The factors of a product that can be fused into a multiply-add; None for anything else."""
        if self.d.fused and e.op == "mul" and e.dtype in (torch.float32, torch.float64):
            return self.value(e.args[0]), self.value(e.args[1])
        return None

    def plus(self, total: str, factors: tuple[str, str]) -> str:
        return f"{self.d.fused}({', '.join(factors)}, {total})"

    def end_of(self, start: str, side: int, size: Index) -> str:
        """The end of a block of `side` points, as a text that shows the compiler a constant number of points."""
        if size.is_const and size.const % side == 0:
            return f"{start} + {side}"
        end = self.fresh("e")
        self.line(f"const {self.d.long} {end} = {self.fl}imin({start} + {side}, {self.index(size)});")
        return end

    def nested(self, vars: Sequence[Sym], body: Callable[[], None]) -> None:
        """Serial loops, each a separate scope so that invariant code moves out."""
        if not vars:
            body()
            return
        with self.loop(vars[0], "0", self.extent(vars[0])):
            self.nested(vars[1:], body)

    def work(self, vars: Sequence[Sym], cost: int) -> int | None:
        """The element operations of a loop nest; None if unknown before the run."""
        total = volume(vars)
        return int(total) * cost if total.is_const else None

    def parallel(self, vars: Sequence[Sym], cost: int, loops: int) -> Shares | None:
        """How threads divide a nest of so many loops; None if it is too small for that."""
        amount = self.work(vars, cost)
        if amount is not None and amount < CPU.serial:
            return None
        return Shares(loops, f"{self.index(volume(vars) * cost)} >= {CPU.serial}" if amount is None else "")

    @contextmanager
    def nest(self, vars: Sequence[Sym], how: Steps | None = None, *blocks: tuple[Sym, str, str]) -> Iterator[Scope]:
        """Loops over vars as one scope (so that they can be collapsed); each of `blocks` adds a strided loop inside."""
        heads = []
        bound = set(vars)
        for v in vars:
            lo, hi, narrow = self.ranges.get(v, ("0", self.extent(v), v))
            bound.add(narrow)
            heads.append(f"for ({self.d.long} {self.sym(v)} = {lo}; {self.sym(v)} < {hi}; ++{self.sym(v)})")
        for v, limit, step in blocks:
            bound.add(v)
            name = self.sym(v)
            heads.append(f"for ({self.d.long} {name} = 0; {name} < {limit}; {name} += {step})")
        if not heads:
            with self.scope("{") as s:
                yield s
            return
        with self.scope(" ".join(heads) + " {", bound, how=how) as s:
            yield s
