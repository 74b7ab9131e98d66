"""Losses: a formula for each element, then nothing, the mean or the sum; negative log-likelihoods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, opmath, promote
from flambeau.ir.expr import Expr, cast, check, const, index_value, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Shape, Value
from flambeau.ir.scalar import abs_, eq, exp, log, log1p, maximum, minimum, ne, sigmoid, sign, square
from flambeau.ops.reduction import accumulate, count, finish
from flambeau.ops.registry import broadcast_shapes, load_at, lower, operand, scalar_at, to_dtype

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def _reduced(shape: Shape, dtype: DType, reduction: int, body: Callable[[tuple[Index, ...]], Expr]) -> Value:
    if reduction == NONE:
        return build.pointwise(shape, body, dtype)
    axes = range(len(shape))
    total = accumulate("sum", shape, axes, opmath(dtype), body)
    n = count(shape, axes, opmath(dtype))
    return finish(total, dtype, axes, False, (lambda e: e / n) if reduction == MEAN else lambda e: e)


def _loss(operands: tuple[Any, ...], reduction: int, formula: Callable[..., Expr]) -> Value:
    """formula over the operands (None stays None), broadcast and promoted, then reduced."""
    given = [v for v in operands if v is not None]
    common = promote(operand(v) for v in given)
    wide = opmath(common)
    shape = broadcast_shapes(*(v.shape for v in given))
    return _reduced(shape, common, reduction, lambda i: formula(
        *(None if v is None else scalar_at(v, i, common, wide) for v in operands)))


def _gradient(grad: Value, operands: tuple[Any, ...], reduction: int, formula: Callable[..., Expr]) -> Value:
    """grad * formula over the operands; a mean gives each element its part."""
    given = [v for v in operands if v is not None]
    common = promote(operand(v) for v in given)
    wide = opmath(common)
    shape = broadcast_shapes(*(v.shape for v in given))
    parts = count(shape, range(len(shape)), wide) if reduction == MEAN else const(1, wide)

    def body(i: tuple[Index, ...]) -> Expr:
        slope = formula(*(None if v is None else scalar_at(v, i, common, wide) for v in operands))
        return slope * (scalar_at(grad, i, grad.dtype, wide) / parts)

    return build.pointwise(shape, body, common)


def elementwise_loss(formula: Callable[..., Expr]) -> Callable[..., Value]:
    """op(x, target, reduction, *parameters) by formula(x, target, *parameters)."""

    @functools.wraps(formula)
    def lowered(x: Value, target: Value, reduction: int = MEAN, *parameters: Any) -> Value:
        return _loss((x, target), reduction, lambda a, t: formula(a, t, *parameters))

    return lowered


def elementwise_gradient(formula: Callable[..., Expr]) -> Callable[..., Value]:
    """op(grad, x, target, reduction, *parameters) by formula(x, target, *parameters), the slope."""

    @functools.wraps(formula)
    def lowered(grad: Value, x: Value, target: Value, reduction: int, *parameters: Any) -> Value:
        return _gradient(grad, (x, target), reduction, lambda a, t: formula(a, t, *parameters))

    return lowered


# ---- distances from the target -----------------------------------------------------------------------


@lower(aten.mse_loss)
@elementwise_loss
def mse_loss(x: Expr, target: Expr) -> Expr:
    return square(x - target)


@lower(aten.mse_loss_backward)
@elementwise_gradient
def mse_loss_backward(x: Expr, target: Expr) -> Expr:
    return 2 * (x - target)


@lower(aten.smooth_l1_loss)
@elementwise_loss
def smooth_l1_loss(x: Expr, target: Expr, beta: float = 1.0) -> Expr:
    d = abs_(x - target)
    return where(d < beta, 0.5 * square(d) / beta, d - 0.5 * beta)


@lower(aten.smooth_l1_loss_backward)
@elementwise_gradient
def smooth_l1_loss_backward(x: Expr, target: Expr, beta: float) -> Expr:
    d = x - target
    return where(abs_(d) < beta, d / beta, sign(d))


@lower(aten.huber_loss)
@elementwise_loss
def huber_loss(x: Expr, target: Expr, delta: float = 1.0) -> Expr:
    d = abs_(x - target)
    return where(d <= delta, 0.5 * square(d), delta * (d - 0.5 * delta))


@lower(aten.huber_loss_backward)
@elementwise_gradient
def huber_loss_backward(x: Expr, target: Expr, delta: float) -> Expr:
    d = x - target
    return where(abs_(d) <= delta, d, delta * sign(d))


@lower(aten.soft_margin_loss)
@elementwise_loss
def soft_margin_loss(x: Expr, target: Expr) -> Expr:
    return log1p(exp(-target * x))


@lower(aten.soft_margin_loss_backward)
@elementwise_gradient
def soft_margin_loss_backward(x: Expr, target: Expr) -> Expr:
    return -target * sigmoid(-target * x)


# ---- binary cross entropy ----------------------------------------------------------------------------


def _weighted(value: Expr, weight: Expr | None) -> Expr:
    return value if weight is None else value * weight


@lower(aten.binary_cross_entropy)
def binary_cross_entropy(x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
                         ) -> Value:
    """-(t log x + (1 - t) log(1 - x)), the logarithms no lower than -100 so that 0 * log 0 is 0."""

    def formula(p: Expr, t: Expr, w: Expr | None) -> Expr:
        return _weighted((t - 1) * maximum(log1p(-p), -100) - t * maximum(log(p), -100), w)

    return _loss((x, target, weight), reduction, formula)


@lower(aten.binary_cross_entropy_backward)
def binary_cross_entropy_backward(grad: Value, x: Value, target: Value, weight: Value | None = None,
                                  reduction: int = MEAN) -> Value:
    return _gradient(grad, (x, target, weight), reduction,
                     lambda p, t, w: _weighted((p - t) / maximum((1 - p) * p, 1e-12), w))


@lower(aten.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(x: Value, target: Value, weight: Value | None = None,
                                     pos_weight: Value | None = None, reduction: int = MEAN) -> Value:
    """(1 - t) x - (1 + (pos_weight - 1) t) log sigmoid(x)"""

    def formula(a: Expr, t: Expr, w: Expr | None, pos: Expr | None) -> Expr:
        log_sigmoid = minimum(a, 0) - log1p(exp(-abs_(a)))
        return _weighted((1 - t) * a - _weighted(log_sigmoid, None if pos is None else (pos - 1) * t + 1), w)

    return _loss((x, target, weight, pos_weight), reduction, formula)


# ---- negative log-likelihood: x[n, class, ...] picked by target[n, ...] ------------------------------


def _class_axis(x: Value) -> int:
    return 1 if x.rank > 1 else 0


def _class_weight(weight: Value | None, target: Expr, classes: Index, counted: Expr, wide: DType) -> Expr:
    """The weight of a target that counts; zero for one that is ignored."""
    if weight is None:
        return cast(counted, wide)
    return where(counted, cast(weight.load((check(target, classes, counted),), counted), wide), 0)


@lower(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int | Index
             ) -> tuple[Value, Value]:
    """The loss, and the weight of the targets that count: what a mean divides by, 0 for a batch of losses."""
    wide = opmath(x.dtype)
    axis = _class_axis(x)
    classes = x.shape[axis]

    def parts(i: tuple[Index, ...]) -> tuple[Expr, Expr]:
        t = cast(target.load(i), torch.int64)
        counted = ne(t, index_value(ignore_index))
        w = _class_weight(weight, t, classes, counted, wide)
        picked = x.load((*i[:axis], check(t, classes, counted), *i[axis:]), counted)
        return where(counted, -cast(picked, wide) * w, 0), w

    axes = range(target.rank)
    if reduction == NONE and axes:
        return (build.pointwise(target.shape, lambda i: parts(i)[0], x.dtype),
                build.pointwise((), lambda i: const(0, x.dtype)))
    loss = accumulate("sum", target.shape, axes, wide, lambda i: parts(i)[0])
    total = accumulate("sum", target.shape, axes, wide, lambda i: parts(i)[1])
    by = total.load(()) if reduction == MEAN else const(1, wide)
    return finish(loss, x.dtype, (), False, lambda e: e / by), to_dtype(total, x.dtype)


@lower(aten.nll_loss_backward, aten.nll_loss2d_backward)
def nll_loss_backward(grad: Value, x: Value, target: Value, weight: Value | None, reduction: int,
                      ignore_index: int | Index, total_weight: Value) -> Value:
    """Every element asks whether its class is the target: a map, where writing to targets is a scatter."""
    wide = opmath(x.dtype)
    axis = _class_axis(x)

    def body(i: tuple[Index, ...]) -> Expr:
        at = (*i[:axis], *i[axis + 1:])
        t = cast(target.load(at), torch.int64)
        hit = eq(t, index_value(i[axis])) & ne(t, index_value(ignore_index))
        g = cast(load_at(grad, at), wide)
        if reduction == MEAN:
            g = g / cast(total_weight.load(()), wide)
        if weight is not None:
            g = g * cast(weight.load((i[axis],)), wide)
        return where(hit, -g, 0)

    return build.pointwise(x.shape, body, x.dtype)
