"""Scatters in Triton: one launch initialises the target, then each source point writes or combines its element.

Points that combine into the same element do so atomically, in no fixed order.
"""

from __future__ import annotations

import math
from itertools import product as points_of

from flambeau.ir.expr import Expr, loads
from flambeau.ir.index import ONE, Index, Sym, as_index, volume
from flambeau.ir.program import Form, Item, LoopKernel, ScatterKernel, sites_of
from flambeau.ir.tuning import BLOCKS

from .blocks import BlockWriter, PartDraft, spans, width_of
from .loops import LoopBlocks, warps_for

ATOMIC = {"add": "tl.atomic_add", "min": "tl.atomic_min", "max": "tl.atomic_max"}


def write_scatter(k: ScatterKernel) -> list[PartDraft]:
    drafts = []
    if k.init is not None:
        drafts.append(LoopBlocks(start_of(k, k.init)).render())
    drafts.append(ScatterBlocks(k, 1).render())
    return drafts


def start_of(k: ScatterKernel, init: Expr) -> LoopKernel:
    """Returns the kernel that initialises the target: a map of its own."""
    return LoopKernel(k.out_vars, (), k.out_vars[-1] if k.out_vars else None, ((Item((k.name,), "full", (init,)),),),
                      ((k.name, k.init_address),), frozenset(), k.params, k.sizes, form=Form("map"))


def taps_of(k: ScatterKernel) -> list[Sym]:
    """Variables of a few values over which one loaded element is scattered: they are written out."""
    reads = loads(k.value) if k.mode != "set" else []
    few = [v for v in k.vars if v not in k.free and v.size.is_const
           and v.size.const <= BLOCKS.tap_values and any(v not in e.symbols() for e in reads)]
    few = few[:-1] if len(few) == len(k.vars) else few  # leave one for the tile
    return few if volume(few).const <= BLOCKS.taps else []


class ScatterBlocks(BlockWriter):
    def __init__(self, k: ScatterKernel, part: int) -> None:
        exprs = [e for e in (k.init, k.value, k.mask) if e is not None]
        width = width_of(k, exprs, [(k.name, k.address), (k.name, k.init_address)], k.vars, k.out_vars)
        super().__init__(k.params, k.sizes, width, part)
        self.k = k
        self.sites = sites_of(k)

    def render(self) -> PartDraft:
        k = self.k
        taps = taps_of(k)
        vars = [v for v in k.vars if v not in taps]
        self.gathered = vars[-1] if taps else None
        # Stores to arbitrary places are made one by one: with a thread for each, no block changes its layout for them.
        anywhere = bool(vars) and k.address.coefficient(vars[-1]) is not ONE
        room = BLOCKS.scattered if anywhere else BLOCKS.tapped if taps else BLOCKS.tile
        points = k.about(volume(vars), room * BLOCKS.processors)
        while room > BLOCKS.warp and not taps and points < room * BLOCKS.processors:
            room //= 2  # with few points, a thread would wait for one addition after the other
        blocks = spans(k, vars, room)
        self.blocks = list(blocks.values())
        grid = self.open_tile(vars, blocks)
        for values in points_of(*(range(v.size.const) for v in taps)):
            point = {v: as_index(n) for v, n in zip(taps, values, strict=True)}
            mask = None if k.mask is None else k.mask.subs(point)
            self.write(k.address.subs(point), k.value.subs(point), k.mode, mask)
        elements = math.prod(self.blocks)
        warp = BLOCKS.warp if anywhere else BLOCKS.tapped_warp
        return PartDraft(self, grid, max(1, elements // warp) if anywhere or taps else warps_for(elements, 0))

    def write(self, address: Index, value: Expr, mode: str, mask: Expr | None) -> None:
        full, text = self.full(), self.value(value)
        more = [] if mask is None else [self.value(mask)]
        if mode == "set":
            self.store(self.k.name, address, text, full, *more)
            return
        holds = self.inside(full, *more)
        self.line(f'{ATOMIC[mode]}({self.pointer(self.k.name, address, full)}, {self.spread(text, full)}'
                  f'{f", {holds}" if holds else ""}, sem="relaxed")')
