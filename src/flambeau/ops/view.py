"""Views: each is a change of index and costs nothing. Their scatter and backward forms are beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_bool, opmath
from flambeau.ir.expr import Expr, cast, const, index_value, where
from flambeau.ir.index import (
    ONE,
    ZERO,
    Index,
    IndexLike,
    as_index,
    ceildiv,
    fits,
    is_nonneg,
    maximum,
    minimum,
    offset_of,
    product,
)
from flambeau.ir.lines import overlapping
from flambeau.ir.nodes import Extern, Value, as_indices, contiguous_strides, dim_vars
from flambeau.ir.scalar import eq, sum_over

from .facts import EVERYWHERE, NOWHERE, describe, of_family
from .registry import OutOfRange, lower, to_dtype, wrap_dim

aten = torch.ops.aten
of_family(exact=EVERYWHERE)

Place = tuple[Expr, Sequence[Index]]  # whether a point of the whole is in the part, and its index there


def along(x: Value, dim: int, size: IndexLike, fn: Callable[[Index], IndexLike]) -> Value:
    """x with `size` points along dim, of which point i is point fn(i) of x."""
    n = as_index(size)
    # Nothing is read from an empty array, but its index must still stay within bounds.
    return x.view((*x.shape[:dim], n, *x.shape[dim + 1:]),
                  lambda i: (*i[:dim], i[dim] if n is ZERO else fn(i[dim]), *i[dim + 1:]))


def within(i: IndexLike, lo: IndexLike, hi: IndexLike) -> Expr:
    """lo <= i < hi."""
    return (index_value(i) >= index_value(lo)) & (index_value(i) < index_value(hi))


def equal(i: IndexLike, j: IndexLike) -> Expr:
    return eq(index_value(i), index_value(j))


def is_empty(shape: Sequence[Index]) -> bool:
    return any(n is ZERO for n in shape)


def without(items: Sequence[Any], *dims: int) -> tuple[Any, ...]:
    return tuple(x for k, x in enumerate(items) if k not in dims)


# ---- reshape -----------------------------------------------------------------------------------------


def infer_shape(old: Sequence[Index], size: Sequence[IndexLike]) -> tuple[Index, ...]:
    """The sizes with the one that is -1 computed."""
    new = [as_index(n) for n in size]
    free = [k for k, n in enumerate(new) if n.is_const and n.const == -1]
    if free:
        known, left, rest = without(new, *free), list(old), ONE
        # Cancel equal sizes first: a symbolic size may not be a single monomial, which division requires.
        for n in known:
            if n in left:
                left.remove(n)
            else:
                rest = rest * n
        new[free[0]] = ZERO if is_empty(known) else product(left) // rest
    return tuple(new)


def regroup(index: Sequence[Index], new: Sequence[Index], old: Sequence[Index]) -> list[Index]:
    """Where in shape `old` the point `index` of shape `new` lies, in the row-major order they share.

    Dimensions are matched in the smallest groups of equal product, so that only a group that really merges
    or splits pays for a division.
    """
    out = [ZERO] * len(old)
    if is_empty(old):
        return out
    fine_new = [k for k, n in enumerate(new) if n is not ONE]
    fine_old = [k for k, n in enumerate(old) if n is not ONE]
    cuts = {product(new[k] for k in fine_new[:end]): end for end in range(1, len(fine_new) + 1)}
    # The totals are equal even if sizes such as 4 * (n // 4) and n do not show it.
    cuts[product(old)] = len(fine_new)
    a = b = 0
    for end in range(1, len(fine_old) + 1):
        stop = cuts.get(product(old[k] for k in fine_old[:end]))
        if stop is None:
            continue
        linear = ZERO
        for k in fine_new[b:stop]:
            linear = linear * new[k] + index[k]
        group = fine_old[a:end]
        for position, k in enumerate(group):
            at = linear // product(old[m] for m in group[position + 1:])
            out[k] = at % old[k] if position else at
        a, b = end, stop
    return out


@lower(aten.view.default, aten.view_copy.default, aten._unsafe_view, aten._reshape_copy, aten._reshape_alias,
       aten._reshape_alias_copy, aten.reshape)
def reshape(x: Value, size: Sequence[IndexLike], stride: Any = None) -> Value:
    new = infer_shape(x.shape, size)
    return x if new == x.shape else x.view(new, lambda i: regroup(i, new, x.shape))


def flat(x: Value) -> Value:
    return reshape(x, (x.numel,))


def at_least_1d(x: Value) -> Value:
    return x if x.rank else reshape(x, (1,))


# ---- the same elements -------------------------------------------------------------------------------


describe("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", view=True)  # their schemas do not say so
describe(aten.alias, aten.detach, aten.lift_fresh, aten.lift_fresh_copy, same=True)


@lower(aten.alias, aten.alias_copy, aten.detach, aten.detach_copy, aten.lift, aten.lift_fresh,
       aten.lift_fresh_copy, aten.real)
def alias(x: Value) -> Value:
    return x


@lower(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(x: Value, dtype: DType) -> Any:
    if dtype is x.dtype:
        return x
    if dtype.itemsize != x.dtype.itemsize or is_bool(dtype):
        return NotImplemented  # adjacent elements would merge or split; or bytes other than 0 and 1 would become bools
    if is_bool(x.dtype):
        return to_dtype(x, dtype)
    return build.pointwise(x.shape, lambda i: Expr("bitcast", dtype, (x.load(i),)))


@lower(aten.permute, aten.permute_copy)
def permute(x: Value, dims: Sequence[int]) -> Value:
    order = [wrap_dim(d, x.rank) for d in dims]
    return x.view([x.shape[d] for d in order], lambda i: [i[order.index(d)] for d in range(x.rank)])


@lower(aten.transpose.int, aten.transpose_copy.int)
def transpose(x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.rank))
    if order:
        a, b = wrap_dim(dim0, x.rank), wrap_dim(dim1, x.rank)
        order[a], order[b] = order[b], order[a]
    return permute(x, order)


@lower(aten.t, aten.t_copy)
def t(x: Value) -> Value:
    return transpose(x, 0, 1) if x.rank == 2 else x


@lower(aten.unsqueeze, aten.unsqueeze_copy)
def unsqueeze(x: Value, dim: int) -> Value:
    return build.unsqueeze(x, [wrap_dim(dim, x.rank + 1)])


@lower(aten.squeeze, aten.squeeze_copy)
def squeeze(x: Value, dim: int | Sequence[int] | None = None) -> Value:
    dims = range(x.rank) if dim is None else (dim,) if isinstance(dim, int) else dim
    asked = {wrap_dim(d, x.rank) for d in dims}
    gone = {k for k, n in enumerate(x.shape) if k in asked and n is ONE}
    kept = [k for k in range(x.rank) if k not in gone]
    return x.view([x.shape[k] for k in kept],
                  lambda i: [ZERO if k in gone else i[kept.index(k)] for k in range(x.rank)])


@lower(aten.expand, aten.expand_copy)
def expand(x: Value, size: Sequence[IndexLike], implicit: bool = False) -> Value:
    ahead = len(size) - x.rank
    new = [as_index(n) for n in size]
    for k, n in enumerate(x.shape):
        if new[ahead + k].is_const and new[ahead + k].const == -1:
            new[ahead + k] = n
    return x.view(new, lambda i: [ZERO if n is ONE else i[ahead + k] for k, n in enumerate(x.shape)])


# ---- parts: select, slice, diagonal ------------------------------------------------------------------
#
# A part has two descriptions: a view of the whole, and the Place in it of each point of the whole. The second gives the
# operators that write into the part, *_scatter.


def overwrite(x: Value, part: Value, place: Callable[[Sequence[Index]], Place]) -> Value:
    """x with the elements of the part written into it; `place` maps each point of x to the part."""

    def body(i: tuple[Index, ...]) -> Expr:
        inside, at = place(i)
        return where(inside, cast(part.load(at, inside), x.dtype), x.load(i))

    return build.pointwise(x.shape, body)


def wrap_index(index: IndexLike, size: Index) -> Index:
    """A position counted from the start; whether it counts from the end may only be known at run time."""
    at = as_index(index)
    low, top = at.bounds()
    if low is not None and low >= 0:
        return at
    return at + size if top is not None and top < 0 else at + size * minimum(maximum(-at, 0), 1)


@lower(aten.select.int, aten.select_copy.int)
def select(x: Value, dim: int, index: IndexLike) -> Value:
    d = wrap_dim(dim, x.rank)
    size, given = x.shape[d], as_index(index)
    if size.is_const and given.is_const and not -size.const <= given.const < size.const:
        raise OutOfRange(f"select(): index {given.const} out of range for dimension {d} of size {size.const}")
    at = wrap_index(index, size)
    return x.view(without(x.shape, d), lambda i: (*i[:d], at, *i[d:]))


def _in_select(shape: Sequence[Index], dim: int, index: IndexLike) -> Callable[[Sequence[Index]], Place]:
    d = wrap_dim(dim, len(shape))
    at = wrap_index(index, shape[d])
    return lambda i: (equal(i[d], at), without(i, d))


@lower(aten.select_scatter, copies_storage=True, strides="copied storage")
def select_scatter(x: Value, src: Value, dim: int, index: IndexLike) -> Value:
    return overwrite(x, src, _in_select(x.shape, dim, index))


def slice_range(size: Index, start: IndexLike | None, end: IndexLike | None) -> tuple[Index, Index]:
    """The first position and the end, within the size and not decreasing."""

    def clip(at: IndexLike) -> Index:
        at = as_index(at)
        if at.is_const and at.const > 2**62:
            return size
        return minimum(maximum(wrap_index(at, size), 0), size)

    first = ZERO if start is None else clip(start)
    return first, maximum(size if end is None else clip(end), first)


@lower(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(x: Value, dim: int = 0, start: IndexLike | None = None, end: IndexLike | None = None,
           step: IndexLike = 1) -> Value:
    d = wrap_dim(dim, x.rank)
    first, last = slice_range(x.shape[d], start, end)
    return along(x, d, ceildiv(last - first, step), lambda i: first + i * step)


@lower(aten.narrow_copy)
def narrow(x: Value, dim: int, start: IndexLike, length: IndexLike) -> Value:
    d = wrap_dim(dim, x.rank)
    first = wrap_index(start, x.shape[d])
    return along(x, d, length, lambda i: first + i)


def _in_slice(shape: Sequence[Index], dim: int, start: IndexLike | None, end: IndexLike | None,
              step: IndexLike) -> Callable[[Sequence[Index]], Place]:
    d = wrap_dim(dim, len(shape))
    first, last = slice_range(shape[d], start, end)

    def place(i: Sequence[Index]) -> Place:
        offset = i[d] - first
        return (within(i[d], first, last) & equal(offset % step, 0),
                (*i[:d], offset // step, *i[d + 1:]))

    return place


@lower(aten.slice_scatter, copies_storage=True, strides="copied storage")
def slice_scatter(x: Value, src: Value, dim: int = 0, start: IndexLike | None = None,
                  end: IndexLike | None = None, step: IndexLike = 1) -> Value:
    return overwrite(x, src, _in_slice(x.shape, dim, start, end, step))


@lower(aten.diagonal, aten.diagonal_copy)
def diagonal(x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    a, b = wrap_dim(dim1, x.rank), wrap_dim(dim2, x.rank)
    down, right = max(-offset, 0), max(offset, 0)
    length = maximum(minimum(x.shape[a] - down, x.shape[b] - right), 0)
    kept = [k for k in range(x.rank) if k not in (a, b)]
    moved = {a: down, b: right} if length is not ZERO else {a: 0, b: 0}  # an empty view has no offset
    return x.view((*without(x.shape, a, b), length),
                  lambda i: [i[-1] + moved[k] if k in moved else i[kept.index(k)] for k in range(x.rank)])


def in_diagonal(rank: int, offset: int, dim1: int, dim2: int) -> Callable[[Sequence[Index]], Place]:
    a, b = wrap_dim(dim1, rank), wrap_dim(dim2, rank)
    return lambda i: (equal(i[b] - i[a], offset), (*without(i, a, b), i[a] if offset >= 0 else i[b]))


@lower(aten.diagonal_scatter, copies_storage=True, strides="copied storage")
def diagonal_scatter(x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return overwrite(x, src, in_diagonal(x.rank, offset, dim1, dim2))


# ---- many parts --------------------------------------------------------------------------------------


@lower(aten.split_with_sizes, aten.split_with_sizes_copy, aten.unsafe_split_with_sizes, aten.split.sizes)
def split_with_sizes(x: Value, sizes: Sequence[IndexLike], dim: int = 0) -> list[Value]:
    d = wrap_dim(dim, x.rank)
    parts, start = [], ZERO
    for n in sizes:
        parts.append(narrow(x, d, start, n))
        start = start + n
    return parts


@lower(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(x: Value, size: IndexLike, dim: int = 0) -> Any:
    d = wrap_dim(dim, x.rank)
    whole, part = x.shape[d], as_index(size)
    if whole is ZERO:
        return [x]
    low, high = ceildiv(whole, part).bounds()
    if low is None or low != high:
        return NotImplemented  # the number of parts depends on a run-time size
    return split_with_sizes(x, [part] * (low - 1) + [whole - part * (low - 1)], d)


@lower(aten.unbind.int, aten.unbind_copy.int)
def unbind(x: Value, dim: int = 0) -> Any:
    n = x.shape[wrap_dim(dim, x.rank)]
    return [select(x, dim, k) for k in range(int(n))] if n.is_const else NotImplemented


# ---- windows -----------------------------------------------------------------------------------------


@lower(aten.unfold, aten.unfold_copy)
def unfold(x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of `size` points, `step` apart, along dim; the points of a window are the last dimension."""
    d = wrap_dim(dim, x.rank)
    if x.rank == 0:
        return x.view((size,), lambda i: ())
    count = (x.shape[d] - size) // step + 1
    return x.view((*x.shape[:d], count, *x.shape[d + 1:], size),
                  lambda i: (*i[:d], i[d] * step + i[-1], *i[d + 1:-1]))


@lower(aten.unfold_backward, exact=NOWHERE)
def unfold_backward(grad: Value, sizes: Sequence[IndexLike], dim: int, size: int, step: int) -> Value:
    """Each point sums the gradients of the windows that contain it."""
    d = wrap_dim(dim, len(sizes))
    if not sizes:
        return reshape(grad, ()) if size == 1 else build.pointwise((), lambda i: const(0, grad.dtype))
    dtype = opmath(grad.dtype)
    most = -(-size // step)  # the largest number of windows that contain one point

    def body(i: tuple[Index, ...]) -> Expr:
        def share(k: tuple[Index, ...]) -> Expr:
            w = i[d] // step - (most - 1) + k[0]
            within_it = i[d] - w * step
            sees = within(w, 0, grad.shape[d]) & within(within_it, 0, size)
            seen = grad.load((*i[:d], w, *i[d + 1:], within_it), sees)
            return where(sees, cast(seen, dtype), const(0, dtype))

        return sum_over([(0, most)], dtype, share)

    return build.pointwise(sizes, body, grad.dtype)


# ---- as_strided --------------------------------------------------------------------------------------


def _from_storage(x: Value, size: Sequence[IndexLike], stride: Sequence[IndexLike], offset: IndexLike | None
                  ) -> tuple[Index, ...] | None:
    """The index in the buffer of x for each point of the strided array; None if it cannot be determined.

    The index is computed from a storage position, from the buffer's largest stride to the smallest.
    """
    g = build.graph()
    buffer = g.buffers[x.buffer]
    strides = contiguous_strides(buffer.shape) if buffer.strides is None else buffer.strides
    shape = tuple(as_index(n) for n in size)
    out = [ZERO] * len(buffer.shape)
    if is_empty(shape):
        return tuple(out)
    if offset is None:
        start = offset_of(x.at([0] * x.rank), strides)
    elif x.buffer in g.inputs or any(x.buffer in n.names for n in g.nodes if isinstance(n, Extern)):
        return None  # an offset counts from the storage's start, which is only known at run time
    else:
        start = as_index(offset)
    left = offset_of(as_indices(dim_vars(shape)), stride, start)
    real = [k for k, n in enumerate(buffer.shape) if n is not ONE and strides[k] is not ZERO]
    order: list[int] = []
    for k in real:
        ahead = [m for m, o in enumerate(order) if not is_nonneg(strides[o] - strides[k])]
        order.insert(ahead[0] if ahead else len(order), k)
    for k in order:
        out[k], left = left // strides[k], left % strides[k]
        if not fits(out[k], buffer.shape[k]):
            return None
    return tuple(out) if left is ZERO else None


@lower(aten.as_strided, aten.as_strided_copy, reads_memory=True)
def as_strided(x: Value, size: Sequence[IndexLike], stride: Sequence[IndexLike],
               storage_offset: IndexLike | None = None) -> Any:
    """Read x as memory: its whole buffer, whatever view of it x is."""
    at = _from_storage(x, size, stride, storage_offset)
    return NotImplemented if at is None else Value(x.buffer, tuple(as_index(n) for n in size), x.dtype, at)


@lower(aten.as_strided_scatter, reads_memory=True, copies_storage=True, strides="copied storage")
def as_strided_scatter(x: Value, src: Value, size: Sequence[IndexLike], stride: Sequence[IndexLike],
                       storage_offset: IndexLike | None = None) -> Any:
    if not x.is_whole(build.graph().buffers[x.buffer]):
        return NotImplemented
    at = _from_storage(x, size, stride, storage_offset)
    places = [as_index(n) for n in (*size, *stride)]
    # If two elements share a place, eager's order decides which value remains.
    if at is None or all(n.is_const for n in places) and overlapping(
            [n.const for n in places[:len(size)]], [n.const for n in places[len(size):]]):
        return NotImplemented
    inside = Value(x.buffer, tuple(as_index(n) for n in size), x.dtype, at)
    return build.scatter(x.shape, lambda i: x.load(i), src.shape, inside.at,
                         lambda j: cast(src.load(j), x.dtype))
