"""Convolutions, also transposed, with their gradients, for machines without a library for them.

With y the output side of a convolution (channels o, places q) and x its input side (channels c, places p), all
convolutions and gradients are one of three sums:

    y[n, o, q] = sum of x[n, c, p] w[o, c, k] over c, k      where p = stride q - padding + dilation k
    x[n, c, p] = sum of y[n, o, q] w[o, c, k] over o, k
    w[o, c, k] = sum of x[n, c, p] y[n, o, q] over n, q

A transposed convolution goes from y to x. Groups of channels are independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import accumulator, is_bool, opmath
from flambeau.ir.expr import Expr, cast, const, index_value, where
from flambeau.ir.index import ONE, ZERO, Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import eq, sum_over
from flambeau.ops.facts import describe
from flambeau.ops.reduction import accumulate
from flambeau.ops.registry import lower, to_dtype

aten = torch.ops.aten

Sizes = tuple[Index, ...]
CONVOLUTION = "convolution"  # torch has a separate switch for the float32 precision of convolutions
MOST_TAPS = 32  # the largest window that one point loops over by itself
MOST_PARTS = 8  # the largest number of parts into which a stride may divide places


@dataclass(frozen=True)
class Geometry:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(rank: int, stride: Any, padding: Any, dilation: Any, groups: Any) -> Geometry | None:
        """The geometry; None if one of its numbers is only known at run time."""
        s, p, d = (tuple(x) * (rank if len(x) == 1 else 1) for x in (stride, padding, dilation))
        return Geometry(s, p, d, groups) if all(isinstance(n, int) for n in (*s, *p, *d, groups)) else None


def grouped(v: Value, dim: int, groups: int) -> Value:
    """View a dimension of channels as (group, channel)."""
    each = v.shape[dim] // groups
    return v.view((*v.shape[:dim], groups, each, *v.shape[dim + 1:]),
                  lambda i: (*i[:dim], i[dim] * each + i[dim + 1], *i[dim + 2:]))


def ungrouped(v: Value, dim: int) -> Value:
    each = v.shape[dim + 1]
    return v.view((*v.shape[:dim], v.shape[dim] * each, *v.shape[dim + 2:]),
                  lambda i: (*i[:dim], i[dim] // each, i[dim] % each, *i[dim + 1:]))


def inside(places: Sequence[Index], sizes: Sequence[Index]) -> Expr:
    """Whether places lie within these sizes; conditions that always hold are dropped."""
    holds = const(True, torch.bool)
    for p, n in zip(places, sizes, strict=True):
        at = index_value(p)
        holds = holds & (at >= const(0, torch.int64)) & (at < index_value(n))
    return holds


def places(q: Sequence[Index], k: Sequence[Index], g: Geometry) -> list[Index]:
    """The places in x that the steps k of a window at q read."""
    return [s * at - p + d * step for at, step, s, p, d in zip(q, k, g.stride, g.padding, g.dilation, strict=True)]


def read(x: Value, n: Index, group: Index, channel: Index, at: Sequence[Index]) -> Expr:
    """An element of (batch, group, channel, places); zero outside, whatever x is computed from."""
    return read_where(inside(at, x.shape[3:]), x, (n, group, channel, *at))


def read_where(holds: Expr, x: Value, at: Sizes) -> Expr:
    return where(holds, x.load(at, None if holds.op == "const" else holds), const(0, x.dtype))


def forward(x: Value, w: Value, sizes: Sizes, g: Geometry) -> Value:
    """Compute y from x."""
    x, w = grouped(x, 1, g.groups), grouped(w, 0, g.groups)
    end, wide = 3 + len(sizes), accumulator(x.dtype)
    window = [n.const for n in w.shape[3:] if n.is_const]
    if w.shape[2] is ONE and len(window) == len(sizes) and prod(window) <= MOST_TAPS:
        # With one input channel per group it is no matrix product: loop over the window, as pooling does.
        def body(i: Sizes) -> Expr:
            return sum_over([(0, n) for n in window], wide, lambda k: cast(w.load((i[1], i[2], ZERO, *k)), wide) * cast(
                read(x, i[0], i[1], ZERO, places(i[3:], k, g)), wide))

        return ungrouped(build.pointwise((x.shape[0], g.groups, w.shape[1], *sizes), body), 1)
    y = build.contract((x.shape[0], g.groups, w.shape[1], *sizes), w.shape[2:],
                       lambda i: w.load((i[1], i[2], *i[end:])),
                       lambda i: read(x, i[0], i[1], i[end], places(i[3:end], i[end + 1:], g)), wide,
                       CONVOLUTION)
    return ungrouped(y, 1)


def backward(y: Value, w: Value, sizes: Sizes, g: Geometry) -> Value:
    """Compute x from y. Places of x that are one stride apart meet the same steps of the window: k = stride j + r
    belongs to p + padding = stride (q + j) + r. So for each r below the stride, this is a convolution with stride 1."""
    apart = prod(g.stride)
    if apart == 1 or apart > MOST_PARTS or not all(n.is_const for n in w.shape[2:]) or any(
            s > 1 and d > 1 for s, d in zip(g.stride, g.dilation, strict=True)):
        return backward_by_step(y, w, sizes, g)
    each = [range(min(s, n.const)) for s, n in zip(g.stride, w.shape[2:], strict=True)]
    parts = {r: backward_part(y, w, sizes, g, r) for r in product(*each)}

    def body(i: Sizes) -> Expr:
        whole = [n + p for n, p in zip(i[2:], g.padding, strict=True)]
        total = const(0, accumulator(y.dtype))
        for r, part in parts.items():
            here = const(True, torch.bool)
            for p, s, rest in zip(whole, g.stride, r, strict=True):
                here = here & eq(index_value(p % s), const(rest, torch.int64))
            at = (*i[:2], *(p // s for p, s in zip(whole, g.stride, strict=True)))
            total = where(here, part.load(at, here), total)
        return total

    return build.pointwise((y.shape[0], w.shape[1] * g.groups, *sizes), body)


def backward_part(y: Value, w: Value, sizes: Sizes, g: Geometry, r: tuple[int, ...]) -> Value:
    """Compute the places of x that leave the remainder r when divided by the stride, packed next to each other."""
    y, w = grouped(y, 1, g.groups), grouped(w, 0, g.groups)
    end = 3 + len(sizes)
    steps = [(n - rest + (s - 1)) // s for n, rest, s in zip(w.shape[3:], r, g.stride, strict=True)]
    many = [(n + p + (s - 1)) // s for n, p, s in zip(sizes, g.padding, g.stride, strict=True)]

    def weight(i: Sizes) -> Expr:
        k = [s * j + rest for s, j, rest in zip(g.stride, i[end + 1:], r, strict=True)]
        return w.load((i[1], i[end], i[2], *k))

    def source(i: Sizes) -> Expr:
        q = [m - d * j for m, j, d in zip(i[3:end], i[end + 1:], g.dilation, strict=True)]
        return read(y, i[0], i[1], i[end], q)

    x = build.contract((y.shape[0], g.groups, w.shape[2], *many), (w.shape[1], *steps), weight, source,
                       accumulator(y.dtype), CONVOLUTION)
    return ungrouped(x, 1)


def backward_by_step(y: Value, w: Value, sizes: Sizes, g: Geometry) -> Value:
    """Compute x from y, step by step of the window; a step contributes where the stride divides its distance."""
    y, w = grouped(y, 1, g.groups), grouped(w, 0, g.groups)
    end = 3 + len(sizes)

    def source(i: Sizes) -> Expr:
        far = [p + pad - d * k for p, pad, d, k in zip(i[3:end], g.padding, g.dilation, i[end + 1:], strict=True)]
        q = [f // s for f, s in zip(far, g.stride, strict=True)]
        holds = inside(q, y.shape[3:])
        for f, s in zip(far, g.stride, strict=True):
            holds = holds & eq(index_value(f % s), const(0, torch.int64))
        return read_where(holds, y, (i[0], i[1], i[end], *q))

    x = build.contract((y.shape[0], g.groups, w.shape[2], *sizes), (w.shape[1], *w.shape[3:]),
                       lambda i: w.load((i[1], i[end], i[2], *i[end + 1:])), source, accumulator(y.dtype), CONVOLUTION)
    return ungrouped(x, 1)


def weights(x: Value, y: Value, window: Sizes, g: Geometry) -> Value:
    """Compute w from x and y."""
    x, y = grouped(x, 1, g.groups), grouped(y, 1, g.groups)
    end = 3 + len(window)
    w = build.contract((g.groups, y.shape[2], x.shape[2], *window), (x.shape[0], *y.shape[3:]),
                       lambda i: y.load((i[end], i[0], i[1], *i[end + 1:])),
                       lambda i: read(x, i[end], i[0], i[2], places(i[end + 1:], i[3:end], g)), accumulator(x.dtype),
                       CONVOLUTION)
    return ungrouped(w, 0)


# ---- operators -------------------------------------------------------------------------------------------


def out_sizes(x: Value, w: Value, g: Geometry, transposed: bool, extra: Sequence[int]) -> Sizes:
    out = []
    for k, (n, m) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        reach = g.dilation[k] * (m - 1)
        out.append((n - 1) * g.stride[k] - 2 * g.padding[k] + reach + extra[k] + 1 if transposed
                   else (n + (2 * g.padding[k]) - reach - 1) // g.stride[k] + 1)
    return tuple(out)


def bias_apart(x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
               output_padding: Any, groups: Any) -> tuple[tuple[Any, ...], Callable[[Value], Value]] | None:
    """The call without its bias, and the step that adds it; None for kernels of one channel per group, which add it."""
    if bias is None or (groups != 1 and w.shape[1] is ONE):
        return None
    wide = opmath(x.dtype)

    def add(y: Value) -> Value:
        return build.pointwise(y.shape, lambda i: cast(y.load(i), wide) + cast(bias.load((i[1],)), wide), y.dtype)

    return (x, w, None, stride, padding, dilation, transposed, output_padding, groups), add


describe(aten.convolution.default, library=True, strides="convolved", last_step=bias_apart)


@lower(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(x: Value, w: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
                output_padding: Any, groups: Any) -> Any:
    g = Geometry.of(x.rank - 2, stride, padding, dilation, groups)
    if g is None or not build.contracts() or is_bool(x.dtype) or x.dtype is not w.dtype:
        return NotImplemented
    extra = tuple(output_padding) * (x.rank - 2 if len(output_padding) == 1 else 1)
    total = (backward if transposed else forward)(x, w, out_sizes(x, w, g, transposed, extra), g)
    if bias is None:
        return build.pointwise(total.shape, total.load, x.dtype)
    return build.pointwise(total.shape, lambda i: total.load(i) + cast(bias.load((i[1],)), total.dtype), x.dtype)


def gradients(grad: Value, x: Value, w: Value, g: Geometry, transposed: bool, mask: Sequence[bool]
              ) -> list[Value | None]:
    big, small = (grad, x) if transposed else (x, grad)
    out: list[Value | None] = [None, None, None]
    if mask[0]:
        made = forward(grad, w, x.shape[2:], g) if transposed else backward(grad, w, x.shape[2:], g)
        out[0] = build.pointwise(x.shape, made.load, x.dtype)
    if mask[1]:
        made = weights(big, small, w.shape[2:], g)
        out[1] = build.pointwise(w.shape, made.load, w.dtype)
    if mask[2]:
        axes = [0, *range(2, grad.rank)]
        wide = accumulator(grad.dtype)
        out[2] = to_dtype(accumulate("sum", grad.shape, axes, wide, lambda i: cast(grad.load(i), wide)), grad.dtype)
    return out


@lower(aten.convolution_backward.default, library=True)
def convolution_backward(grad: Value, x: Value, w: Value, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
                         transposed: bool, output_padding: Any, groups: Any, output_mask: Sequence[bool]) -> Any:
    g = Geometry.of(x.rank - 2, stride, padding, dilation, groups)
    if g is None or not build.contracts() or is_bool(x.dtype) or len(
            {x.dtype, w.dtype, grad.dtype}) > 1:
        return NotImplemented
    return tuple(gradients(grad, x, w, g, transposed, output_mask))


@lower(aten.convolution_backward_overrideable.default)
def convolution_backward_overrideable(grad: Value, x: Value, w: Value, stride: Any, padding: Any, dilation: Any,
                                      transposed: bool, output_padding: Any, groups: Any, output_mask: Sequence[bool]
                                      ) -> Any:
    return convolution_backward(grad, x, w, None, stride, padding, dilation, transposed, output_padding, groups,
                                output_mask)


def _backward_of_cpu(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
    return aten.convolution_backward(grad, x, weight, [grad.shape[1]], *args)


# PyTorch calls convolutions by another name on devices like ours.
describe(aten.convolution_overrideable.default, instead=aten.convolution.default)
describe(aten.convolution_backward_overrideable.default, instead=_backward_of_cpu)
