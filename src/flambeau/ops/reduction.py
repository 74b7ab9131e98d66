"""Reductions: sums, products, means, variances, extrema with and without index, any, all, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.build import arg_combine, make_combine, simple_combine
from flambeau.ir.dtypes import DType, accumulator, int_to_float, is_float, opmath
from flambeau.ir.expr import Expr, cast, index_value, loads, masked, where
from flambeau.ir.index import ONE, ZERO, Index, about, is_positive, product
from flambeau.ir.nodes import Combine, Shape, Value, as_indices, contiguous_strides, dim_vars
from flambeau.ir.scalar import abs_, eq, exp, is_finite, log, maximum, minimum, ne, pow_, sqrt, square
from flambeau.ops.facts import EVERYWHERE, describe, of_family
from flambeau.ops.registry import lower, wrap_dims
from flambeau.torch_compat.decomp import vector_norm as reference_norm
from flambeau.torch_compat.dispatch import (
    AutoDispatchBelowAutograd,
    ForceDispatchKeyGuard,
    excluded_keys,
    included_keys,
)

aten = torch.ops.aten
of_family(fuses=True)

Body = Callable[[tuple[Index, ...]], Expr]


# ---- helpers of all families with reductions ---------------------------------------------------------


def accumulate(name: str, shape: Shape, axes: Sequence[int], dtype: DType, body: Body, keepdim: bool = False
               ) -> Value:
    """body(i), of `dtype`, combined over `axes` by sum, prod, min, max, any or all."""
    return build.reduce(shape, axes, simple_combine(name, dtype), body, keepdim)[0]


def count(shape: Shape, axes: Sequence[int], dtype: DType) -> Expr:
    """The number of elements per result."""
    return index_value(product(shape[a] for a in axes), dtype)


def outside(i: Sequence[Index], axes: Sequence[int]) -> list[Index]:
    """The index without `axes`, at which a reduction over them has its result."""
    return [x for k, x in enumerate(i) if k not in axes]


def moments(shape: Shape, axes: Sequence[int], dtype: DType, body: Body) -> tuple[Value, Value]:
    """The mean over `axes`, and the sum of squared deviations from it.

    Two passes: as exact as Welford's update, while the inner loops stay plain sums, which vectorise. If a row is too
    large for fast memory to keep it for the second pass, and memory is the bottleneck, one pass is used.
    """
    g = build.graph()
    longest, points = g.capabilities.row_elements, about(product(shape[a] for a in axes), g.typical, 0)
    if (columns := narrowest_column(shape, axes, body)) is not None:
        longest = g.capabilities.tuning.longest_column(columns) or longest
    if longest is not None and points > longest:
        return moments_at_once(shape, axes, dtype, body)
    n = count(shape, axes, dtype)
    total = accumulate("sum", shape, axes, dtype, body)
    mean = build.pointwise(total.shape, lambda i: total.load(i) / n)
    spread = accumulate("sum", shape, axes, dtype, lambda i: square(body(i) - mean.load(outside(i, axes))))
    return mean, spread


def narrowest_column(shape: Shape, axes: Sequence[int], body: Body) -> int | None:
    """The bytes of the narrowest data that is contiguous along what is kept; None if some is along the rows, or if
    that is unknown."""
    vars, found = dim_vars(shape), list[int]()
    for e in loads(body(as_indices(vars))):
        b = build.graph().buffers[e.attr[0]]
        steps = {} if b.strides is None else {k: b.place(e.attr[1]).coefficient(v) for k, v in enumerate(vars)}
        along = [k for k, step in steps.items() if step is ONE and shape[k] is not ONE]
        if any(k in axes for k in along):
            return None
        found += [e.dtype.itemsize for _ in along]
    return min(found, default=None)


def moments_at_once(shape: Shape, axes: Sequence[int], dtype: DType, body: Body) -> tuple[Value, Value]:
    """The moments in one pass: sums of the deviations from a typical element, and of their squares.

    The precision of the squares depends on the distance of that element from the mean, in standard deviations. The
    median of three samples is no outlier unless two of them are; none is taken at the ends, where there may be padding.
    """
    n, there = count(shape, axes, dtype), index_value(product(shape[a] for a in axes)) > 0

    def typical(kept: Sequence[Index]) -> Expr:
        def sample(quarter: int) -> Expr:
            rest = iter(kept)
            place = [(size - 1) * quarter // 4 if k in axes else next(rest) for k, size in enumerate(shape)]
            return masked(body(tuple(place)), there)

        first, middle, last = map(sample, (1, 2, 3))
        return maximum(minimum(first, middle), minimum(maximum(first, middle), last))

    def powers(i: tuple[Index, ...]) -> tuple[Expr, ...]:
        rest = body(i) - typical(outside(i, axes))
        return rest, square(rest)

    first, second = build.reduce(shape, axes, sums(dtype, 2), powers)
    mean = build.pointwise(first.shape, lambda i: typical(i) + first.load(i) / n)
    spread = build.pointwise(first.shape, lambda i: maximum(second.load(i) - square(first.load(i)) / n, 0))
    return mean, spread


@cache
def sums(dtype: DType, count: int) -> Combine:
    """A combine function for several sums together."""
    return make_combine(f"sum{count}", (dtype,) * count, (0,) * count,
                        lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)))


def finish(v: Value, dtype: DType, axes: Sequence[int], keepdim: bool,
           formula: Callable[[Expr], Expr] = lambda e: e) -> Value:
    """Apply a last formula to the reduced value, convert to its storage dtype, and restore size-1 dimensions."""
    out = build.pointwise(v.shape, lambda i: formula(v.load(i)), dtype)
    return build.unsqueeze(out, axes) if keepdim else out


# ---- sums, products, means ---------------------------------------------------------------------------


def _accumulated(name: str, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Value:
    """A sum or product; integers and bools accumulate in int64 by default, and elements are converted first."""
    out = dtype or (x.dtype if is_float(x.dtype) else torch.int64)
    wide = accumulator(out)
    axes = wrap_dims(dim, x.rank)
    return finish(accumulate(name, x.shape, axes, wide, lambda i: cast(cast(x.load(i), out), wide)),
                  out, axes, keepdim)


lower(aten.sum.default, aten.sum.dim_IntList)(partial(_accumulated, "sum"))
lower(aten.prod.default, aten.prod.dim_int)(partial(_accumulated, "prod"))


# ---- the gradient of a product, for which eager looks at the data: one call in exact numerics --------------


_AROUND = excluded_keys()
with AutoDispatchBelowAutograd():
    _AUTOGRAD = excluded_keys() - _AROUND


@contextmanager
def _recording() -> Iterator[None]:
    """Turn autograd on inside an operator, where it is off."""
    excluded = excluded_keys() - _AUTOGRAD
    with ForceDispatchKeyGuard(included_keys(), excluded), torch.enable_grad():
        yield


torch.library.define("flambeau::prod_backward", "(Tensor grad, Tensor x, int? dim, bool keepdim) -> Tensor")


@torch.library.impl("flambeau::prod_backward", "CompositeExplicitAutograd")
def prod_backward(grad: torch.Tensor, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    """Run autograd itself, because its handling of zeros is not available as an operator."""
    with _recording():
        x = x.detach().requires_grad_()
        result = x.prod() if dim is None else x.prod(dim, keepdim)
    found = torch.autograd.grad(result, x, grad)[0]
    return found if x.dim() else found.clone()  # it might be the given gradient itself


@torch.library.register_fake("flambeau::prod_backward")
def _(grad: torch.Tensor, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    return torch.empty_like(x)


class _Product(torch.autograd.Function):
    """aten.prod with its gradient as one call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        ctx.where = dim, keepdim
        with AutoDispatchBelowAutograd():
            made = aten.prod.default(x) if dim is None else aten.prod.dim_int(x, dim, keepdim)
        ctx.save_for_backward(x, made)  # checks that saved tensors are not written to, as in eager
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return torch.ops.flambeau.prod_backward.default(grad, x, *ctx.where), None, None


def _traced_product(x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *,
            dtype: torch.dtype | None = None) -> Any:
    return _Product.apply(x if dtype is None else x.to(dtype), dim, keepdim)


describe(aten.prod.default, aten.prod.dim_int, traced_exactly=_traced_product)


# ---- means and variances -----------------------------------------------------------------------------


@lower(aten.mean.default, aten.mean.dim)
def mean(x: Value, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Value:
    out = dtype or x.dtype
    wide = opmath(out)
    axes = wrap_dims(dim, x.rank)
    total = accumulate("sum", x.shape, axes, wide, lambda i: cast(cast(x.load(i), out), wide))
    return finish(total, out, axes, keepdim, lambda e: e / count(x.shape, axes, wide))


def _var_mean(root: bool, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
              ) -> tuple[Value, Value]:
    """`root`: the standard deviation instead of the variance."""
    g = build.graph()  # this is ATen's own accumulator on CPUs
    wide = torch.float64 if g.on_cpu and torch.float64 in g.capabilities.dtypes else opmath(x.dtype)
    axes = wrap_dims(dim, x.rank)
    mean, spread = moments(x.shape, axes, wide, lambda i: cast(x.load(i), wide))
    # Degrees of freedom are clamped at zero: the quotient is then infinite or NaN, as in ATen.
    freedom = maximum(count(x.shape, axes, wide) - (1 if correction is None else correction), 0)
    var = finish(spread, x.dtype, axes, keepdim, lambda e: sqrt(e / freedom) if root else e / freedom)
    return var, finish(mean, x.dtype, axes, keepdim)


lower(aten.var_mean.correction, group="statistics")(partial(_var_mean, False))
lower(aten.std_mean.correction, group="statistics")(partial(_var_mean, True))
lower(aten.var.correction, group="statistics")(lambda *args, **options: _var_mean(False, *args, **options)[0])
lower(aten.std.correction, group="statistics")(lambda *args, **options: _var_mean(True, *args, **options)[0])


# ---- extrema -----------------------------------------------------------------------------------------


def of_something(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the extremum of an empty range to ATen, which raises the error; so if a size may be zero."""

    @wraps(fn)
    def lowered(x: Value, *args: Any, **kwargs: Any) -> Any:
        dims = wrap_dims(kwargs.get("dim", args[0] if args else None), x.rank)
        return fn(x, *args, **kwargs) if all(is_positive(x.shape[d]) for d in dims) else NotImplemented

    return lowered


def _extremum(name: str, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    wide = opmath(x.dtype)
    axes = wrap_dims(dim, x.rank)
    best = accumulate(name, x.shape, axes, wide, lambda i: cast(x.load(i), wide))
    return finish(best, x.dtype, axes, keepdim)


def index_dtype(sizes: Iterable[Index]) -> torch.dtype:
    """The dtype of an index among so many elements: int32 if it fits, because it is compared with every element."""
    points = product(sizes)
    return torch.int32 if points.is_const and points.const < 1 << 30 else torch.int64


def _extremum_at(name: str, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """The extremum along one dimension and its first index; the first NaN wins."""
    wide = opmath(x.dtype)
    axes = wrap_dims(dim, x.rank)
    kind = index_dtype(x.shape[d] for d in axes)
    best, at = build.reduce(x.shape, axes, arg_combine(name, wide, kind), lambda i: (
        cast(x.load(i), wide), cast(index_value(i[axes[0]] if axes else 0), kind)))
    return finish(best, x.dtype, axes, keepdim), finish(at, torch.int64, axes, keepdim)


def _arg(name: str, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is not None:
        return _extremum_at(name, x, dim, keepdim)[1]
    wide = opmath(x.dtype)
    axes = range(x.rank)
    strides, kind = contiguous_strides(x.shape), index_dtype(x.shape)

    def element(i: tuple[Index, ...]) -> tuple[Expr, Expr]:
        flat = sum((k * s for k, s in zip(i, strides)), ZERO)
        return cast(x.load(i), wide), cast(index_value(flat), kind)

    return finish(build.reduce(x.shape, axes, arg_combine(name, wide, kind), element)[1], torch.int64, axes, keepdim)


for _name in ("max", "min"):
    _whole = getattr(aten, _name)
    # Without an index, eager's choice between 0.0 and -0.0 depends on its order of comparisons.
    lower(getattr(aten, f"a{_name}"), _whole.default)(of_something(partial(_extremum, _name)))
    lower(_whole.dim, exact=EVERYWHERE, group="extrema")(of_something(partial(_extremum_at, _name)))
    lower(getattr(aten, f"arg{_name}"), exact=EVERYWHERE, group="statistics")(of_something(partial(_arg, _name)))


# ---- any and all -------------------------------------------------------------------------------------


def _truth(name: str, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    axes = wrap_dims(dim, x.rank)
    out = accumulate(name, x.shape, axes, torch.bool, lambda i: cast(x.load(i), torch.bool))
    # as the first boolean dtype, uint8 still returns its own dtype
    return finish(out, torch.uint8 if x.dtype is torch.uint8 else torch.bool, axes, keepdim)


lower(aten.any.default, aten.any.dim, aten.any.dims, exact=EVERYWHERE)(partial(_truth, "any"))
lower(aten.all.default, aten.all.dim, aten.all.dims, exact=EVERYWHERE)(partial(_truth, "all"))


# ---- hashes ------------------------------------------------------------------------------------------


_XOR = make_combine("xor", (torch.int64,), (0,), lambda a, b: (a[0] ^ b[0],))


@lower(aten.hash_tensor)
def hash_tensor(x: Value, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0) -> Value:
    """The exclusive or of all elements as 64-bit words: the bits of a float64, or a sign-extended integer."""
    axes = wrap_dims(dim, x.rank)

    def bits(i: tuple[Index, ...]) -> Expr:
        if not is_float(x.dtype):
            return cast(x.load(i), torch.int64)
        return Expr("bitcast", torch.int64, (cast(x.load(i), torch.float64),))

    return finish(build.reduce(x.shape, axes, _XOR, bits)[0], torch.uint64, axes, keepdim)


# ---- logsumexp and norms -----------------------------------------------------------------------------


@lower(aten.logsumexp, group="statistics")
def logsumexp(x: Value, dim: Any, keepdim: bool = False) -> Value:
    """m + log sum exp(x - m), with m the largest x; an infinite m is not subtracted, as x - m would be NaN."""
    out = int_to_float(x.dtype)
    wide = opmath(out)
    axes = wrap_dims(dim, x.rank)

    def at(i: tuple[Index, ...]) -> Expr:
        return cast(cast(x.load(i), out), wide)

    largest = accumulate("max", x.shape, axes, wide, at)
    m = build.pointwise(largest.shape, lambda i: where(is_finite(largest.load(i)), largest.load(i), 0))
    total = accumulate("sum", x.shape, axes, wide, lambda i: exp(at(i) - m.load(outside(i, axes))))
    result = build.pointwise(total.shape, lambda i: log(total.load(i)) + m.load(i), out)
    return build.unsqueeze(result, axes) if keepdim else result


def p_norm(p: float) -> tuple[str, Callable[[Expr], Expr], Callable[[Expr], Expr]]:
    """The p-norm in three parts: how elements are combined, what is applied to each before, and to the total after."""
    if p == 0:
        return "sum", lambda e: cast(ne(e, 0), e.dtype), lambda e: e
    if p == 1:
        return "sum", abs_, lambda e: e
    if p == 2:
        return "sum", square, sqrt
    if p == math.inf:
        return "max", abs_, lambda e: maximum(e, 0)  # 0 for an empty range
    if p == -math.inf:
        return "min", abs_, lambda e: e
    return "sum", lambda e: pow_(abs_(e), p), lambda e: pow_(e, 1 / p)


def _norm_shape(x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *,
                dtype: DType | None = None) -> torch.Tensor:
    """Normalize negative dimensions: torch 2.11's shape rule mishandles them for dimensions of one element."""
    if dim is not None and x.ndim and all(-x.ndim <= d < x.ndim for d in dim):
        dim = [d % x.ndim for d in dim]
    return reference_norm(x, ord, dim, keepdim, dtype=dtype)


@lower(aten.linalg_vector_norm.default, traced_shape=_norm_shape)
def vector_norm(x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None
                ) -> Value:
    out = dtype or x.dtype
    wide = opmath(out)
    axes = wrap_dims(dim, x.rank)
    n = product(x.shape[a] for a in axes)
    join, each, whole = p_norm(float(ord))
    if ord not in (0, 1) and math.isfinite(ord) and not is_positive(n - 1):  # a single element is not rounded by powers
        single, power, root = eq(index_value(n), 1), each, whole
        each, whole = lambda e: where(single, abs_(e), power(e)), lambda e: where(single, e, root(e))
    total = accumulate(join, x.shape, axes, wide, lambda i: each(cast(cast(x.load(i), out), wide)))
    return finish(total, out, axes, keepdim, whole)
