"""The stages of a kernel, in the order in which the writers of all languages write them.

Stages follow each other for every outer point. A stage that reduces declares a state for each component, accumulates
the values of every point into it, and finishes: the states of lanes or threads are combined, and the components become
values of the outer point. The form decides what a state is (a variable, an array of lanes, a block) and how points are
walked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from flambeau.ir.index import Index
from flambeau.ir.program import Item, LoopKernel, reductions_of

from .writer import Writer

S = TypeVar("S")  # the states of a stage's reductions


class StageWriter(Writer, Generic[S]):
    k: LoopKernel
    address: dict[str, Index]  # of stored values

    def stage(self, items: Sequence[Item]) -> None:
        if not self.k.inner or items[0].level == "outer" and items[0].combine is None:
            self.once(items)
            return
        reductions = reductions_of(items)
        states = self.declare(items, reductions)
        self.walk(items, reductions, states)
        self.finish(reductions, states)

    def once(self, items: Sequence[Item]) -> None:
        """Writes a stage of the outer point alone."""
        for i in items:
            self.map_item(i)

    def body(self, items: Sequence[Item], states: Mapping[str, Any], *where: Any) -> None:
        """Writes a stage at one point, or at all points of a block."""
        for i in items:
            if i.combine is None:
                self.map_item(i)
            else:
                self.take(i, states, *where)

    def finish(self, reductions: Sequence[Item], states: S) -> None:
        """Makes reduced components values of the outer point, and stores them if they are read elsewhere."""
        for i in reductions:
            for name, text in zip(i.names, self.together(i, states), strict=True):
                self.become(name, text)

    def become(self, name: str, text: str) -> None:
        self.scopes[-1].locals[name] = text
        if name in self.address:
            self.keep(name, "outer", text)

    # ---- what a language and a form fill in --------------------------------------------------------------

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> S:
        """Declares states that hold the identity."""
        raise NotImplementedError

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: S) -> None:
        """Writes the loop over the points of a stage, with `body` at each."""
        raise NotImplementedError

    def take(self, i: Item, states: Any, *where: Any) -> None:
        """Accumulates the value of a point."""
        raise NotImplementedError

    def together(self, i: Item, states: S) -> Sequence[str]:
        """Returns the accumulators combined over all lanes."""
        raise NotImplementedError

    def map_item(self, item: Item) -> None:
        """Computes a pointwise value, and stores it if another kernel reads it."""
        raise NotImplementedError

    def keep(self, name: str, level: str, text: str) -> None:
        """Stores a value."""
        raise NotImplementedError
