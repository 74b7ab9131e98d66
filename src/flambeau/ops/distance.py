"""Distances between rows in the p-norm: cdist and pdist with their gradients."""

from __future__ import annotations

import math

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, binary, cast, computed, const, index_value, where
from flambeau.ir.index import ZERO, Index, maximum, minimum
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import abs_, eq, ne, pow_, sign, sqrt
from flambeau.ops.reduction import accumulate, finish, p_norm
from flambeau.ops.registry import broadcast_shapes, load_at, lower

aten = torch.ops.aten


def p_norm_gradient(p: float, diff: Expr, grad: Expr, norm: Expr) -> Expr:
    """d norm / d diff * grad; zero where the norm is not differentiable."""
    if p == 0:
        return const(0, diff.dtype)
    if p == 1:
        return grad * sign(diff)
    if p == 2:
        return where(eq(norm, 0), 0, grad * diff / norm)
    if p == math.inf:
        return where(eq(abs_(diff), norm), grad * sign(diff), 0)
    flat = eq(norm, 0) | eq(diff, 0) if p < 1 else eq(norm, 0)  # avoids 0 to a negative power
    # For p < 2, |diff|^(p - 2) would be infinite at zero, where the gradient is finite.
    power = sign(diff) * pow_(abs_(diff), p - 1) if p < 2 else diff * pow_(abs_(diff), p - 2)
    return where(flat, 0, power * grad / pow_(norm, p - 1))


def _difference(a: Value, b: Value, i: tuple[Index, ...]) -> Expr:
    """a[..., row, k] - b[..., column, k] at i = (..., row, column, k)."""
    *batch, row, column, k = i
    wide = opmath(a.dtype)
    return cast(load_at(a, (*batch, row, k)), wide) - cast(load_at(b, (*batch, column, k)), wide)


def _pairs(a: Value, b: Value) -> tuple[Index, ...]:
    return (*broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2], a.shape[-1])


@lower(aten._cdist_forward, checks=True)
def cdist(a: Value, b: Value, p: float, compute_mode: int | None = None) -> Value:
    shape = _pairs(a, b)
    join, each, whole = p_norm(p)
    total = accumulate(join, shape, (len(shape) - 1,), opmath(a.dtype), lambda i: each(_difference(a, b, i)))
    return finish(total, a.dtype, (), False, whole)


@lower(aten._cdist_backward)
def cdist_backward(grad: Value, a: Value, b: Value, p: float, distance: Value) -> Value:
    shape = _pairs(a, b)
    wide = opmath(a.dtype)
    if any(n is ZERO for n in shape):  # ATen leaves the batch unexpanded here
        return build.pointwise(a.shape, lambda i: const(0, a.dtype))

    def share(i: tuple[Index, ...]) -> Expr:
        g, d = (cast(v.load(i[:-1]), wide) for v in (grad, distance))
        return p_norm_gradient(p, _difference(a, b, i), g, d)

    return finish(accumulate("sum", shape, (len(shape) - 2,), wide, share), a.dtype, (), False)


@lower(aten._pdist_forward)
def pdist(x: Value, p: float = 2.0) -> Value:
    """The distances of rows r < s in the order (0, 1), (0, 2), ..., (1, 2), ..."""
    n, width = x.shape
    wide = opmath(x.dtype)
    join, each, whole = p_norm(p)

    def element(i: tuple[Index, ...]) -> Expr:
        pair, k = i
        number, rows = index_value(pair), index_value(n)
        # The row of the k-th pair solves a quadratic equation; the -1 keeps rounding on the safe side.
        half = index_value(n, torch.float64) - 0.5
        r = cast(half - sqrt(half * half - 2 * index_value(pair, torch.float64) - 1), torch.int64)
        s = number - rows * r + binary("floordiv", r * (r + 1), 2) + r + 1
        top = n.bounds()[1]
        last = None if top is None else max(top - 1, 0)
        first_row, second_row = (cast(x.load((computed(v, 0, last), k)), wide) for v in (r, s))
        return each(first_row - second_row)

    return finish(accumulate(join, (n * (n - 1) // 2, width), (1,), wide, element), x.dtype, (), False, whole)


@lower(aten._pdist_backward)
def pdist_backward(grad: Value, x: Value, p: float, distance: Value) -> Value:
    n, width = x.shape
    wide = opmath(x.dtype)

    def share(i: tuple[Index, ...]) -> Expr:
        r, s, k = i
        low, high = minimum(r, s), maximum(r, s)
        pair = low * (2 * n - low - 1) // 2 + high - low - 1
        other = ne(index_value(r), index_value(s))
        diff = cast(x.load((r, k)), wide) - cast(x.load((s, k)), wide)
        g, d = (cast(v.load((pair,), other), wide) for v in (grad, distance))
        return where(other, p_norm_gradient(p, diff, g, d), 0)

    return finish(accumulate("sum", (n, n, width), (1,), wide, share), x.dtype, (), False)
