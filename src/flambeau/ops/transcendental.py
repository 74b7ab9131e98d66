"""Exponentials, logarithms, trigonometric and hyperbolic functions, and functions built from them."""

from __future__ import annotations

import math

import torch

from flambeau.ir.expr import Expr, const, where
from flambeau.ir.scalar import abs_, atan2, eq, exp, exp2, hypot, isinf, log1p, math1, maximum, sin
from flambeau.ops.facts import ON_CUDA
from flambeau.ops.registry import lower_pointwise, table
from flambeau.ops.rounding import mad

aten = torch.ops.aten

table("float", {getattr(aten, name): math1(name) for name in (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "sigmoid",
)}, exact=ON_CUDA)
table("float", {aten.atan2: atan2, aten.hypot: hypot}, exact=ON_CUDA)


@lower_pointwise(aten.sinc, kind="float", exact=ON_CUDA)
def sinc(x: Expr) -> Expr:
    return where(eq(x, 0), 1, sin(x * math.pi) / (x * math.pi))


@lower_pointwise(aten.logaddexp, exact=ON_CUDA)
def logaddexp(a: Expr, b: Expr) -> Expr:
    """log(e^a + e^b), factored by the larger; equal infinities would otherwise meet as inf - inf."""
    return where(isinf(a) & eq(a, b), a, maximum(a, b) + log1p(exp(-abs_(a - b))))


@lower_pointwise(aten.logaddexp2, exact=ON_CUDA)
def logaddexp2(a: Expr, b: Expr) -> Expr:
    more = mad(log1p(exp2(-abs_(a - b))), const(1 / math.log(2), a.dtype), maximum(a, b))
    return where(isinf(a) & eq(a, b), a, more)


