"""Sorts, selection by order (topk, kthvalue, medians, mode), and searches in sorted data.

If a machine has no sort of its own (`Capabilities.sorts`), sorts are composed of other nodes: ir/sort.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.build import arg_combine, simple_combine
from flambeau.ir.dtypes import is_bool, is_float, promote
from flambeau.ir.expr import Expr, binary, cast, computed, const, index_value, where
from flambeau.ir.faults import Fault
from flambeau.ir.index import ONE, Index, IndexLike, as_index
from flambeau.ir.nodes import Value, narrow
from flambeau.ir.scalar import fold_over, isnan, maximum, ne
from flambeau.ir.sort import LONGEST, sort
from flambeau.ops.facts import EVERYWHERE, NOWHERE, of_family
from flambeau.ops.indexing import position
from flambeau.ops.registry import lower, operand, scalar_at, wrap_dim
from flambeau.ops.view import at_least_1d, flat, reshape

aten = torch.ops.aten
# Exceptions are marked: there, eager's algorithm decides which of several equal elements it finds.
of_family(exact=EVERYWHERE)
Lowering = Callable[..., Any]


def sorting(*ops: Any, **facts: Any) -> Callable[[Lowering], Lowering]:
    """`@lower` for functions of a tensor, an axis and more arguments, if sorts are kernels. Scalars are rows of one."""

    def register(fn: Lowering) -> Lowering:
        @lower(*ops, needs="sorts", **facts)
        @wraps(fn)
        def lowered(x: Value, *args: Any, **kwargs: Any) -> Any:
            high = max((n.bounds()[1] or 0 for n in x.shape), default=1)
            return NotImplemented if high > LONGEST else fn(x, *args, **kwargs)

        return lowered

    return register


def row_of(x: Value, dim: int) -> tuple[Value, int, Index]:
    """x with at least one dimension; the axis, and its length."""
    x, axis = at_least_1d(x), wrap_dim(dim, x.rank)
    return x, axis, x.shape[axis]


def is_something(n: Index) -> bool:
    """Whether a row has at least one element for certain."""
    return (n.bounds()[0] or 0) > 0


def reshaped(values: Value, order: Value, shape: Any) -> tuple[Value, Value]:
    return reshape(values, shape), reshape(order, shape)


@sorting(aten.sort.default, exact=NOWHERE, strides="preserved")
def sort_default(x: Value, dim: int = -1, descending: bool = False) -> Any:
    return sort_stable(x, dim=dim, descending=descending)


@sorting(aten.sort.stable, strides="preserved")
def sort_stable(x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    row, axis, _ = row_of(x, dim)
    return reshaped(*sort(row, axis, descending), x.shape)


@sorting(aten.argsort.stable)
def argsort(x: Value, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    return sort_stable(x, dim=dim, descending=descending)[1]


@sorting(aten.topk.default, exact=NOWHERE)
def topk(x: Value, k: IndexLike, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k largest or smallest; on ties the first ones, and always sorted."""
    if is_bool(x.dtype):
        return NotImplemented
    row, axis, _ = row_of(x, dim)
    count = as_index(k if x.rank else 1)
    values, order = sort(row, axis, largest, count)
    return reshaped(values, order, x.shape if not x.rank else values.shape)


# ---- one of a row ----------------------------------------------------------------------------------------


def chosen(x: Value, dim: int, keepdim: bool, place: Callable[[Value, int, tuple[Index, ...]], Expr]) -> Any:
    """In each sorted row, the element at place(sorted, axis, point of the result, with zero along the axis)."""
    row, axis, n = row_of(x, dim)
    if not is_something(n):
        return NotImplemented
    values, order = sort(row, axis)
    shape = (*row.shape[:axis], ONE, *row.shape[axis + 1:])
    high = n.bounds()[1]

    def taken(v: Value) -> Value:
        return build.pointwise(shape, lambda i: v.load((*i[:axis], computed(
            place(values, axis, i), 0, None if high is None else high - 1), *i[axis + 1:])))

    kept = () if not x.rank else shape if keepdim else (*shape[:axis], *shape[axis + 1:])
    return reshape(taken(values), kept), reshape(taken(order), kept)


@sorting(aten.kthvalue.default, exact=NOWHERE)
def kthvalue(x: Value, k: IndexLike, dim: int = -1, keepdim: bool = False) -> Any:
    k, n = as_index(k), row_of(x, dim)[2]
    first, left = k.bounds()[0], (n - k).bounds()[0]
    inside = first is not None and left is not None and first > 0 and left >= 0 or n is k
    return NotImplemented if is_bool(x.dtype) or not inside else chosen(
        x, dim, keepdim, lambda values, axis, i: index_value(k - 1))


def middle(ignores_nan: bool) -> Callable[[Value, int, tuple[Index, ...]], Expr]:
    """The place of the lower median. NaNs sort last: the first of them is the median, unless they are ignored."""

    def place(values: Value, axis: int, i: tuple[Index, ...]) -> Expr:
        n = values.shape[axis]
        if not is_float(values.dtype):
            return index_value((n - 1) // 2)
        numbers, = build.reduce(values.shape, (axis,), simple_combine("sum", torch.int64), lambda j: cast(
            ~isnan(values.load(j)), torch.int64), keepdim=True)
        count = numbers.load(i)
        if ignores_nan:
            return binary("shr", maximum(count - 1, 0), 1)
        return where(count < index_value(n), count, index_value((n - 1) // 2))

    return place


def median_along(ignores_nan: bool) -> Lowering:
    def median(x: Value, dim: int, keepdim: bool = False) -> Any:
        return NotImplemented if is_bool(x.dtype) else chosen(x, dim, keepdim, middle(ignores_nan))

    return median


def median_of_all(ignores_nan: bool) -> Lowering:
    def median(x: Value) -> Any:
        found = median_along(ignores_nan)(flat(x), 0)
        return NotImplemented if found is NotImplemented else found[0]

    return median


for _ignores, _op in ((False, aten.median), (True, aten.nanmedian)):
    sorting(_op.dim, exact=NOWHERE)(median_along(_ignores))
    sorting(_op.default, exact=NOWHERE)(median_of_all(_ignores))


@sorting(aten.mode.default, exact=NOWHERE)
def mode(x: Value, dim: int = -1, keepdim: bool = False) -> Any:
    """The smallest of the most frequent values, and the index of its last occurrence. A NaN equals nothing."""

    def place(values: Value, axis: int, i: tuple[Index, ...]) -> Expr:
        kind = narrow(values.shape[axis])

        def begins(j: tuple[Index, ...]) -> Expr:
            inner = index_value(j[axis]) > 0
            before = values.load((*j[:axis], j[axis] - 1, *j[axis + 1:]), inner)
            return where(~inner | ne(values.load(j), before), index_value(j[axis], kind), 0)

        start, = build.scan(values.shape, axis, simple_combine("max", kind), begins)
        _, at = build.reduce(values.shape, (axis,), arg_combine("max", kind), lambda j: (
            index_value(j[axis], kind) - start.load(j), index_value(j[axis])), keepdim=True)
        return at.load(i)

    return chosen(x, dim, keepdim, place)


# ---- searches --------------------------------------------------------------------------------------------


@lower(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(row: Value, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
                 sorter: Value | None = None) -> Any:
    """The number of elements of a sorted row that come before x: those less than x, or not greater (`right`)."""
    n, shape = row.shape[-1], x.shape if isinstance(x, Value) else ()
    dtype, place = promote((operand(row), operand(x))), narrow(row.shape[-1] + 1)
    if is_bool(dtype):
        return NotImplemented
    after = right if side is None else side == "right"
    high = n.bounds()[1]

    def body(i: tuple[Index, ...]) -> Expr:
        value = scalar_at(x, i, dtype, dtype)
        outer = i[:-1] if row.rank > 1 else ()

        def step(_: tuple[Index, ...], ends: tuple[Expr, ...]) -> tuple[Expr, Expr]:
            start, end = ends
            more = start < end
            mid = start + binary("shr", end - start, 1)
            at = computed(mid, 0, None if high is None else max(high - 1, 0))
            if sorter is not None:
                at = position(sorter.load((*outer, at), more), n, Fault.SORTER, mask=more)
            found = cast(row.load((*outer, at), more), dtype)
            passed = more & ~(found > value if after else found >= value)
            return where(passed, mid + 1, start), where(more & ~passed, mid, end)

        steps = 48 if high is None else high.bit_length()
        return fold_over([(0, steps)], (const(0, place), index_value(n, place)), step)[0]

    return build.pointwise(shape, body, torch.int32 if out_int32 else torch.int64)


@lower(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(x: Any, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Any:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)
