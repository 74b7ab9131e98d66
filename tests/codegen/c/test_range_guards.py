"""Ranges outside of which an expression is zero."""

from __future__ import annotations

import pytest
import torch

from flambeau.codegen.c.contractions.range_guards import guard_of
from flambeau.ir.expr import Expr, const, index_value, load, where
from flambeau.ir.index import Index, Sym, as_index

V, OUTER = Sym("v", 40), Sym("o", 9)


def guarded(at: Index, size: int = 17) -> Expr:
    """x[at] where at lies in [0, size), which also depends on another variable; else zero."""
    holds = (index_value(at) >= const(0, torch.int64)) & (index_value(at) < const(size, torch.int64)) & (
        index_value(OUTER) < const(4, torch.int64))
    return where(holds, load("x", (at,), torch.float32, holds), const(0.0, torch.float32))


@pytest.mark.parametrize(("step", "offset"), [(1, -3), (2, -3), (3, 5), (-1, 20), (-2, 33)])
def test_the_range_is_exact(step: int, offset: int) -> None:
    at = as_index(V) * step + offset
    guard = guard_of(guarded(at), V)
    assert guard is not None
    lo, hi = max((0, *(b.const for b in guard.lows))), min((40, *(b.const for b in guard.highs)))
    assert [v for v in range(40) if 0 <= step * v + offset < 17] == list(range(lo, hi))
    assert guard.inside.op == "load" and all(mask is const(True, torch.bool) for mask in guard.inside.args)
    assert V not in guard.holds.symbols() and OUTER in guard.holds.symbols()


def test_what_is_not_a_range_has_no_guard() -> None:
    assert guard_of(load("x", (as_index(V),), torch.float32), V) is None
    assert guard_of(guarded(as_index(OUTER)), V) is None  # would be read outside the loop
    odd = (index_value(as_index(V) % 2) < const(1, torch.int64))
    assert guard_of(where(odd, load("x", (as_index(V),), torch.float32), const(0.0, torch.float32)), V) is None
