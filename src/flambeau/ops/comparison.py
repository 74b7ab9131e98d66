"""Comparisons, logic, tests on floats, and selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import is_float, opmath, promote
from flambeau.ir.expr import Expr, cast, const, where
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import eq, is_finite, isinf, isnan, ne, not_
from flambeau.ops.facts import EVERYWHERE, describe, of_family
from flambeau.ops.registry import (
    broadcast_shapes,
    load_at,
    lower,
    lower_pointwise,
    operand,
    pointwise,
    scalar_at,
    table,
)

aten = torch.ops.aten
of_family(exact=EVERYWHERE)


def _compare(formula: Callable[[Expr, Expr], Expr]) -> Any:
    """Compare in the storage dtype: as in ATen, a Python number is rounded to it first."""

    def compare(a: Expr, b: Expr) -> Expr:
        return formula(cast(a, opmath(a.dtype)), cast(b, opmath(b.dtype)))

    return pointwise(compare, kind="bool", math=False)


for _name, _formula in {
    "eq": eq, "ne": ne, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}.items():
    lower(getattr(aten, _name))(_compare(_formula))
describe(aten.eq.Tensor, aten.ne.Tensor, asks_equality=True)


def truth(x: Expr) -> Expr:
    return x if x.dtype is torch.bool else ne(x, 0)


table("bool", {
    aten.logical_and: lambda a, b: truth(a) & truth(b),
    aten.logical_or: lambda a, b: truth(a) | truth(b),
    aten.logical_xor: lambda a, b: truth(a) ^ truth(b),
    aten.logical_not: not_,
})


def _on_floats(test: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """Apply a test to floats; integers count as finite numbers."""
    return lambda x: test(x) if is_float(x.dtype) else const(False, torch.bool)


table("bool", {
    aten.isnan: _on_floats(isnan),
    aten.isinf: _on_floats(isinf),
    aten.isposinf: _on_floats(lambda x: eq(x, math.inf)),
    aten.isneginf: _on_floats(lambda x: eq(x, -math.inf)),
    aten.isfinite: is_finite,
})


@lower_pointwise(aten.nan_to_num, operands=1, math=False)
def nan_to_num(x: Expr, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Expr:
    if not is_float(x.dtype):
        return x
    limits, wide = torch.finfo(x.dtype), cast(x, opmath(x.dtype))
    for found, number in ((isnan(wide), 0 if nan is None else nan),
                          (eq(wide, math.inf), limits.max if posinf is None else posinf),
                          (eq(wide, -math.inf), limits.min if neginf is None else neginf)):
        x = where(found, const(torch.tensor(number, dtype=x.dtype).item(), x.dtype), x)
    return x


@lower(aten.where.self, operands=3)
def select(condition: Value, a: Any, b: Any) -> Value:
    """Select without widening, because nothing is computed."""
    dtype = promote((operand(a), operand(b)))
    shape = broadcast_shapes(*(v.shape for v in (condition, a, b) if isinstance(v, Value)))
    return build.pointwise(shape, lambda i: where(
        load_at(condition, i), scalar_at(a, i, dtype, dtype), scalar_at(b, i, dtype, dtype)))
