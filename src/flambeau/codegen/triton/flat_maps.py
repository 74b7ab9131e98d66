"""Maps over short lines: the last variables are merged into one, so that one access covers several results.

A tile of a map gives each variable an axis of a power of two. With lines of five elements, three lanes in eight are
idle then, and no access is wider than an element. Merged, the points of all lines are one line as long as results are
stored contiguously; loads with another layout divide to find their address.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flambeau.ir.index import Sym, as_index, walks_as_one
from flambeau.ir.program import LoopKernel
from flambeau.ir.tuning import BLOCKS

from .blocks import spans


def as_lines(k: LoopKernel, room: int) -> LoopKernel:
    """Merges the last variables of a map as long as a tile of `room` elements would leave too many lanes idle."""
    while is_idle(k, room) and is_line_of_lines(k):
        k = as_one_line(k)
    return k


def long_lines(k: LoopKernel) -> LoopKernel:
    """Merges the last variables of a transposition as long as its lines are too short for a tile."""
    while k.outer[-2] is not k.tile and is_line_of_lines(k) \
            and k.about(k.outer[-1].size, BLOCKS.transpose_least) < BLOCKS.transpose_least:
        k = as_one_line(k)
    return k


def as_one_line(k: LoopKernel) -> LoopKernel:
    """Merges the last two variables."""
    a, b = k.outer[-2:]
    both = Sym(f"{a.name}{b.name}", a.size * b.size)
    mapping = {a: as_index(both) // b.size, b: as_index(both) % b.size}
    return replace(k.rewritten(lambda x: x, mapping), outer=(*k.outer[:-2], both),
                   vector=both if k.vector in (a, b) else k.vector)


def is_line_of_lines(k: LoopKernel) -> bool:
    """Whether its last lines follow one another in memory in all results."""
    return len(k.outer) > 1 and all(walks_as_one(at, *k.outer[-2:]) for _, at in k.stores)


def are_short_lines(k: LoopKernel) -> bool:
    """Whether the lines of results are too short to be stored line by line."""
    return k.about(k.outer[-1].size, BLOCKS.transpose_least) < BLOCKS.transpose_least and is_idle(k, BLOCKS.threads)


def is_idle(k: LoopKernel, room: int) -> bool:
    """Whether a tile of `room` elements leaves too many lanes idle."""
    blocks = spans(k, k.outer, room)
    sizes = {v: k.about(v.size, block) for v, block in blocks.items()}
    lanes = math.prod(-(-sizes[v] // block) * block for v, block in blocks.items())
    known = all(v.size.is_const for v in k.outer[-2:])  # else the kernel would divide by run-time sizes
    if known and any(v.size.const <= BLOCKS.short_line and v.size.const % BLOCKS.access for v in k.outer[-1:]):
        return lanes > math.prod(sizes.values())  # accesses would be single elements
    return lanes * 100 > math.prod(sizes.values()) * (BLOCKS.lanes if known else BLOCKS.lanes_at_run)
