"""Negative log-likelihood losses, with checks of what data say. torch decomposes the other losses itself."""

from __future__ import annotations

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, opmath
from flambeau.ir.expr import Expr, cast, check, const, index_value, require, where
from flambeau.ir.faults import Fault
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import eq, log, log1p, maximum, ne
from flambeau.ops.facts import of_family
from flambeau.ops.reduction import accumulate, count, finish
from flambeau.ops.registry import load_at, lower, to_dtype

aten = torch.ops.aten
of_family(fuses=True)

NONE, MEAN = 0, 1  # at::Reduction


def _class_axis(x: Value) -> int:
    return 1 if x.rank > 1 else 0


def _class_weight(weight: Value | None, target: Expr, classes: Index, counted: Expr, wide: DType) -> Expr:
    """The weight of a target's class; zero for ignored targets."""
    if weight is None:
        return cast(counted, wide)
    return where(counted, cast(weight.load((check(target, classes, counted, Fault.TARGET),), counted), wide), 0)


@lower(aten.nll_loss_forward, aten.nll_loss2d_forward, fuses=True)
def nll_loss(x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int | Index
             ) -> tuple[Value, Value]:
    """The loss, and the total weight of the targets that count: the divisor of a mean, or 0 for unreduced losses."""
    wide = opmath(x.dtype)
    axis = _class_axis(x)
    classes = x.shape[axis]

    def parts(i: tuple[Index, ...]) -> tuple[Expr, Expr]:
        t = cast(target.load(i), torch.int64)
        counted = ne(t, index_value(ignore_index))
        w = _class_weight(weight, t, classes, counted, wide)
        picked = x.load((*i[:axis], check(t, classes, counted, Fault.TARGET), *i[axis:]), counted)
        return where(counted, -cast(picked, wide) * w, 0), w

    axes = range(target.rank)
    if reduction == NONE and axes:
        return (build.pointwise(target.shape, lambda i: parts(i)[0], x.dtype),
                build.pointwise((), lambda i: const(0, x.dtype)))
    loss = accumulate("sum", target.shape, axes, wide, lambda i: parts(i)[0])
    total = accumulate("sum", target.shape, axes, wide, lambda i: parts(i)[1])
    by = total.load(()) if reduction == MEAN else const(1, wide)
    return finish(loss, x.dtype, (), False, lambda e: e / by), to_dtype(total, x.dtype)


@lower(aten.nll_loss_backward, aten.nll_loss2d_backward, fuses=True, is_map=True)
def nll_loss_backward(grad: Value, x: Value, target: Value, weight: Value | None, reduction: int,
                      ignore_index: int | Index, total_weight: Value) -> Value:
    """Each element checks whether its class is the target: so it is a map, while writing to targets is a scatter."""
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


@lower(aten.binary_cross_entropy, fuses=True)
def binary_cross_entropy(x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN) -> Value:
    wide = opmath(x.dtype)

    def probability(v: Value, i: tuple[Index, ...], fault: Fault) -> Expr:
        p = cast(v.load(i), wide)
        return require(p, (p >= 0) & (p <= 1), fault)

    def body(i: tuple[Index, ...]) -> Expr:
        p, t = probability(x, i, Fault.GUESS), probability(target, i, Fault.TRUTH)
        loss = (t - 1) * maximum(log1p(-p), -100) - t * maximum(log(p), -100)
        return loss if weight is None else loss * cast(load_at(weight, i), wide)

    if reduction == NONE:
        return build.pointwise(x.shape, body, x.dtype)
    axes = range(x.rank)
    by = count(x.shape, axes, wide) if reduction == MEAN else const(1, wide)
    return finish(accumulate("sum", x.shape, axes, wide, body), x.dtype, (), False, lambda e: e / by)
