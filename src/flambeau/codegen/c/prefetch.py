"""Prefetches rows at indices that depend on data, some steps before they are needed.

A processor cannot guess where the next row of a table lies, but the index that says so can be read ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flambeau.ir.expr import Expr, cost_of, rewrite, walk
from flambeau.ir.index import ONE, ZERO, Dyn, Index, Sym, as_index, from_atom, minimum
from flambeau.ir.tuning import CPU


@dataclass(frozen=True)
class Coming:
    """The row of a buffer that a later step will touch: where it begins, and its length in bytes."""

    address: Index
    length: int


def coming(address: Index, itemsize: int, step: Sym, along: Sym) -> Coming | None:
    """The row that an access will touch some steps from now, in a loop over `step` around one over `along`; None if
    prefetching it brings nothing."""
    if not along.size.is_const:
        return None
    finding = [a.expr for a in address.atoms() if isinstance(a, Dyn)]
    # Looking ahead must be cheap and possible: values that the kernel itself computes are not available yet.
    if cost_of(finding) > CPU.prefetch_cost or any(e.op in ("local", "carry", "raw", "fold") for e in walk(*finding)):
        return None
    slope = address.coefficient(along)
    return _row(address, itemsize, step, along) if slope is ONE else \
        _stretch(address, itemsize, step, along) if slope is None else None


def _row(address: Index, itemsize: int, step: Sym, along: Sym) -> Coming | None:
    """The coming row, if data decide where it begins."""
    length = along.size.const * itemsize
    if length > CPU.prefetch_longest or not any(_is_far(mono, coef * itemsize, step) for mono, coef in address.terms):
        return None
    steps = max(CPU.prefetch_nearest, min(CPU.prefetch_farthest, CPU.prefetch_bytes // length))
    later = {step: minimum(as_index(step) + steps, step.size - 1), along: ZERO}
    start = rewrite(Expr("index", torch.int64, (), address), _trusting, later)
    return Coming(start.attr, length) if start.op == "index" else None


def _stretch(address: Index, itemsize: int, step: Sym, along: Sym) -> Coming | None:
    """The coming stretch, if data decide where single elements are, but those of each step are in one stretch."""
    jumps = [(a, coef) for mono, coef in address.terms for a in mono[:1]
             if len(mono) == 1 and isinstance(a, Dyn) and along in a.symbols()]
    if len(jumps) != 1 or jumps[0][0].hi is None:
        return None
    (place, stride), = jumps
    start = address - from_atom(place) * stride
    assert place.hi is not None
    move, length = start.coefficient(step), (place.hi * abs(stride) + 1) * itemsize
    # There must be few cache lines per read, or most prefetches would be in vain.
    if move is None or move is ZERO or along in start.symbols() or 2 * (length // CPU.cache_line) > along.size.const:
        return None
    steps = max(1, min(CPU.prefetch_farthest, CPU.prefetch_bytes // 2 // length))
    return Coming(start.subs({step: as_index(step) + steps}), length)


def _is_far(mono: tuple[object, ...], stride: int, step: Sym) -> bool:
    """Whether this term of an address is a computed index that jumps about in a large table with every step."""
    dyns = [a for a in mono if isinstance(a, Dyn) and step in a.symbols()]
    return any(a.hi is None or (a.hi + 1) * abs(stride) >= CPU.cached_bytes for a in dyns)


def _trusting(e: Expr) -> Expr:
    """Removes checks: prefetching an address that does not exist has no effect."""
    return e.args[0] if e.op in ("check", "require") else e
