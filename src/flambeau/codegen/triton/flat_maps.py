"""Maps over short lines: the last variables as one, by which several results are one access.

A tile of a map gives each variable an axis of a power of two. Of lines of five elements three lanes in eight are idle
then, and no access is wider than an element. Counted as one, the points of all lines are one line as long as results
lie that way; what is read elsewhere divides to find its place.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flambeau.ir.index import Sym, as_index, walks_as_one
from flambeau.ir.program import LoopKernel
from flambeau.ir.tuning import BLOCKS

from .blocks import spans


def as_lines(k: LoopKernel, room: int) -> LoopKernel:
    """The map with its last variables as one, as far as a tile of `room` elements would leave too many lanes idle."""
    while is_idle(k, room) and is_line_of_lines(k):
        a, b = k.outer[-2:]
        both = Sym(f"{a.name}{b.name}", a.size * b.size)
        mapping = {a: as_index(both) // b.size, b: as_index(both) % b.size}
        k = replace(k.rewritten(lambda x: x, mapping), outer=(*k.outer[:-2], both),
                    vector=both if k.vector in (a, b) else k.vector)
    return k


def is_line_of_lines(k: LoopKernel) -> bool:
    """Whether its last lines lie one behind the other in all results."""
    return len(k.outer) > 1 and all(walks_as_one(at, *k.outer[-2:]) for _, at in k.stores)


def are_short_lines(k: LoopKernel) -> bool:
    """Whether results lie in lines that are too short to be written as they are."""
    return k.about(k.outer[-1].size, BLOCKS.transpose_least) < BLOCKS.transpose_least and is_idle(k, BLOCKS.threads)


def is_idle(k: LoopKernel, room: int) -> bool:
    """Whether a tile of so many elements has too many lanes that do nothing."""
    blocks = spans(k, k.outer, room)
    sizes = {v: k.about(v.size, block) for v, block in blocks.items()}
    lanes = math.prod(-(-sizes[v] // block) * block for v, block in blocks.items())
    known = all(v.size.is_const for v in k.outer[-2:])  # else sizes of the run would be divided by
    return lanes * 100 > math.prod(sizes.values()) * (BLOCKS.lanes if known else BLOCKS.lanes_at_run)
