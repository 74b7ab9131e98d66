"""Cascade summation: sums are added in levels, so that rounding errors stay small.

Runs of additions stay short: after a few of them the accumulators, of the lanes of a row or of a block of columns, are
added to those of the level above and start from zero again, and so on up. A sum of n numbers then has the error of
about log n additions, as eager's own has, whatever the loops around it are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import walk
from flambeau.ir.index import Index
from flambeau.ir.nodes import Combine
from flambeau.ir.program import Item, identities_of
from flambeau.ir.tuning import CPU

from ..dialect import LANES
from .window_loops import WindowWriter


def rounds(c: Combine) -> bool:
    """Whether rounding errors accumulate: extrema have none, and those of products do not depend on the order."""
    return any(e.op == "add" and is_float(e.dtype) for e in walk(*c.result))


@dataclass
class Levels:
    """The accumulators of the upper levels: their arrays, how many lanes are used, the counter of additions."""

    reductions: Sequence[Item]
    states: dict[str, str]
    upper: dict[str, str]
    lanes: str
    count: int
    done: str
    every: int


class CascadeWriter(WindowWriter):
    def levels(self, reductions: Sequence[Item], states: dict[str, str], lanes: int, steps: Index | None, every: int,
               used: str = "") -> Levels | None:
        """The levels above these accumulators for `steps` steps; after every `every` steps the sums move up a level.
        `used`: the number of lanes in use, if it is known only at run time."""
        reductions = [i for i in reductions if rounds(i.joins)]
        if not reductions or steps is not None and steps.is_const and steps.const <= every:
            return None
        count, room = 1, every * CPU.joins
        while count < CPU.levels and not (steps is not None and steps.is_const and steps.const <= room):
            count, room = count + 1, room * CPU.joins
        upper: dict[str, str] = {}
        for n, ident in identities_of(reductions):
            upper[n] = self.fresh("up")
            self.line(f"alignas(64) {self.d.types[ident.dtype]} {upper[n]}[{count}][{lanes}];")
            each = f"for (int j = 0; j < {count}; ++j) for (int l = 0; l < {used or lanes}; ++l)"
            self.line(f"{each} {upper[n]}[j][l] = {self.d.constant(ident.attr, ident.dtype)};")
        done = self.fresh("n")
        self.line(f"{self.d.long} {done} = 0;")
        return Levels(reductions, states, upper, used or str(lanes), count, done, every)

    def rise(self, s: Levels | None) -> None:
        """Count a step, and move the accumulators up where it is time."""
        if s is None:
            return
        self.line(f"++{s.done};")
        with self.scope(f"if ({s.done} % {s.every} == 0) {{" if s.every > 1 else "{"):
            self.join_level(s, {n: f"{a}[0]" for n, a in s.upper.items()}, s.states, begin=True)
            if s.count == 1:
                return
            risen = s.done if s.every == 1 else f"{s.done} / {s.every}"
            with self.scope(f"for ({self.d.long} j = 1, m = {risen}; j < {s.count} && m % {CPU.joins} == 0; "
                            f"++j, m /= {CPU.joins}) {{"):
                self.join_level(s, {n: f"{a}[j]" for n, a in s.upper.items()},
                                {n: f"{a}[j - 1]" for n, a in s.upper.items()}, begin=True)

    def top(self, s: Levels | None) -> None:
        """After all steps: add the upper levels to the accumulators, the lowest level first."""
        if s is not None:
            with self.scope(f"for (int j = 0; j < {s.count}; ++j) {{"):
                self.join_level(s, s.states, {n: f"{a}[j]" for n, a in s.upper.items()})

    def join_level(self, s: Levels, into: dict[str, str], parts: dict[str, str], begin: bool = False) -> None:
        with self.scope(f"for (int l = 0; l < {s.lanes}; ++l) {{", how=LANES):
            for i in s.reductions:
                self.combine_into(i.joins, [f"{into[n]}[l]" for n in i.names], [f"{parts[n]}[l]" for n in i.names])
                for n, ident in zip(i.names if begin else (), i.joins.identity):
                    self.line(f"{parts[n]}[l] = {self.d.constant(ident.attr, ident.dtype)};")
