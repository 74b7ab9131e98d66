"""Softmax, log-softmax and logsumexp: maximum of a row, sum of exponentials, and a map over the row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, opmath
from flambeau.ir.expr import Expr, cast, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import eq, exp, log
from flambeau.ops.facts import of_family
from flambeau.ops.reduction import accumulate, outside
from flambeau.ops.registry import lower, wrap_dim, wrap_dims

aten = torch.ops.aten
of_family(fuses=True)


def _exponentials(x: Value, dim: int) -> tuple[Value, Value, Value]:
    """For each row the largest element m and the sum of exp(x - m); and the exponentials themselves."""
    wide = opmath(x.dtype)
    axes = wrap_dims(dim, x.rank)
    m = accumulate("max", x.shape, axes, wide, lambda i: cast(x.load(i), wide))
    e = build.pointwise(x.shape, lambda i: exp(cast(x.load(i), wide) - m.load(outside(i, axes))))
    return m, accumulate("sum", x.shape, axes, wide, lambda i: e.load(i)), e


@lower(aten._softmax, group="softmax")
def softmax(x: Value, dim: int, half_to_float: bool) -> Value:
    axes = wrap_dims(wrap_dim(dim, x.rank), x.rank)
    _, total, e = _exponentials(x, dim)
    return build.pointwise(x.shape, lambda i: e.load(i) / total.load(outside(i, axes)),
                           torch.float32 if half_to_float else x.dtype)


@lower(aten._safe_softmax)
def safe_softmax(x: Value, dim: int, dtype: DType | None = None) -> Value:
    """Softmax in which a fully masked row (all -inf) is zero instead of NaN."""
    axes = wrap_dims(dim, x.rank)
    m, total, e = _exponentials(x, dim)

    def share(i: tuple[Index, ...]) -> Expr:
        row = outside(i, axes)
        return where(eq(m.load(row), -math.inf), 0, e.load(i) / total.load(row))

    return build.pointwise(x.shape, share, dtype or x.dtype)


@lower(aten._softmax_backward_data, group="softmax")
def softmax_backward(grad: Value, y: Value, dim: int, input_dtype: DType) -> Value:
    """y * (grad - sum(grad * y))"""
    wide = opmath(torch.promote_types(grad.dtype, y.dtype))
    axes = wrap_dims(dim, y.rank)

    def g(i: tuple[Index, ...]) -> Expr:
        return cast(grad.load(i), wide)

    def p(i: tuple[Index, ...]) -> Expr:
        return cast(y.load(i), wide)

    total = accumulate("sum", y.shape, axes, wide, lambda i: g(i) * p(i))
    return build.pointwise(y.shape, lambda i: p(i) * (g(i) - total.load(outside(i, axes))), input_dtype)


def _from_statistics(call: Callable[..., Any], x: Any, dim: int, half_to_float: bool) -> Any:
    """Recompute the result, which its gradient needs, from x and two numbers per row: x itself is often saved anyway,
    or in fewer bits."""
    narrow, dtype = x.meta["val"].dtype, torch.float32 if half_to_float else x.meta["val"].dtype
    x = x if narrow is opmath(narrow) else call(aten._to_copy.default, x, dtype=opmath(narrow))
    below = call(aten.sub.Tensor, x, call(aten.amax.default, x, [dim], True))
    total = call(aten.sum.dim_IntList, call(aten.exp.default, below), [dim], True)
    out = call(aten.sub.Tensor, below, call(aten.log.default, total))
    return out if opmath(narrow) is dtype else call(aten._to_copy.default, out, dtype=dtype)


@lower(aten._log_softmax, group="softmax", apart=_from_statistics)
def log_softmax(x: Value, dim: int, half_to_float: bool) -> Value:
    wide = opmath(x.dtype)
    axes = wrap_dims(dim, x.rank)
    m = accumulate("max", x.shape, axes, wide, lambda i: cast(x.load(i), wide))

    def below(i: tuple[Index, ...]) -> Expr:
        return cast(x.load(i), wide) - m.load(outside(i, axes))

    total = accumulate("sum", x.shape, axes, wide, lambda i: exp(below(i)))
    scale = build.pointwise(total.shape, lambda i: log(total.load(i)))
    return build.pointwise(x.shape, lambda i: below(i) - scale.load(outside(i, axes)),
                           torch.float32 if half_to_float else x.dtype)


@lower(aten._log_softmax_backward_data, group="softmax")
def log_softmax_backward(grad: Value, y: Value, dim: int, input_dtype: DType) -> Value:
    """grad - exp(y) * sum(grad)"""
    wide = opmath(torch.promote_types(grad.dtype, y.dtype))
    axes = wrap_dims(dim, y.rank)
    total = accumulate("sum", y.shape, axes, wide, lambda i: cast(grad.load(i), wide))
    return build.pointwise(y.shape, lambda i: cast(grad.load(i), wide)
                           - exp(cast(y.load(i), wide)) * total.load(outside(i, axes)), input_dtype)
