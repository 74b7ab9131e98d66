"""Matrix products of all kinds: small ones are loops, others are library calls or kernels of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import accumulator, is_bool, is_float, opmath, promote
from flambeau.ir.expr import Expr, Scalar, cast, index_value, lift
from flambeau.ir.index import Index, Sym, as_index
from flambeau.ir.nodes import Value
from flambeau.ops.registry import load_at, lower, operand

aten = torch.ops.aten


def dot_over(shape: tuple[Index, ...], a: Value, b: Value) -> Value:
    """The dot products over the last dimension of two values that broadcast to `shape`."""
    wide = accumulator(a.dtype)
    total, = build.reduce(shape, [len(shape) - 1], build.simple_combine("sum", wide),
                          lambda i: cast(load_at(a, i), wide) * cast(load_at(b, i), wide))
    return total


@lower(aten.dot, aten.vdot)
def dot(a: Value, b: Value) -> Any:
    if is_bool(a.dtype):
        return NotImplemented
    total = dot_over(a.shape, a, b)
    return build.pointwise((), lambda i: total.load(i), a.dtype)


@lower(aten.mv)
def mv(a: Value, x: Value) -> Any:
    """A matrix times a vector: the matrix is read once, so a library cannot be faster."""
    if is_bool(a.dtype):
        return NotImplemented
    total = dot_over(a.shape, a, x)
    return build.pointwise(total.shape, lambda i: total.load(i), a.dtype)


@lower(aten.addmv)
def addmv(y: Value, a: Value, x: Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if is_bool(a.dtype):
        return NotImplemented
    total = dot_over(a.shape, a, x)
    return combined(y, total.shape, lambda i: total.load(i), beta, alpha)


def combined(c: Value, shape: tuple[Index, ...], product: Any, beta: Any, alpha: Any) -> Value:
    """beta * c + alpha * product; a beta of zero hides even a NaN in c."""

    def body(i: tuple[Index, ...]) -> Expr:
        p = product(i)
        wide = p.dtype
        out = scaled(p, alpha)
        return out if is_zero(beta) else scaled(cast(load_at(c, i), wide), beta) + out

    return build.pointwise(shape, body, c.dtype)


def scaled(x: Expr, by: Any) -> Expr:
    factor: Scalar = index_value(by, x.dtype) if isinstance(by, Index) else by
    return x if isinstance(by, (int, float)) and by == 1 else x * lift(factor, x.dtype)


def is_zero(x: Any) -> bool:
    return isinstance(x, (int, float)) and x == 0


def is_outer(a: Value, b: Value) -> bool:
    """Whether a @ b sums over one element only: each result is then a single product, which fuses."""
    return a.shape[-1] is as_index(1) and is_float(a.dtype) and a.dtype is b.dtype


def outer(a: Value, b: Value, i: tuple[Index, ...]) -> Expr:
    wide, zero = opmath(a.dtype), as_index(0)
    return cast(a.load((*i[:-1], zero)), wide) * cast(b.load((*i[:-2], zero, i[-1])), wide)


def product_of(a: Value, b: Value) -> Any:
    """a @ b as a function of the index, in the accumulator's dtype; NotImplemented if a library should compute it."""
    if is_outer(a, b):
        return lambda i: outer(a, b, i)
    if not build.contracts() or is_bool(a.dtype) or a.dtype is not b.dtype:
        return NotImplemented
    total = build.contract((*a.shape[:-1], b.shape[-1]), a.shape[-1:], lambda i: a.load((*i[:-2], i[-1])),
                           lambda i: b.load((*i[:-3], i[-1], i[-2])), accumulator(a.dtype))
    return lambda i: total.load(i)


@lower(aten.mm.default, aten.bmm.default, library=True, factors=0)
def mm(a: Value, b: Value) -> Any:
    product = product_of(a, b)
    if product is NotImplemented:
        return NotImplemented
    return build.pointwise((*a.shape[:-1], b.shape[-1]), product, a.dtype)


@lower(aten.addmm.default, aten.baddbmm.default, library=True, factors=1)
def addmm(c: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = product_of(a, b) if promote([operand(c), operand(a)]) is c.dtype else NotImplemented
    if product is NotImplemented:
        return NotImplemented
    return combined(c, (*a.shape[:-1], b.shape[-1]), product, beta, alpha)


@lower(aten._int_mm.default, library=True)
def int_mm(a: Value, b: Value) -> Any:
    """Matrix product with an int32 result, whatever the dtype of a and b."""
    product = product_of(a, b)
    if product is NotImplemented:
        return NotImplemented
    return build.pointwise((a.shape[0], b.shape[1]), product, torch.int32)


@lower(aten.addbmm.default, library=True)
def addbmm(c: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * c + alpha * the sum of all a[i] @ b[i]"""
    if not build.contracts() or is_bool(a.dtype) or len({a.dtype, b.dtype, c.dtype}) > 1:
        return NotImplemented
    total = build.contract((a.shape[1], b.shape[2]), (a.shape[0], a.shape[2]), lambda i: a.load((i[2], i[0], i[3])),
                           lambda i: b.load((i[2], i[3], i[1])), accumulator(a.dtype))
    return combined(c, total.shape, lambda i: total.load(i), beta, alpha)


@lower(aten._trilinear.default, library=True)
def trilinear(x: Value, y: Value, z: Value, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int],
              sumdim: Sequence[int], unroll_dim: int = 1) -> Any:
    """The sum over some dimensions of x * y * z, each of which is constant along its own `expand` dimensions."""
    if not build.contracts() or is_bool(x.dtype) or len({x.dtype, y.dtype, z.dtype}) > 1:
        return NotImplemented
    given = (x, expand1), (y, expand2), (z, expand3)
    rank, wide = x.rank + len(expand1), accumulator(x.dtype)
    sizes: dict[int, Index] = {}
    for v, expand in given:
        sizes |= dict(zip((d for d in range(rank) if d not in expand), v.shape, strict=True))
    kept = [d for d in range(rank) if d not in sumdim]
    order = [*kept, *sumdim]

    def at(v: Value, expand: Sequence[int], i: tuple[Index, ...]) -> Expr:
        return cast(v.load([i[order.index(d)] for d in range(rank) if d not in expand]), wide)

    one = as_index(1)
    total = build.contract([sizes.get(d, one) for d in kept], [sizes.get(d, one) for d in sumdim],
                           lambda i: at(*given[0], i) * at(*given[1], i), lambda i: at(*given[2], i), wide)
    return build.pointwise(total.shape, lambda i: total.load(i), x.dtype)


@lower(aten._grouped_mm.default, library=True, needs="ragged", ends=2)
def grouped_mm(a: Value, b: Value, offs: Value | None = None, bias: Value | None = None, out_dtype: Any = None) -> Any:
    """Matrix products for parts of one dimension that end at `offs`. Parts of the rows or columns each have their own
    second matrix; parts of the summed dimension each give their own result."""
    dtype = out_dtype or a.dtype
    if offs is None or bias is not None or not build.contracts() or a.dtype is not b.dtype or dtype is not a.dtype:
        return NotImplemented
    if not offs.shape[0].is_const or any(n is as_index(1) for v in (a, b) for n in v.shape):  # they have no variable
        return NotImplemented
    parts, wide = Sym("part", offs.shape[0]), accumulator(a.dtype)

    def ends(part: Index) -> Expr:
        return offs.load((part,))

    def matrix(v: Value, *i: Index) -> Expr:
        return v.load(i if v.rank == 2 else (parts, *i))

    if a.rank == b.rank == 2:
        total = build.contract((offs.shape[0], a.shape[0], b.shape[1]), a.shape[1:], lambda i: a.load((i[1], i[3])),
                               lambda i: b.load((i[3], i[2])), wide, ragged=(3, 0, ends))
    elif a.rank != b.rank:
        total = build.contract((a.shape[-2], b.shape[-1]), a.shape[-1:], lambda i: matrix(a, i[0], i[2]),
                               lambda i: matrix(b, i[2], i[1]), wide, ragged=(int(a.rank == 3), parts, ends))
    else:
        return NotImplemented
    return build.pointwise(total.shape, total.load, dtype)
