"""OpenCL on GPUs: a work-item is a point of the target, and neighbours in memory are neighbours in a group.

A work-item that reduces or scans walks its points one after the other: columns, segments, short rows. Rows that are
long and contiguous are a group's work (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, cast, const, walk
from flambeau.ir.index import Sym, as_index, volume
from flambeau.ir.program import (
    ContractKernel,
    Item,
    Kernel,
    LoopKernel,
    ScanKernel,
    ScatterKernel,
    identities_of,
    reductions_of,
)

from ..c.nest import NestWriter
from ..c.scans import ScanWriter
from ..c.scatters import JOIN, ScatterWriter
from ..writer import Dialect, Scope
from .kernel import ClWriter, Draft, OpenCL, Shape

NARROW = 2**31 - 2**16  # indices below it are 32 bits wide, with room for the last group
CASCADE = 128  # points that are reduced on their own, so that rounding errors do not pile up
SHORT = 64  # points of a row that one work-item takes
SMALL = 2.0**-100  # a number with a reciprocal that has all its digits is larger, and smaller than 1 / SMALL


def index_type(k: Kernel) -> str:
    """32 bits where no index can leave them: GPUs compute those in half the time or less."""
    if isinstance(k, ScatterKernel):
        domains: list[tuple[Sym, ...]] = [k.vars, k.out_vars]
    elif isinstance(k, ContractKernel):
        domains = [(*k.batch, *k.rows, *k.columns), k.depth]
    else:
        inner = k.inner if isinstance(k, LoopKernel) else (k.axis,)
        # The points of a segment lie somewhere in its axis: their number is not that of all pairs.
        domains = [k.outer, inner] if isinstance(k, LoopKernel) and k.bounds is not None else [(*k.outer, *inner)]
    points = [volume(vars) for vars in domains]
    inside = [i for e in walk(*k.everything()) for i in e.own_indices()]
    bounds = [i.bounds() for i in (*inside, *(a for _, a in k.stores), *points)]
    fits = all(lo is not None and hi is not None and lo > -NARROW and hi < NARROW for lo, hi in bounds)
    return "int" if fits else "long"


class Points(ClWriter, NestWriter):
    """One work-item for each point of some variables."""

    def __init__(self, dialect: Dialect, kernel: Kernel, shape: Shape) -> None:
        super().__init__(dialect, kernel)
        self.total = as_index(1)
        self.group = shape.group

    @contextmanager
    def points(self, vars: Sequence[Sym]) -> Iterator[Scope]:
        self.total = volume(vars)
        me = self.fresh("me")
        self.line(f"const {self.d.long} {me} = get_global_id(0);")
        with self.scope(f"if ({me} < {self.index(self.total)}) {{", vars) as s:
            self.decompose(me, vars)
            yield s

    def draft(self) -> Draft:
        return Draft(self, self.total, self.group)

    def emit(self, e: Expr) -> tuple[int, str]:
        if e.op == "div" and e.dtype is torch.float32:
            deep, shallow = (self.emit(a)[0] for a in e.args)
            if shallow < deep:
                e = quotient(*e.args)
        return super().emit(e)


def quotient(x: Expr, s: Expr) -> Expr:
    """x / s where s is the same for many x: a division of theirs takes ten instructions."""
    if s.op != "const":
        lift = Expr("lift", s.dtype, (s,))
        return Expr("over", s.dtype, (x * lift, s * lift, const(1, s.dtype) / (s * lift)))
    if not SMALL < abs(s.attr) < 1 / SMALL:
        return Expr("div", s.dtype, (x, s))
    return Expr("over", s.dtype, (x, s, const((torch.ones(()) / s.attr).item(), s.dtype)))


class PointLoops(Points):
    def __init__(self, dialect: Dialect, kernel: LoopKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        self.k = kernel
        self.address = dict(kernel.stores)
        self.dtype_of = kernel.dtype_of()

    def write(self) -> None:
        with self.points(self.k.outer):
            self.line_scratch()
            for stage in self.k.stages:
                self.stage(stage)

    # ---- values of earlier stages ----------------------------------------------------------------------

    def line_scratch(self) -> None:
        for name in sorted(self.k.scratch):
            self.line(f"{self.d.stored[self.dtype_of[name]]} {self.scratch(name)}[{self.index(volume(self.k.inner))}];")

    def scratch(self, name: str) -> str:
        return f"s_{list(self.dtype_of).index(name)}"

    def emit(self, e: Expr) -> tuple[int, str]:
        if e.op == "local" and self.local(e.attr) is None:
            if e.attr in self.k.scratch:
                return len(self.scopes) - 1, f"{self.scratch(e.attr)}[{self.index(self.k.inner_position())}]"
            return len(self.scopes) - 1, self.read(e.attr, self.index(self.address[e.attr]), e.dtype)
        return super().emit(e)

    # ---- stages ----------------------------------------------------------------------------------------

    def stage(self, stage: Sequence[Item]) -> None:
        if not self.k.inner or stage[0].level == "outer" and stage[0].combine is None:
            for i in stage:
                self.map_item(i)
            return
        reductions = reductions_of(stage)
        states = self.declare(reductions)
        first = self.k.inner[0]
        if self.k.bounds is not None:
            lo, hi = (self.value(b) for b in self.k.bounds)
            with self.loop(first, lo, hi):
                self.body(stage, states)
        elif reductions and not (first.size.is_const and first.size.const < 2 * CASCADE):
            self.cascade(stage, reductions, states)
        else:
            self.nested(self.k.inner, lambda: self.body(stage, states))
        self.finish(reductions, states)

    def declare(self, reductions: Sequence[Item]) -> dict[str, str]:
        """A variable for each component, that holds the identity."""
        states = {}
        for name, identity in identities_of(reductions):
            states[name] = self.fresh("a")
            self.variable(identity.dtype, states[name], self.d.constant(identity.attr, identity.dtype))
        return states

    def cascade(self, stage: Sequence[Item], reductions: Sequence[Item], states: dict[str, str]) -> None:
        v = self.k.inner[0]
        group, last = Sym(f"{v.name}c", v.size), self.fresh("e")
        with self.loop(group, "0", self.extent(v), str(CASCADE)):
            parts = self.declare(reductions)
            self.line(f"const {self.d.long} {last} = fl_imin({self.sym(group)} + {CASCADE}, {self.extent(v)});")
            with self.loop(v, self.sym(group), last):
                self.nested(self.k.inner[1:], lambda: self.body(stage, parts))
            for i in reductions:
                self.combine_into(i.joins, [states[n] for n in i.names], [parts[n] for n in i.names])

    def body(self, stage: Sequence[Item], states: dict[str, str]) -> None:
        for i in stage:
            if i.combine is None:
                self.map_item(i)
            else:
                self.combine_into(i.combine, [states[n] for n in i.names], [self.value(e) for e in i.exprs])

    def map_item(self, item: Item) -> None:
        name, text = item.names[0], self.value(item.exprs[0])
        self.scopes[-1].locals[name] = text
        if name in self.k.scratch:
            self.line(f"{self.scratch(name)}[{self.index(self.k.inner_position())}] = {text};")
        if name in self.address:
            self.keep(name, item.level, text)

    def finish(self, reductions: Sequence[Item], states: dict[str, str]) -> None:
        """What was reduced becomes a value of the point, and memory if anybody else wants it."""
        for name in (n for i in reductions for n in i.names):
            self.scopes[-1].locals[name] = states[name]
            if name in self.address:
                self.keep(name, "outer", states[name])

    def keep(self, name: str, level: str, text: str) -> None:
        self.store(name, self.address[name], text)


class PointScan(Points, ScanWriter):
    def write(self) -> None:
        with self.points(self.k.outer):
            self.stretch(self.declare(self.needed))


class PointStart(Points, ScatterWriter):
    def write(self) -> None:
        assert self.k.init is not None
        with self.points(self.k.out_vars):
            self.store(self.k.name, self.k.init_address, self.value(self.k.init))


class PointScatter(Points, ScatterWriter):
    """Points that may meet in an element join it by compare and swap, in no fixed order."""

    def write_all(self) -> None:
        with self.points(self.k.vars):
            self.write()

    def join(self, address: str, text: str, mask: str | None) -> None:
        k = self.k
        alone = k.unique or k.free >= set(k.vars)
        if mask is not None or k.mode == "set" or alone:
            super().join(address, text, mask)
            return
        dtype = k.value.dtype
        bits, swap = {4: ("int", "atomic_cmpxchg"), 8: ("long", "atom_cmpxchg")}[dtype.itemsize]
        place, seen, old = self.fresh("at"), self.fresh("seen"), self.fresh("old")
        with self.accessed(k.name, address):
            self.swap(bits, swap, place, seen, old, address, text)

    def swap(self, bits: str, swap: str, place: str, seen: str, old: str, address: str, text: str) -> None:
        k, dtype = self.k, self.k.value.dtype
        self.line(f"volatile __global {bits}* {place} = (volatile __global {bits}*)&{self.short[k.name]}[{address}];")
        self.line(f"{bits} {old} = *{place}, {seen};")
        with self.scope("do {", footer=f"}} while ({old} != {seen});"):
            self.line(f"{seen} = {old};")
            now = self.raw(f"as_{self.d.types[dtype]}({seen})", dtype)
            joined = Expr(JOIN[k.mode], opmath(dtype), (now, self.raw(text, dtype)))
            self.line(f"{old} = {swap}({place}, {seen}, as_{bits}({self.value(cast(joined, dtype))}));")


def write_points(kernel: Kernel, shape: Shape) -> list[Draft]:
    from .contraction_tiles import Tiles
    from .rows import RowLoops, is_row
    from .scans import write_scan
    from .transposes import Turned, is_turned_map
    from .wide_access import SeveralPoints, is_streamed

    forms: dict[type[PointLoops], Callable[[LoopKernel], bool]] = {
        RowLoops: is_row, Turned: is_turned_map, SeveralPoints: is_streamed}
    dialect = OpenCL(index_type(kernel), shape.bounded)
    if isinstance(kernel, ContractKernel):
        return [Tiles(dialect, kernel, shape).write()]
    if isinstance(kernel, LoopKernel):
        # Those forms read several elements at once, which nothing checks.
        forms = {} if shape.bounded else forms
        kind = next((kind for kind, suits in forms.items() if suits(kernel)), PointLoops)
        loops = kind(dialect, kernel, shape)
        loops.write()
        return [loops.draft()]
    if isinstance(kernel, ScanKernel):
        return [write_scan(dialect, kernel, shape)]
    drafts = []
    if kernel.init is not None:
        start = PointStart(dialect, kernel, shape)
        start.write()
        drafts.append(start.draft())
    scatter = PointScatter(dialect, kernel, shape)
    scatter.write_all()
    return [*drafts, scatter.draft()]
