"""Counts the bytes that a launch must move: each buffer once, however often it is read.

This is a lower bound of a kernel's time, because each byte must cross the memory bus at least once.
"""

from __future__ import annotations

from collections.abc import Mapping

from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, ZERO, Index, as_index, minimum, product
from flambeau.ir.program import AnyKernel, BufferPlan, Launch, TableKernel


def moved(launch: Launch, kernel: AnyKernel, places: Mapping[str, BufferPlan]) -> Index | None:
    """The bytes of a launch, over the run's sizes; None if only the lists passed to the launch determine them."""
    if isinstance(kernel, TableKernel):
        steps, elements = kernel.steps(), sum(launch.lengths)
        each = [-(-elements // steps[p.name]) * p.dtype.itemsize for p in kernel.columns if p.name in steps]
        return as_index(sum(each)) if launch.lengths else None
    asked: dict[str, Index] = {}
    reads = [(e.attr[0], e.attr[1][0]) for e in loads(*kernel.everything())]
    for name, at in dict.fromkeys([*reads, *kernel.stores]):
        points = product(v.extent for v in at.symbols() if v.extent is not None)
        asked[name] = asked.get(name, ZERO) + points
    total = ZERO
    for p, name in zip(kernel.params, launch.args, strict=True):
        there = elements_of(places[name])
        total += minimum(asked.get(p.name, there), there) * p.dtype.itemsize
    return total


def elements_of(b: BufferPlan) -> Index:
    """The number of elements of a buffer in memory: expanded dimensions count once."""
    return product(n if not (s.is_const and s.const == 0) else ONE for n, s in zip(b.shape, b.strides, strict=True))
