"""How far a kernel's blocks are from what the heuristics of codegen say. Every writer takes one."""

from __future__ import annotations

from dataclasses import dataclass

MOST_WARPS = 32


@dataclass(frozen=True)
class Tuning:
    """Elements of a program and its warps in powers of two; pieces that are on their way at once in ones."""

    elements: int = 0
    warps: int = 0
    stages: int = 0

    def sized(self, elements: int) -> int:
        return max(1, shifted(elements, self.elements))

    def warped(self, warps: int) -> int:
        return max(1, min(MOST_WARPS, shifted(warps, self.warps)))

    def staged(self, stages: int) -> int:
        return max(1, stages + self.stages)


def shifted(n: int, by: int) -> int:
    return n << by if by >= 0 else n >> -by


HEURISTIC = Tuning()
# What is worth a try: twice and half of the elements, with as many warps or as many elements for each thread; the same
# elements on twice and half of the threads; fewer pieces on their way.
AROUND = (Tuning(elements=1), Tuning(elements=-1), Tuning(elements=1, warps=1), Tuning(elements=-1, warps=-1),
          Tuning(warps=1), Tuning(warps=-1), Tuning(stages=-2))
