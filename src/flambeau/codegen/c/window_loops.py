"""Windows inside a vector loop that are too long to unroll, or whose ends are known only at run time.

Compilers do not vectorise a loop around other loops. So the points of a block walk their windows in step: the running
values are side by side in small arrays, the loops of the window are outside and the vector loop inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flambeau.ir.expr import Expr, Fold, walk
from flambeau.ir.index import Index, Sym
from flambeau.ir.program import Kernel
from flambeau.ir.tuning import CPU

from ..dialect import Dialect, Steps
from .nest import NestWriter


class WindowWriter(NestWriter):
    def __init__(self, dialect: Dialect, kernel: Kernel) -> None:
        super().__init__(dialect, kernel)
        self.windows: dict[Expr, str] = {}  # results of the windows at the current point

    def is_apart(self, e: Expr, v: Sym) -> bool:
        """Whether an expression is a window that stays a loop and is the same for all points of v."""
        if e.op != "fold" or e.attr.steps <= self.unroll or any(x.op == "local" for x in walk(*e.args)):
            return False
        return not any(v in i.symbols() for _, lo, hi in e.attr.loops for i in (lo, hi))

    @contextmanager
    def in_step(self, exprs: Sequence[Expr], v: Sym, lo: str, hi: str, how: Steps | None) -> Iterator[tuple[str, str]]:
        """Computes the windows of one block of points after the other, and gives the block's first point and end; the
        whole range if there are no windows."""
        narrow = self.ranges[v][2] if v in self.ranges else v
        found = [e for e in walk(*exprs) if how and self.is_apart(e, narrow)]
        apart = list({(e.args, e.attr.loops): e for e in found}.values())
        if not apart:
            yield lo, hi
            return
        block = Sym(f"{v.name}w", v.size)
        start = self.sym(block)
        head = f"for ({self.d.long} {start} = {lo}; {start} < {hi}; {start} += {CPU.window_lanes}) {{"
        with self.scope(head, (block,)):
            end = self.fresh("e")
            self.line(f"const {self.d.long} {end} = {self.fl}imin({start} + {CPU.window_lanes}, {hi});")
            before, self.windows = self.windows, dict(self.windows)
            for e in apart:
                self.window(e, v, start, end, how)
            yield start, end
            self.windows = before

    def window(self, e: Expr, v: Sym, start: str, end: str, how: Steps | None) -> None:
        f: Fold = e.attr
        count = len(f.carries)
        states = []
        for c in f.carries:
            array = self.fresh("f")
            self.line(f"alignas(64) {self.d.types[c.dtype]} {array}[{CPU.window_lanes}];")
            states.append(f"{array}[{self.sym(v)} - {start}]")
        self.step(v, start, end, how, {}, states, e.args[:count])
        self.walk_window(f.loops, v, start, end, how, dict(zip(f.carries, states, strict=True)), e.args[count:])
        for k, (c, text) in enumerate(zip(f.carries, states, strict=True)):
            self.windows[Expr("fold", c.dtype, e.args, Fold(f.loops, f.carries, k))] = text

    def walk_window(self, loops: Sequence[tuple[Sym, Index, Index]], v: Sym, start: str, end: str, how: Steps | None,
                    states: dict[Expr, str], updates: Sequence[Expr]) -> None:
        if not loops:
            self.step(v, start, end, how, states, list(states.values()), updates)
            return
        var, lo, hi = loops[0]
        with self.loop(var, self.index(lo), self.index(hi)):
            self.walk_window(loops[1:], v, start, end, how, states, updates)

    def step(self, v: Sym, start: str, end: str, how: Steps | None, known: dict[Expr, str], slots: Sequence[str],
             values: Sequence[Expr]) -> None:
        """Update all carries together, at every point of the block."""
        with self.loop(v, start, end, how=how) as s:
            s.known.update(self.windows)
            s.known.update(known)
            self.assign(slots, self.in_variables(values))
