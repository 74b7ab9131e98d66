"""Maps on GPUs: a work-item computes a point of the result, and adjacent work-items have points adjacent in memory.

A work-item that reduces or scans walks its points one after the other: columns, segments, short rows. Long contiguous
rows are shared by a group (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, cast, const
from flambeau.ir.index import Sym, as_index, ceildiv, volume
from flambeau.ir.program import Item, Kernel, LoopKernel, identities_of
from flambeau.ir.tuning import POINTS

from ..c.nest import NestWriter
from ..c.scans import ScanWriter
from ..c.scatters import ScatterWriter
from ..dialect import Dialect
from ..stages import StageWriter
from ..writer import Scope
from .dialect import Exchange, LaunchDraft, Shape, SimtWriter
from .group_order import Bands, bands

SMALL = 2.0**-100  # reciprocals have full precision for numbers larger than this and smaller than 1 / SMALL


class Points(SimtWriter, NestWriter):
    """One work-item for each point of some variables."""

    bands: Bands | None = None  # bands of groups that share reads
    until = ""  # the end of a group's points

    def __init__(self, dialect: Dialect, kernel: Kernel, shape: Shape) -> None:
        super().__init__(dialect, kernel)
        self.kernel = kernel
        self.total = as_index(1)
        self.group = shape.group

    @contextmanager
    def points(self, vars: Sequence[Sym]) -> Iterator[Scope]:
        me, start = self.fresh("me"), self.first_point(vars, self.group)
        self.line(f"const {self.d.long} {me} = " + (f"{start} + {self.d.lane};" if self.bands else f"{self.d.item};"))
        with self.scope(f"if ({me} < {self.until}) {{", vars) as s:
            self.decompose(me, vars)
            yield s

    def first_point(self, vars: Sequence[Sym], chunk: int) -> str:
        """The first point of this group, if each group has `chunk` points of these variables. Groups of a band are side
        by side, and each has points of one row only."""
        k, long, wide = self.kernel, self.d.long, self.d.types[torch.int64]
        points = volume(vars)
        self.bands = b = bands(k, vars, chunk)
        self.until = self.index(points)
        if b is None:
            self.total = ceildiv(points, chunk) * self.group
            return f"({long}){self.d.group}" + f" * {chunk}" * (chunk > 1)
        self.total = b.padded(volume(b.outer) * ceildiv(volume(b.inner), chunk)) * self.group
        groups, row, place, start, until = self.index(b.groups), self.index(volume(b.inner)), *map(
            self.fresh, ("place", "start", "until"))
        turn = b.turn(f"({wide}){self.d.group}", self.index)
        self.line(f"const {wide} {place} = {turn};")
        # Groups without points begin where all points end.
        for name, at in ((start, f"{place} / {groups} * {row} + {place} % {groups} * {chunk}"),
                         (until, f"({place} / {groups} + 1) * {row}")):
            least = self.d.minimum.format(f"({wide})({at})", f"({wide}){self.until}")
            self.line(f"const {long} {name} = ({long}){least};")
        self.until = until
        return start

    def draft(self) -> LaunchDraft:
        return LaunchDraft(self, self.total, self.group)

    def emit(self, e: Expr) -> tuple[int, str]:
        if e.op == "div" and e.dtype is torch.float32:
            deep, shallow = (self.emit(a)[0] for a in e.args)
            if shallow < deep:
                e = quotient(*e.args)
        return super().emit(e)


def quotient(x: Expr, s: Expr) -> Expr:
    """x / s by the reciprocal of s, which is the same for many x: a division takes ten instructions on a GPU."""
    if s.op != "const":
        lift = Expr("lift", s.dtype, (s,))
        return Expr("over", s.dtype, (x * lift, s * lift, const(1, s.dtype) / (s * lift)))
    if not SMALL < abs(s.attr) < 1 / SMALL:
        return Expr("div", s.dtype, (x, s))
    return Expr("over", s.dtype, (x, s, const((torch.ones(()) / s.attr).item(), s.dtype)))


States = dict[str, str]  # a variable for each component


class PointLoops(StageWriter[States], Points):
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

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> States:
        return self.variables(reductions)

    def variables(self, reductions: Sequence[Item]) -> States:
        """Declares a variable for each component, with the identity as its value."""
        states = {}
        for name, identity in identities_of(reductions):
            states[name] = self.fresh("a")
            self.variable(identity.dtype, states[name], self.d.constant(identity.attr, identity.dtype))
        return states

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: States) -> None:
        first = self.k.inner[0]
        if self.k.bounds is not None:
            lo, hi = (self.value(b) for b in self.k.bounds)
            with self.loop(first, lo, hi):
                self.body(items, states)
        elif reductions and not (first.size.is_const and first.size.const < 2 * POINTS.cascade):
            self.cascade(items, reductions, states)
        else:
            self.nested(self.k.inner, lambda: self.body(items, states))

    def cascade(self, stage: Sequence[Item], reductions: Sequence[Item], states: dict[str, str]) -> None:
        v = self.k.inner[0]
        group, last = Sym(f"{v.name}c", v.size), self.fresh("e")
        with self.loop(group, "0", self.extent(v), str(POINTS.cascade)):
            parts = self.variables(reductions)
            end = f"{self.sym(group)} + {POINTS.cascade}"
            self.line(f"const {self.d.long} {last} = {self.fl}imin({end}, {self.extent(v)});")
            with self.loop(v, self.sym(group), last):
                self.nested(self.k.inner[1:], lambda: self.body(stage, parts))
            for i in reductions:
                self.combine_into(i.joins, [states[n] for n in i.names], [parts[n] for n in i.names])

    def take(self, i: Item, states: States) -> None:
        self.combine_into(i.joins, [states[n] for n in i.names], [self.value(e) for e in i.exprs])

    def together(self, i: Item, states: States) -> list[str]:
        return [states[n] for n in i.names]

    def map_item(self, item: Item) -> None:
        name, text = item.names[0], self.value(item.exprs[0])
        self.scopes[-1].locals[name] = text
        if name in self.k.scratch:
            self.line(f"{self.scratch(name)}[{self.index(self.k.inner_position())}] = {text};")
        if name in self.address:
            self.keep(name, item.level, text)

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
    """Points that may meet in an element combine with it by compare-and-swap, in no fixed order."""

    def write_all(self) -> None:
        with self.points(self.k.vars):
            self.write()

    def join(self, address: str, text: str, mask: str | None) -> None:
        k = self.k
        alone = k.unique or k.free >= set(k.vars)
        if mask is not None or k.mode == "set" or alone:
            super().join(address, text, mask)
            return
        element = f"{self.short[k.name]}[{address}]"
        with self.accessed(k.name, address):
            if joined := self.d.at_once(k.mode, k.value.dtype, element, text):
                self.line(joined)
                return
            place, seen, old = self.fresh("at"), self.fresh("seen"), self.fresh("old")
            self.exchange(self.d.exchange(k.value.dtype, element, place, seen, old), text)

    def exchange(self, swap: Exchange, text: str) -> None:
        dtype = self.k.value.dtype
        for line in swap.before:
            self.line(line)
        with self.scope("do {", footer=swap.footer):
            self.line(swap.first)
            wide = opmath(dtype)  # small floats join in float32 and round at each write, as ATen's do
            now, new = (cast(self.raw(t, dtype), wide) for t in (swap.value, text))
            joined = Expr(self.k.mode, wide, (now, new))
            self.line(swap.attempt.format(self.value(cast(joined, dtype))))
