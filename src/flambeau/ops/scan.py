"""Cumulative operators: a running sum, product, extremum with its index, and log of a sum of exponentials."""

from __future__ import annotations

import math
from functools import cache

import torch

from flambeau.ir import build
from flambeau.ir.build import make_combine, simple_combine
from flambeau.ir.dtypes import DType, highest, is_float, lowest, opmath
from flambeau.ir.expr import Expr, cast, const, index_value, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Combine, Value
from flambeau.ir.scalar import abs_, eq, exp2, isnan, log, maximum
from flambeau.ops.registry import lower, to_dtype, wrap_dim

aten = torch.ops.aten


def running(dtype: DType) -> DType:
    """The dtype a running value is kept in. Where a scan adds one by one, its rounding errors pile up as those of a
    sum in many lanes do not: there float32 runs in float64, as in ATen."""
    if not is_float(dtype):
        return torch.int64
    return torch.float64 if dtype is torch.float32 and build.graph().capabilities.serial_scans else opmath(dtype)


def _cumulated(name: str, x: Value, dim: int, dtype: DType | None) -> Value:
    out = dtype or (x.dtype if is_float(x.dtype) else torch.int64)
    if not x.rank:
        return to_dtype(x, out)
    wide = running(out)
    return build.scan(x.shape, wrap_dim(dim, x.rank), simple_combine(name, wide),
                      lambda i: cast(cast(x.load(i), out), wide), dtypes=(out,))[0]


@lower(aten.cumsum)
def cumsum(x: Value, dim: int, *, dtype: DType | None = None) -> Value:
    return _cumulated("sum", x, dim, dtype)


@lower(aten.cumprod)
def cumprod(x: Value, dim: int, *, dtype: DType | None = None) -> Value:
    return _cumulated("prod", x, dim, dtype)


@cache
def _so_far(name: str, dtype: DType, place: DType) -> Combine:
    """The extremum and its index. The right side is always the later one, so on ties, and among NaNs, it wins
    as in ATen."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (best, at), (new, here) = a, b
        take = new >= best if name == "max" else new <= best
        if is_float(dtype):
            take = take | isnan(new)  # and what is compared with a NaN never takes its place
        return where(take, new, best), where(take, here, at)

    start = lowest(dtype) if name == "max" else highest(dtype)
    return make_combine(f"cum{name}", (dtype, place), (start, -1), fn)


def _extremum_so_far(name: str, x: Value, dim: int) -> tuple[Value, Value]:
    if not x.rank:
        return x, build.pointwise((), lambda i: const(0, torch.int64))
    axis = wrap_dim(dim, x.rank)
    wide, last = opmath(x.dtype), x.shape[axis].bounds()[1]
    place = torch.int32 if last is not None and last < 2**31 else torch.int64  # half as much to carry along
    best, at = build.scan(x.shape, axis, _so_far(name, wide, place),
                          lambda i: (cast(x.load(i), wide), index_value(i[axis], place)),
                          dtypes=(x.dtype, torch.int64))
    return best, at


@lower(aten.cummax)
def cummax(x: Value, dim: int) -> tuple[Value, Value]:
    return _extremum_so_far("max", x, dim)


@lower(aten.cummin)
def cummin(x: Value, dim: int) -> tuple[Value, Value]:
    return _extremum_so_far("min", x, dim)


@cache
def _log_sum(dtype: DType) -> Combine:
    """(m, s) stands for m + log(s), m the largest element: the logarithm waits until after the scan."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (am, asum), (bm, bsum) = a, b
        # exp, as 2 to a power: one instruction where that counts. Equal infinities: their difference is NaN.
        smaller = where(eq(am, bm), 1, exp2(abs_(am - bm) * -math.log2(math.e)))
        joined = where(am >= bm, asum + bsum * smaller, asum * smaller + bsum)
        return maximum(am, bm), joined

    return make_combine("logsumexp", (dtype, dtype), (-math.inf, 0), fn)


@lower(aten.logcumsumexp)
def logcumsumexp(x: Value, dim: int) -> Value:
    if not x.rank:
        return x
    wide, axis = running(x.dtype), wrap_dim(dim, x.rank)

    def start(i: tuple[Index, ...]) -> tuple[Expr, ...]:
        return cast(x.load(i), wide), const(1, wide)

    if not build.graph().capabilities.serial_scans:  # the logarithm is at hand where blocks are scanned
        return build.scan(x.shape, axis, _log_sum(wide), start, dtypes=(x.dtype,),
                          finish=lambda c: (cast(c[0] + log(c[1]), x.dtype),))[0]
    stored = opmath(x.dtype)  # m is one of the elements, s at least 1: neither loses anything to speak of
    m, s = build.scan(x.shape, axis, _log_sum(wide), start, dtypes=(x.dtype, stored))
    return build.pointwise(x.shape, lambda i: cast(m.load(i), stored) + log(s.load(i)), x.dtype)
