"""Scatters in Triton: the target's start in one launch, then every source point writes or joins its element.

Points that join the same element do so atomically, in no fixed order.
"""

from __future__ import annotations

from flambeau.ir.expr import Expr
from flambeau.ir.program import Item, LoopKernel, ScatterKernel

from .triton import BlockWriter, Draft, is_wide
from .triton_loops import TILE, LoopBlocks, spans, warps_for

ATOMIC = {"add": "tl.atomic_add", "min": "tl.atomic_min", "max": "tl.atomic_max"}


def write_scatter(k: ScatterKernel) -> list[Draft]:
    drafts = []
    if k.init is not None:
        drafts.append(LoopBlocks(start_of(k, k.init)).render())
    s = ScatterBlocks(k, 1)
    drafts.append(s.map(k.vars, lambda: s.write(k.address, k.value, k.mode, k.mask)))
    return drafts


def start_of(k: ScatterKernel, init: Expr) -> LoopKernel:
    """What the target starts as: a map of its own."""
    return LoopKernel(k.out_vars, (), k.out_vars[-1] if k.out_vars else None, ((Item((k.name,), "full", (init,)),),),
                      ((k.name, k.init_address),), frozenset(), k.params, k.sizes)


class ScatterBlocks(BlockWriter):
    def __init__(self, k: ScatterKernel, part: int) -> None:
        exprs = [e for e in (k.init, k.value, k.mask) if e is not None]
        vars = (*k.vars, *k.out_vars)
        super().__init__(k.params, is_wide(exprs, [k.address, k.init_address], k.vars)
                         or is_wide((), (), k.out_vars) or not vars and False, part)
        self.k = k

    def map(self, vars, body) -> Draft:
        blocks = spans(vars, TILE)
        self.blocks = list(blocks.values())
        grid = self.open_tile(vars, blocks)
        body()
        elements = 1
        for b in self.blocks:
            elements *= b
        return Draft(self, grid, warps_for(elements))

    def write(self, address, value: Expr, mode: str, mask: Expr | None) -> None:
        full = frozenset(range(len(self.blocks)))
        text = self.value(value)
        place = f"{self.short[self.k.name]} + {self.index(address)}"
        if self.index_axes(address) != full:
            place = self.spread(f"({place})", full)
        holds = self.inside(full, *([] if mask is None else [self.value(mask)]))
        if mode == "set":
            self.line(f"tl.store({place}, {text}{f', {holds}' if holds else ''})")
        else:
            self.line(f'{ATOMIC[mode]}({place}, {self.spread(text, full)}{f", {holds}" if holds else ""}, sem="relaxed")')
