"""Cumulative operators: a running sum, product, extremum with its index, and log of a sum of exponentials."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import torch

from flambeau.ir import build
from flambeau.ir.build import make_combine, simple_combine
from flambeau.ir.dtypes import DType, highest, is_float, lowest, opmath
from flambeau.ir.expr import Expr, cast, const, index_value, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Combine, Level, Value, narrow
from flambeau.ir.scalar import abs_, eq, exp, exp2, fma, isnan, log1p, maximum, ne, rough_log2
from flambeau.ops.facts import EVERYWHERE, describe
from flambeau.ops.registry import lower, to_dtype, wrap_dim
from flambeau.ops.scattering import scatter

aten = torch.ops.aten


def running(dtype: DType) -> DType:
    """The dtype of a running value. Sequential scans accumulate rounding errors, unlike sums in many lanes, so there
    float32 is accumulated in float64, as in ATen."""
    if not is_float(dtype):
        return torch.int64
    return torch.float64 if dtype is torch.float32 and build.graph().capabilities.serial_scans else opmath(dtype)


def _cumulated(name: str, x: Value, dim: int, *, dtype: DType | None = None) -> Value:
    out = dtype or (x.dtype if is_float(x.dtype) else torch.int64)
    if not x.rank:
        return to_dtype(x, out)
    wide = running(out)
    return build.scan(x.shape, wrap_dim(dim, x.rank), simple_combine(name, wide),
                      lambda i: cast(cast(x.load(i), out), wide), dtypes=(out,))[0]


lower(aten.cumsum, group="cumulative")(partial(_cumulated, "sum"))
lower(aten.cumprod, group="cumulative")(partial(_cumulated, "prod"))


# torch only has this gradient as a composition of some twenty operators, which look for zeros to divide around. As one
# operator it is one scan without divisions.
torch.library.define("flambeau::cumprod_backward", "(Tensor grad, Tensor x, int dim, Tensor out) -> Tensor")
torch.library.impl("flambeau::cumprod_backward", "CompositeExplicitAutograd", aten.cumprod_backward)


describe(aten.cumprod_backward.default, traced=torch.ops.flambeau.cumprod_backward.default)


@torch.library.register_fake("flambeau::cumprod_backward")
def _(grad: torch.Tensor, x: torch.Tensor, dim: int, out: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad)


@cache
def _affine(dtype: DType) -> Combine:
    """The map t -> a t + b composed with those before it, starting from zero; plus a value that only the last one
    has."""

    def fn(first: tuple[Expr, ...], then: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return first[0] * then[0], first[1] * then[0] + then[1], then[2]

    return make_combine("affine", (dtype,) * 3, (1, 0, 1), fn)


@lower(torch.ops.flambeau.cumprod_backward)
def cumprod_backward(grad: Value, x: Value, dim: int, out: Value) -> Value:
    """The sum over k >= i of grad[k] * (product of x[j] for j <= k except i) is out[i - 1] * t[i], with
    t[i] = grad[i] + x[i + 1] * t[i + 1]."""
    if not x.rank:
        return grad
    axis, wide = wrap_dim(dim, x.rank), running(grad.dtype)

    def beside(v: Value, i: tuple[Index, ...], step: int, outside: float) -> Expr:
        at = i[axis] + step
        inside = index_value(at) >= 0 if step < 0 else index_value(at) < index_value(x.shape[axis])
        return where(inside, cast(v.load((*i[:axis], at, *i[axis + 1:]), inside), wide), outside)

    return build.scan(x.shape, axis, _affine(wide),
                      lambda i: (beside(x, i, 1, 0), cast(grad.load(i), wide), beside(out, i, -1, 1)),
                      reverse=True, dtypes=(grad.dtype,), finish=lambda c: (cast(c[1] * c[2], grad.dtype),))[0]


@cache
def _so_far(name: str, dtype: DType, place: DType) -> Combine:
    """The extremum so far and its index. The right side is always the later one, so it wins ties and among NaNs, as in
    ATen."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (best, at), (new, here) = a, b
        take = new >= best if name == "max" else new <= best
        if is_float(dtype):
            take = take | isnan(new)  # and a comparison with a NaN never replaces it
        return where(take, new, best), where(take, here, at)

    start = lowest(dtype) if name == "max" else highest(dtype)
    return make_combine(f"cum{name}", (dtype, place), (start, -1), fn)


def _extremum_so_far(name: str, x: Value, dim: int) -> tuple[Value, Value]:
    if not x.rank:
        return x, build.pointwise((), lambda i: const(0, torch.int64))
    axis = wrap_dim(dim, x.rank)
    wide, place = opmath(x.dtype), narrow(x.shape[axis])
    best, at = build.scan(x.shape, axis, _so_far(name, wide, place),
                          lambda i: (cast(x.load(i), wide), index_value(i[axis], place)),
                          dtypes=(x.dtype, torch.int64))
    return best, at


lower(aten.cummax, exact=EVERYWHERE, group="cumulative")(partial(_extremum_so_far, "max"))
lower(aten.cummin, exact=EVERYWHERE, group="cumulative")(partial(_extremum_so_far, "min"))


# torch scatters each element of this gradient to its place. But equal places form runs, each of which begins at its own
# place. So as one operator it is a scan that restarts with each run; atomic additions to one place would be serialized.
torch.library.define("flambeau::cummaxmin_backward", "(Tensor grad, Tensor indices, int dim) -> Tensor")
torch.library.impl("flambeau::cummaxmin_backward", "CompositeExplicitAutograd",
                   lambda grad, indices, dim: grad.new_zeros(grad.shape).scatter_add(dim, indices, grad))
describe(aten.cummaxmin_backward.default,  # for empty tensors, eager returns the argument itself
         traced=lambda grad, x, indices, dim: torch.ops.flambeau.cummaxmin_backward(grad, indices, dim) if x.numel()
         else x)


@torch.library.register_fake("flambeau::cummaxmin_backward")
def _(grad: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    return grad.new_empty(grad.shape)


@cache
def _in_runs(dtype: DType) -> Combine:
    """The sum of a run from its end; whether the run continues before the elements so far; and a value taken from the
    last element."""

    def fn(after: tuple[Expr, ...], here: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return where(ne(here[0], 0), after[0], 0), where(ne(here[0], 0), after[1], 0) + here[1], here[2]

    return make_combine("runs", (dtype,) * 3, (1, 0, 1), fn)


@lower(torch.ops.flambeau.cummaxmin_backward)
def cummaxmin_backward(grad: Value, indices: Value, dim: int) -> Value:
    if not grad.rank:
        return grad
    axis, wide = wrap_dim(dim, grad.rank), running(grad.dtype)
    if build.graph().capabilities.ordered_scatter:
        zeros = build.pointwise(grad.shape, lambda i: const(0, grad.dtype))
        return scatter(zeros, dim, indices, grad, reduce="add")

    def begins(i: tuple[Index, ...], at: Index) -> Expr:
        inside = index_value(at) < index_value(grad.shape[axis])
        return where(inside, eq(indices.load((*i[:axis], at, *i[axis + 1:]), inside), index_value(at)), True)

    def element(i: tuple[Index, ...]) -> tuple[Expr, Expr, Expr]:
        return (where(begins(i, i[axis] + 1), const(0, wide), 1), cast(grad.load(i), wide),
                where(begins(i, i[axis]), const(1, wide), 0))

    return build.scan(grad.shape, axis, _in_runs(wide), element, reverse=True, dtypes=(grad.dtype,),
                      finish=lambda c: (cast(where(ne(c[2], 0), c[1], 0), grad.dtype),))[0]


@cache
def _log_sum(dtype: DType) -> Combine:
    """(m, s) stands for m + log(s), with m the largest element, so that the logarithm is computed after the scan."""

    def smaller(difference: Expr, same: Expr) -> Expr:
        # exp is computed as a power of 2, a single instruction. Equal infinities are excepted: their difference is NaN.
        return where(same, 1, exp2(difference * math.log2(math.e)))

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (am, asum), (bm, bsum) = a, b
        scale = smaller(-abs_(am - bm), eq(am, bm))
        return maximum(am, bm), where(am >= bm, fma(bsum, scale, asum), fma(asum, scale, bsum))

    whole = make_combine("logsumexp", (dtype, dtype), (-math.inf, 0), fn)
    m, s = whole.left
    top, total = (Expr("carry", dtype, (), name) for name in ("top", "total"))
    # Beyond this distance, m + log(s) of an early element would lose precision to the largest one. This does not apply
    # to infinities and NaNs, whose difference is not a number. Sums beyond the end are zero.
    holds = (top - m <= 24) | eq(s, 0)
    return replace(whole, level=Level(top, total, m, holds, s * smaller(m - top, eq(m, top)), (top, total)))


@cache
def _log_sum_beyond(dtype: DType) -> Combine:
    """(m, r) stands for m + log(1 + r), with r the sum relative to the largest element: nothing is lost beside 1."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (am, ar), (bm, br) = a, b
        scale = where(eq(am, bm), 1, exp(-abs_(am - bm)))  # for equal infinities, the difference is NaN
        return maximum(am, bm), where(am >= bm, fma(br + 1, scale, ar), fma(ar + 1, scale, br))

    return make_combine("logsumexp", (dtype, dtype), (-math.inf, -1), fn)


@lower(aten.logcumsumexp, group="cumulative")
def logcumsumexp(x: Value, dim: int) -> Value:
    if not x.rank:
        return x
    wide, axis = running(x.dtype), wrap_dim(dim, x.rank)

    if wide is torch.float32 and not build.graph().capabilities.serial_scans:
        # An exact logarithm for every element would cost as much as the memory traffic.
        return build.scan(x.shape, axis, _log_sum(wide), lambda i: (cast(x.load(i), wide), const(1, wide)),
                          dtypes=(x.dtype,),
                          finish=lambda c: (cast(fma(rough_log2(c[1]), const(math.log(2), wide), c[0]), x.dtype),))[0]
    stored = opmath(x.dtype)  # m is an element and r is at least 0, so neither loses relevant precision
    m, r = build.scan(x.shape, axis, _log_sum_beyond(wide), lambda i: (cast(x.load(i), wide), const(0, wide)),
                      dtypes=(x.dtype, stored))
    return build.pointwise(x.shape, lambda i: cast(m.load(i), stored) + log1p(r.load(i)), x.dtype)
