"""Maps that read all channels at a computed position, such as grid sampling.

A tile has points and channels. Positions and weights depend on the point alone, and are computed once for the several
pieces of a row that a thread reads. Loads are contiguous along channels and stores along points: the tile is transposed
on its way out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flambeau.ir.expr import loads, walk
from flambeau.ir.index import ONE, Dyn, Sym, as_index, walks_as_one
from flambeau.ir.program import LoopKernel
from flambeau.ir.tuning import BLOCKS

from .blocks import power
from .polyphase import halved


@dataclass(frozen=True)
class Rows:
    kernel: LoopKernel
    blocks: dict[Sym, int]  # the tile, by variable

    @property
    def warps(self) -> int:
        warps = math.prod(self.blocks.values()) // (BLOCKS.warp * BLOCKS.gathered_thread)
        return max(1, min(BLOCKS.most_warps, warps))


def rows_of(k: LoopKernel) -> Rows | None:
    """Returns the kernel as one that gathers rows, if it reads contiguous rows at computed positions and stores across
    them; else None."""
    c = k.vector
    if k.inner or c is None or any(a.coefficient(c) is ONE for _, a in k.stores):
        return None
    computed = [a for e in loads(*k.everything()) for a in e.attr[1] if any(isinstance(x, Dyn) for x in a.atoms())]
    if not any(a.coefficient(c) is ONE for a in computed):
        return None
    # A variable along which stores are contiguous counts as a point, even if it is part of the computed addresses.
    images = [v for v in k.outer if v is not c and any(v in mono for a in computed for mono, _ in a.terms)
              and not any(a.coefficient(v) is ONE for _, a in k.stores)]
    points = [v for v in k.outer if v is not c and v not in images]
    k, points = merged(k, points)
    # Channels come before the points of an image: neighbouring programs read the same ones.
    if c.size.is_const and c.size.const > BLOCKS.channel_piece and c.size.const % BLOCKS.channel_piece == 0:
        k, low, _ = halved(k, c, BLOCKS.channel_piece)
        high = k.outer[k.outer.index(low) - 1]
        k = replace(k, outer=(*images, high, *points, low), vector=low)
        blocks = {high: block(high, BLOCKS.channels // BLOCKS.channel_piece), low: BLOCKS.channel_piece}
    else:
        k = replace(k, outer=(*images, c, *points))
        sizes = (block(c, n) for n in (BLOCKS.channels, BLOCKS.channels // 2))
        blocks = {c: min(sizes, key=lambda n: (covered(c, n), -n))}
    room = BLOCKS.gathered_points * BLOCKS.gathered_lines
    for v in reversed(points):
        blocks[v] = block(v, BLOCKS.gathered_points if v is points[-1] else room)
        room //= blocks[v]
    return Rows(k, {v: blocks[v] for v in k.outer if blocks.get(v, 1) > 1})


def merged(k: LoopKernel, points: list[Sym]) -> tuple[LoopKernel, list[Sym]]:
    """Merges neighbouring variables that all addresses walk as one: fewer points lie beyond the end of a tile."""
    while len(points) > 1:
        a, b = points[-2:]
        indices = [i for e in walk(*k.everything()) for i in e.own_indices()] + [i for _, i in k.stores]
        if not all(walks_as_one(i, a, b) for i in indices):
            break
        joint = Sym(f"{a.name}{b.name}", a.size * b.size)
        both = {a: as_index(joint) // b.size, b: as_index(joint) % b.size}
        k = k.rewritten(lambda x: x, both)
        points = [*points[:-2], joint]
    return k, points


def covered(v: Sym, block: int) -> int:
    """The number of elements that all blocks cover together."""
    return -(-v.size.const // block) * block if v.size.is_const else block


def block(v: Sym, most: int) -> int:
    return min(most, power(v.size.const)) if v.size.is_const else most
