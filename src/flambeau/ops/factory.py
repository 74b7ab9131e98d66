"""Operators that create tensors: constants, ranges, windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import SUPPORTED, DType, is_float, opmath, promote
from flambeau.ir.expr import Expr, binary, const, index_value, unary, where
from flambeau.ir.index import Index, IndexLike, as_index, ceildiv
from flambeau.ir.index import maximum as index_max
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import abs_, cos, eq, fma, sqrt
from flambeau.ops.facts import EVERYWHERE, NOWHERE, describe, of_family
from flambeau.ops.registry import lower, operand, overloads, scalar_at
from flambeau.torch_compat.ops import OpOverload
from flambeau.torch_compat.prims import prims

aten = torch.ops.aten
of_family(exact=EVERYWHERE)


def constant(shape: Sequence[IndexLike], value: Any, dtype: DType | None) -> Value:
    if isinstance(value, complex) or (dtype is not None and dtype not in SUPPORTED):
        return NotImplemented
    dtype = dtype or promote((operand(value),))
    return build.pointwise(shape, lambda i: scalar_at(value, (), dtype, dtype))


# ---- constants -----------------------------------------------------------------------------------------


@lower(aten.scalar_tensor, prims.scalar_tensor)
def scalar_tensor(s: Any, *, dtype: DType | None = None, **place: Any) -> Value:
    return constant((), s, dtype or torch.get_default_dtype())


@lower(aten.fill, strides="preserved")
def fill(x: Value, value: Any) -> Value:
    return build.pointwise(x.shape, lambda i: scalar_at(value, i, x.dtype, x.dtype))


def _filled(overload: OpOverload, number: int | None) -> Callable[..., Value]:
    """A lowering that fills a tensor with one number, by default the argument `fill_value`. The result has the `size`
    argument's size, or the shape of the tensor argument."""
    names = [a.name for a in overload._schema.arguments]

    def lowered(*args: Any, **options: Any) -> Value:
        given = dict(zip(names, args, strict=False)) | options
        value = given["fill_value"] if number is None else number
        usual = None if number is None else torch.get_default_dtype()
        shape, dtype = (x.shape, x.dtype) if (x := given.get("self")) is not None else ((), usual)
        return constant(given.get("size", shape), value, given.get("dtype") or dtype)

    return lowered


# The contents of an empty tensor are undefined; zeros fuse like any constant.
for _number, _ops in {
    None: (aten.full, aten.full_like, aten.new_full),
    0: (aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero, aten._efficientzerotensor, aten.empty, aten.empty_like,
        aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided),
    1: (aten.ones, aten.ones_like, aten.new_ones),
}.items():
    for _op in (overload for packet in _ops for overload in overloads(packet)):
        lower(_op)(_filled(_op, _number))
describe(aten.zero, exact=EVERYWHERE)
describe("zero", "empty_like", "zeros_like", "ones_like", "full_like", strides="preserved")
describe("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", undefined=True)


# ---- ranges --------------------------------------------------------------------------------------------


def _whole(*numbers: Any) -> bool:
    return all(isinstance(n, (int, Index)) for n in numbers)


def _range_length(start: Any, end: Any, step: Any) -> Index | None:
    """The number of values from start to before the end; None if it cannot be computed here."""
    if _whole(start, end, step):
        if not as_index(step).is_const:
            return None
        span, by = as_index(end) - start, int(as_index(step))
        return index_max(ceildiv(span if by > 0 else -span, abs(by)), 0)
    if not all(isinstance(n, (int, float)) for n in (start, end, step)):
        return None
    return as_index(max(math.ceil((end - start) / step), 0))


@lower(aten.arange.start, aten.arange.start_step)
def arange(start: Any, end: Any, step: Any = 1, *, dtype: DType | None = None, **place: Any) -> Value:
    dtype = dtype or (torch.int64 if _whole(start, end, step) else torch.get_default_dtype())
    if dtype is torch.int64 and not _whole(start, end, step):
        start, end, step = int(start), int(end), int(step)
    length = _range_length(start, end, step)
    if length is None or dtype not in SUPPORTED:
        return NotImplemented
    if not is_float(dtype) and not _whole(start, step):
        start, step = int(start), int(step)
    # Integers are computed exactly, others in float64: in a narrower dtype start + i * step would drift.
    compute = torch.float64 if is_float(dtype) and not _whole(start, step) else torch.int64
    if compute is torch.float64 and build.policy().exact:
        return NotImplemented  # eager rounds where its vectors and its threads begin

    def body(i: tuple[Index, ...]) -> Expr:
        first, by = (scalar_at(n, (), compute, compute) for n in (start, step))
        return first + index_value(i[0], compute) * by

    return build.pointwise((length,), body, dtype)


lower(aten.arange.default)(lambda end, **options: arange(0, end, **options))


@lower(aten.range, exact=NOWHERE)
def inclusive_range(start: float, end: float, step: float = 1, *, dtype: DType | None = None,
                    **place: Any) -> Value:
    length = int((end - start) / step) + 1
    return build.pointwise((length,), lambda i: index_value(i[0], torch.float64) * step + start,
                           dtype or torch.get_default_dtype())


describe(aten.arange.out, aten.arange.start_out, aten.range.out, aten.linspace.out, aten.logspace.out, keeps_shape=True)


@lower(prims.iota)
def iota(length: IndexLike, *, start: Any, step: Any, dtype: DType, **place: Any) -> Value:
    return build.pointwise((length,), lambda i: index_value(as_index(start) + i[0] * step, dtype))


def _even_steps(start: Any, end: Any, steps: IndexLike, dtype: DType, i: Index) -> Expr:
    """Value i of evenly spaced values, computed from the nearer end so that both ends are exact."""
    whole = torch.float32 if build.graph().capabilities.gpu_eager else torch.float64
    compute = opmath(dtype) if is_float(dtype) else whole
    low, high = (const(int(n), compute) if isinstance(n, float) and not is_float(dtype)
                 else scalar_at(n, (), dtype, compute) for n in (start, end))
    steps = as_index(steps)
    gap = (high - low) / index_value(index_max(steps - 1, 1), compute)
    up, down = index_value(i, compute), index_value(steps - 1 - i, compute)
    rising, falling = low + gap * up, high - gap * down
    if build.graph().capabilities.gpu_eager:
        rising, falling = fma(gap, up, low), fma(-gap, down, high)
    return where((index_value(i) < index_value(steps // 2)) | eq(index_value(steps), 1), rising, falling)


@lower(aten.linspace, exact=NOWHERE)
def linspace(start: Any, end: Any, steps: IndexLike, *, dtype: DType | None = None, **place: Any) -> Value:
    dtype = dtype or torch.get_default_dtype()
    if dtype not in SUPPORTED:
        return NotImplemented
    return build.pointwise((steps,), lambda i: _even_steps(start, end, steps, dtype, i[0]), dtype)


@lower(aten.logspace, exact=NOWHERE)
def logspace(start: Any, end: Any, steps: IndexLike, base: float = 10.0, *, dtype: DType | None = None,
             **place: Any) -> Value:
    dtype = dtype or torch.get_default_dtype()
    if dtype not in SUPPORTED:
        return NotImplemented

    def body(i: tuple[Index, ...]) -> Expr:
        exponent = _even_steps(start, end, steps, dtype, i[0])
        return binary("pow", const(base, exponent.dtype), exponent)

    return build.pointwise((steps,), body, dtype)


# ---- windows -------------------------------------------------------------------------------------------


def _window(*ops: Any) -> Callable[..., Any]:
    """Register a window from its formula on [0, 1]; a periodic window omits the last point."""

    def register(formula: Callable[..., Expr]) -> Callable[..., Any]:
        @lower(*ops, exact=NOWHERE)
        @wraps(formula)
        def window(length: int, periodic: bool = True, *shape: float, dtype: DType | None = None,
                   **place: Any) -> Value:
            dtype = dtype or torch.get_default_dtype()
            if length == 1:
                return constant((1,), 1, dtype)
            last = length if periodic else length - 1
            return build.pointwise(
                (length,), lambda i: formula(index_value(i[0], torch.float64) / last, *shape), dtype)

        return window

    return register


@_window(aten.bartlett_window)
def bartlett(t: Expr) -> Expr:
    return 1 - abs_(2 * t - 1)


@_window(aten.hamming_window)
def hamming(t: Expr, alpha: float = 0.54, beta: float = 0.46) -> Expr:
    return alpha - beta * cos(2 * math.pi * t)


@_window(aten.hann_window)
def hann(t: Expr) -> Expr:
    return 0.5 - 0.5 * cos(2 * math.pi * t)


@_window(aten.blackman_window)
def blackman(t: Expr) -> Expr:
    return 0.42 - 0.5 * cos(2 * math.pi * t) + 0.08 * cos(4 * math.pi * t)


@_window(aten.kaiser_window)
def kaiser(t: Expr, beta: float = 12.0) -> Expr:
    radius = 2 * t - 1
    return unary("i0", beta * sqrt(1 - radius * radius)) / unary("i0", const(beta, t.dtype))
