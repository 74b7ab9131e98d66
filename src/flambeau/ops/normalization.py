"""Normalisation with gradients: layer, RMS, batch, group and weight norm.

With xhat = (x - mean) * rstd, y = xhat * weight + bias, g the gradient of y and h = g * weight, and averages
taken over the elements that share one mean,

    dx = rstd * (h - average(h) - xhat * average(h * xhat)),   dweight = sum(g * xhat),   dbias = sum(g).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, opmath
from flambeau.ir.expr import Expr, cast, const
from flambeau.ir.index import Index, product
from flambeau.ir.nodes import Shape, Value
from flambeau.ir.scalar import rsqrt, sqrt, square
from flambeau.ops.facts import describe, of_family
from flambeau.ops.reduction import accumulate, count, moments, moments_at_once, outside, sums
from flambeau.ops.registry import load_at, lower, to_dtype

aten = torch.ops.aten
of_family(fuses=True)

Gradients = tuple[Value | None, Value | None, Value | None]


def _reader(v: Value | None, wide: DType, missing: float = 0.0) -> Callable[[Sequence[Index]], Expr]:
    """v at an index, in the dtype of the arithmetic; a constant if v is None."""
    if v is None:
        return lambda i: const(missing, wide)
    return lambda i: cast(load_at(v, i), wide)


def _affine(xhat: Expr, i: Sequence[Index], weight: Value | None, bias: Value | None) -> Expr:
    y = xhat if weight is None else xhat * cast(load_at(weight, i), xhat.dtype)
    return y if bias is None else y + cast(load_at(bias, i), xhat.dtype)


def _mapped(v: Value, formula: Callable[[Expr], Expr]) -> Value:
    return build.pointwise(v.shape, lambda i: formula(v.load(i)))


def _inverse_root(squares: Value, n: Expr, eps: float) -> Value:
    """rstd from a sum of n squares."""
    return _mapped(squares, lambda e: rsqrt(e / n + eps))


# ---- layer norm --------------------------------------------------------------------------------------


def _inner(x: Value, normalized_shape: Sequence[Index]) -> tuple[range, range]:
    """The outer dimensions, and those that are normalized over."""
    split = x.rank - len(normalized_shape)
    return range(split), range(split, x.rank)


@lower(aten.native_layer_norm, group="layer norm")
def layer_norm(x: Value, normalized_shape: Sequence[Index], weight: Value | None, bias: Value | None,
               eps: float) -> tuple[Value, ...]:
    wide = opmath(x.dtype)
    at = _reader(x, wide)
    _, inner = _inner(x, normalized_shape)
    mean, spread = moments(x.shape, inner, wide, at)
    rstd = _inverse_root(spread, count(x.shape, inner, wide), eps)

    def body(i: tuple[Index, ...]) -> Expr:
        row = outside(i, inner)
        return _affine((at(i) - mean.load(row)) * rstd.load(row), i, weight, bias)

    y = build.pointwise(x.shape, body, x.dtype)
    saved = x.dtype if build.graph().on_cpu else wide
    return y, *(build.unsqueeze(to_dtype(v, saved), inner) for v in (mean, rstd))


def _row_gradients(grad: Value, x: Value, normalized_shape: Sequence[Index], mean: Value | None, rstd: Value,
                   weight: Value | None, output_mask: Sequence[bool]) -> tuple[Value | None, Value | None]:
    """dx and dweight; without a mean (RMS norm) the term average(h) is omitted."""
    wide = opmath(x.dtype)
    outer, inner = _inner(x, normalized_shape)
    n = count(x.shape, inner, wide)
    g, at, middle, scale, w = (_reader(v, wide) for v in (grad, x, mean, rstd, weight))

    def xhat(i: Sequence[Index]) -> Expr:
        return (at(i) if mean is None else at(i) - middle(i)) * scale(i)

    def h(i: Sequence[Index]) -> Expr:
        return g(i) if weight is None else g(i) * w(i)

    dx = dweight = None
    if output_mask[0]:
        level = None if mean is None else accumulate("sum", x.shape, inner, wide, h)
        slope = accumulate("sum", x.shape, inner, wide, lambda i: h(i) * xhat(i))

        def body(i: tuple[Index, ...]) -> Expr:
            row = outside(i, inner)
            centred = h(i) if level is None else h(i) - level.load(row) / n
            return scale(i) * (centred - xhat(i) * (slope.load(row) / n))

        dx = build.pointwise(x.shape, body, x.dtype)
    if output_mask[1] and weight is not None:
        dweight = to_dtype(accumulate("sum", x.shape, outer, wide, lambda i: g(i) * xhat(i)), weight.dtype)
    return dx, dweight


@lower(aten.native_layer_norm_backward, group="layer norm")
def layer_norm_backward(grad: Value, x: Value, normalized_shape: Sequence[Index], mean: Value, rstd: Value,
                        weight: Value | None, bias: Value | None, output_mask: Sequence[bool]) -> Gradients:
    dx, dweight = _row_gradients(grad, x, normalized_shape, mean, rstd, weight, output_mask)
    if not output_mask[2] or bias is None:
        return dx, dweight, None
    wide, (outer, _) = opmath(x.dtype), _inner(x, normalized_shape)
    return dx, dweight, to_dtype(accumulate("sum", x.shape, outer, wide, _reader(grad, wide)), bias.dtype)


# ---- RMS norm: layer norm without the mean -----------------------------------------------------------


@lower(aten._fused_rms_norm)
def rms_norm(x: Value, normalized_shape: Sequence[Index], weight: Value | None, eps: float | None
             ) -> tuple[Value, Value]:
    wide = opmath(x.dtype)
    at = _reader(x, wide)
    _, inner = _inner(x, normalized_shape)
    n = count(x.shape, inner, wide)
    total = accumulate("sum", x.shape, inner, wide, lambda i: square(at(i)))
    rstd = build.unsqueeze(_inverse_root(total, n, torch.finfo(wide).eps if eps is None else eps), inner)
    y = build.pointwise(x.shape, lambda i: _affine(at(i) * load_at(rstd, i), i, weight, None), x.dtype)
    return y, rstd


@lower(aten._fused_rms_norm_backward)
def rms_norm_backward(grad: Value, x: Value, normalized_shape: Sequence[Index], rstd: Value,
                      weight: Value | None, output_mask: Sequence[bool]) -> tuple[Value | None, Value | None]:
    return _row_gradients(grad, x, normalized_shape, None, rstd, weight, output_mask)


# ---- batch norm: one mean per channel, dimension 1 ---------------------------------------------------


def _channels(x: Value) -> list[int]:
    """All dimensions except the channels."""
    return [k for k in range(x.rank) if k != 1]


def _per_channel(v: Value | None, wide: DType, missing: float = 0.0) -> Callable[[Sequence[Index]], Expr]:
    read = _reader(v, wide, missing)
    return lambda i: read((i[1],))


def _normalize_channels(x: Value, weight: Value | None, bias: Value | None, mean: Value, rstd: Value
                        ) -> Value:
    wide = opmath(x.dtype)
    middle, scale = _per_channel(mean, wide), _per_channel(rstd, wide)
    return build.pointwise(x.shape, lambda i: _affine((cast(x.load(i), wide) - middle(i)) * scale(i), (i[1],),
                                                      weight, bias), x.dtype)


def _batch_statistics(x: Value, eps: float) -> tuple[Value, Value, Value]:
    """Mean, rstd and the unbiased variance of each channel."""
    wide = opmath(x.dtype)
    axes = _channels(x)
    # A channel is too large to stay in fast memory for a second pass.
    taken = moments_at_once if build.graph().capabilities.waits_for_memory else moments
    mean, spread = taken(x.shape, axes, wide, lambda i: cast(x.load(i), wide))
    n = count(x.shape, axes, wide)
    return mean, _inverse_root(spread, n, eps), _mapped(spread, lambda e: e / (n - 1))


def _moved(running: Value, new: Value, momentum: float) -> Value:
    """The running statistic after one more batch; half dtypes are computed in float32 until stored."""
    old, fresh = _reader(running, opmath(running.dtype)), _reader(new, opmath(running.dtype))
    return build.pointwise(running.shape, lambda i: old(i) * (1 - momentum) + fresh(i) * momentum)


def _saved_of_running(x: Value, mean: Value, variance: Value, eps: float) -> tuple[Value, Value]:
    """The saved mean and rstd of inference: empty on CPUs; elsewhere those that were used."""
    if build.graph().on_cpu:
        empty = build.pointwise((0,), lambda i: const(0, x.dtype))
        return empty, empty
    wide = opmath(x.dtype)
    return to_dtype(mean, wide), _root_of_running(variance, wide, eps)


def _root_of_running(variance: Value, wide: DType, eps: float) -> Value:
    return _inverse_root(to_dtype(variance, wide), const(1, wide), eps)


def _by_running(x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value, eps: float
                ) -> Value:
    return _normalize_channels(x, weight, bias, mean, _root_of_running(variance, opmath(x.dtype), eps))


def _by_batch(x: Value, weight: Value | None, bias: Value | None, eps: float
              ) -> tuple[Value, Value, Value, Value, Value]:
    """y, saved mean and rstd, and the exact mean and variance that move the running statistics."""
    mean, rstd, unbiased = _batch_statistics(x, eps)
    y = _normalize_channels(x, weight, bias, mean, rstd)
    saved = x.dtype if build.graph().on_cpu else mean.dtype
    return y, to_dtype(mean, saved), to_dtype(rstd, saved), mean, unbiased


@lower(aten._native_batch_norm_legit_functional, strides="normalised")
def batch_norm_functional(x: Value, weight: Value | None, bias: Value | None, running_mean: Value,
                          running_var: Value, training: bool, momentum: float, eps: float
                          ) -> tuple[Value, ...]:
    if not training:
        y = _by_running(x, weight, bias, running_mean, running_var, eps)
        return (y, *_saved_of_running(x, running_mean, running_var, eps),
                *(to_dtype(v, opmath(v.dtype)) for v in (running_mean, running_var)))
    y, save_mean, save_rstd, mean, variance = _by_batch(x, weight, bias, eps)
    return (y, save_mean, save_rstd, _moved(running_mean, mean, momentum),
            _moved(running_var, variance, momentum))


@lower(aten._native_batch_norm_legit_no_training, strides="normalised")
def batch_norm_no_training(x: Value, weight: Value | None, bias: Value | None, running_mean: Value,
                           running_var: Value, momentum: float, eps: float) -> tuple[Value, ...]:
    return (_by_running(x, weight, bias, running_mean, running_var, eps),
            *_saved_of_running(x, running_mean, running_var, eps))


@lower(aten._native_batch_norm_legit.no_stats, strides="normalised")
def batch_norm_no_stats(x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float,
                        eps: float) -> tuple[Value, ...]:
    return _by_batch(x, weight, bias, eps)[:3]


def _reserve() -> Value:
    return build.pointwise((0,), lambda i: const(0, torch.uint8))


@lower(aten._batch_norm_with_update_functional)
def batch_norm_with_update(x: Value, weight: Value | None, bias: Value | None, running_mean: Value,
                           running_var: Value, momentum: float, eps: float) -> tuple[Value, ...]:
    y, mean, rstd, *moved = batch_norm_functional(x, weight, bias, running_mean, running_var, True, momentum,
                                                  eps)
    return y, mean, rstd, _reserve(), *moved


@lower(aten._batch_norm_no_update)
def batch_norm_no_update(x: Value, weight: Value | None, bias: Value | None, running_mean: Value | None,
                         running_var: Value | None, momentum: float, eps: float) -> tuple[Value, ...]:
    if running_mean is None or running_var is None:
        return *batch_norm_no_stats(x, weight, bias, True, momentum, eps), _reserve()
    return *batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps), _reserve()


def _without_running(find: Callable[..., Any], grad: Any, x: Any, weight: Any, mean: Any, variance: Any, *rest: Any
                     ) -> tuple[Any, ...]:
    """Drop running statistics from a training gradient, which does not read them. They would be saved as they are after
    the forward, in memory of their own. Without weights they are kept, as they decide the compute dtype."""
    unread = rest[-3] is True and weight is not None
    return (grad, x, weight, *((None, None) if unread else (mean, variance)), *rest)


@lower(aten.native_batch_norm_backward, keeps_less=_without_running)
def batch_norm_backward(grad: Value, x: Value, weight: Value | None, running_mean: Value | None,
                        running_var: Value | None, save_mean: Value | None, save_rstd: Value | None,
                        train: bool, eps: float, output_mask: Sequence[bool]) -> Gradients:
    wide = opmath(x.dtype)
    axes = _channels(x)
    n = count(x.shape, axes, wide)
    if not train:
        assert running_mean is not None and running_var is not None
        save_mean, save_rstd = running_mean, _root_of_running(running_var, wide, eps)
    g, at = _reader(grad, wide), _reader(x, wide)
    middle, scale = _per_channel(save_mean, wide), _per_channel(save_rstd, wide)
    w = _per_channel(weight, wide, 1.0)

    def xhat(i: Sequence[Index]) -> Expr:
        return (at(i) - middle(i)) * scale(i)

    if build.graph().capabilities.waits_for_memory:  # both sums in one kernel
        slope, level = build.reduce(x.shape, axes, sums(wide, 2), lambda i: (g(i) * xhat(i), g(i)))
    else:
        slope = accumulate("sum", x.shape, axes, wide, lambda i: g(i) * xhat(i))
        level = accumulate("sum", x.shape, axes, wide, g)

    def body(i: tuple[Index, ...]) -> Expr:
        if not train:  # the statistics do not depend on x
            return g(i) * (scale(i) * w(i))
        centred = g(i) - level.load((i[1],)) / n - xhat(i) * (slope.load((i[1],)) / n)
        return centred * (scale(i) * w(i))

    kept = x.dtype if weight is None else weight.dtype
    return (build.pointwise(x.shape, body, x.dtype) if output_mask[0] else None,
            to_dtype(slope, kept) if output_mask[1] else None,
            to_dtype(level, kept) if output_mask[2] else None)


# Its `save_var` contains rstd despite the name; the reserve, its last argument, is unused.
lower(aten.batch_norm_backward)(lambda *args: batch_norm_backward(*args[:-1]))


# ---- results as on the CPU, for devices like ours


def _batch_norm_of_cpu(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
                       eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch norm on the CPU; in inference nothing is saved for the backward."""
    out, saved_mean, saved_scale = aten.native_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
    return (out, saved_mean, saved_scale) if training else (out, x.new_zeros(0), x.new_zeros(0))


describe(aten.native_batch_norm.default, instead=_batch_norm_of_cpu)
for _op in (aten.native_group_norm.default, aten.native_layer_norm.default):  # not composed of several
    describe(_op, instead=_op)


# ---- group norm: one mean per sample and group of channels -------------------------------------------


def _grouped(x: Value, group: int) -> tuple[Shape, Index]:
    """The shape with channels split into groups, and the number of channels in a group."""
    size = x.shape[1] // group
    return (x.shape[0], product((group,)), size, *x.shape[2:]), size


@lower(aten.native_group_norm, strides="suggested")
def group_norm(x: Value, weight: Value | None, bias: Value | None, N: Index, C: Index, HxW: Index, group: int,
               eps: float) -> tuple[Value, Value, Value]:
    wide = opmath(x.dtype)
    at = _reader(x, wide)
    split, size = _grouped(x, group)
    inner = range(2, len(split))
    mean, spread = moments(split, inner, wide, lambda i: at((i[0], i[1] * size + i[2], *i[3:])))
    rstd = _inverse_root(spread, count(split, inner, wide), eps)

    def body(i: tuple[Index, ...]) -> Expr:
        own = (i[0], i[1] // size)
        return _affine((at(i) - mean.load(own)) * rstd.load(own), (i[1],), weight, bias)

    return build.pointwise(x.shape, body, x.dtype), to_dtype(mean, x.dtype), to_dtype(rstd, x.dtype)


@lower(aten.native_group_norm_backward)
def group_norm_backward(grad: Value, x: Value, mean: Value, rstd: Value, weight: Value | None, N: Index,
                        C: Index, HxW: Index, group: int, output_mask: Sequence[bool]) -> Gradients:
    """Sum per sample and channel first: weight and bias need these sums, and a group adds up its own."""
    wide = opmath(x.dtype)
    split, size = _grouped(x, group)
    n = count(split, range(2, len(split)), wide)
    g, at, w = _reader(grad, wide), _reader(x, wide), _per_channel(weight, wide, 1.0)

    def statistic(v: Value, i: Sequence[Index]) -> Expr:
        return cast(v.load((i[0], i[1] // size)), wide)

    def xhat(i: Sequence[Index]) -> Expr:
        return (at(i) - statistic(mean, i)) * statistic(rstd, i)

    spatial = range(2, x.rank)
    slope = accumulate("sum", x.shape, spatial, wide, lambda i: g(i) * xhat(i))
    level = accumulate("sum", x.shape, spatial, wide, g)

    def over_group(v: Value) -> Value:
        def share(i: tuple[Index, ...]) -> Expr:
            channel = (i[0], i[1] * size + i[2])
            return v.load(channel) * w(channel)

        return accumulate("sum", split[:3], (2,), wide, share)

    dx = dweight = dbias = None
    kept = x.dtype if weight is None else weight.dtype
    if output_mask[0]:
        slopes, levels = over_group(slope), over_group(level)

        def body(i: tuple[Index, ...]) -> Expr:
            own = (i[0], i[1] // size)
            centred = g(i) * w(i) - levels.load(own) / n - xhat(i) * (slopes.load(own) / n)
            return statistic(rstd, i) * centred

        dx = build.pointwise(x.shape, body, torch.promote_types(x.dtype, kept))
    if output_mask[1]:
        dweight = to_dtype(accumulate("sum", x.shape[:2], (0,), wide, lambda i: slope.load(i)), kept)
    if output_mask[2]:
        dbias = to_dtype(accumulate("sum", x.shape[:2], (0,), wide, lambda i: level.load(i)), kept)
    return dx, dweight, dbias


# ---- weight norm: w = g * v / |v| --------------------------------------------------------------------


@lower(aten._weight_norm_interface)
def weight_norm(v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    wide = opmath(v.dtype)
    at, length = _reader(v, wide), _reader(g, wide)
    axes = [k for k in range(v.rank) if k != dim]
    norm = _mapped(accumulate("sum", v.shape, axes, wide, lambda i: square(at(i)), keepdim=True), sqrt)
    w = build.pointwise(v.shape, lambda i: at(i) * (length(i) / load_at(norm, i)), v.dtype)
    return w, to_dtype(norm, torch.float32 if g.dtype is torch.bfloat16 else g.dtype)


@lower(aten._weight_norm_interface_backward)
def weight_norm_backward(grad: Value, v: Value, g: Value, norms: Value, dim: int) -> tuple[Value, Value]:
    """dg = sum(grad * v) / |v|, dv = g / |v| * (grad - v * dg / |v|)"""
    wide = opmath(v.dtype)
    dw, at, length, norm = (_reader(x, wide) for x in (grad, v, g, norms))
    axes = [k for k in range(v.rank) if k != dim]
    total = accumulate("sum", v.shape, axes, wide, lambda i: dw(i) * at(i), keepdim=True)
    dg = build.pointwise(g.shape, lambda i: load_at(total, i) / norm(i), g.dtype)
    dv = build.pointwise(v.shape, lambda i: length(i) / norm(i) * (
        dw(i) - at(i) * (load_at(total, i) / square(norm(i)))), v.dtype)
    return dv, dg
