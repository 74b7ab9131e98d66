"""Embeddings and embedding bags: rows of a table by index, reduced over bags, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_int, lowest, opmath
from flambeau.ir.expr import Expr, cast, check, const, index_value, require, where
from flambeau.ir.faults import Fault
from flambeau.ir.index import Index, IndexLike, as_index, product
from flambeau.ir.nodes import Combine, Value, dim_vars, narrow
from flambeau.ir.scalar import eq, maximum, ne
from flambeau.ops.facts import EVERYWHERE
from flambeau.ops.reduction import p_norm
from flambeau.ops.registry import lower, to_dtype

aten = torch.ops.aten

Place = tuple[Index, ...]
SUM, MEAN, MAX = range(3)
SPARSE = 8  # rows per item: from this ratio on, most rows receive no item


def word(indices: Value, i: Place) -> Expr:
    return cast(indices.load(i), torch.int64)


def is_not(w: Expr, padding_idx: IndexLike) -> Expr | None:
    """Whether an index is not the padding, as a condition; None if there is no padding (padding_idx is negative)."""
    if isinstance(padding_idx, int) and padding_idx < 0:
        return None
    return ne(w, index_value(as_index(padding_idx)))


@lower(aten.embedding, exact=EVERYWHERE)
def embedding(weight: Value, indices: Value, padding_idx: IndexLike = -1, scale_grad_by_freq: bool = False,
              sparse: bool = False) -> Any:
    if not is_int(indices.dtype):  # an error that torch's metadata does not raise before 2.13
        return NotImplemented
    r = indices.rank
    return build.pointwise((*indices.shape, *weight.shape[1:]), lambda i: weight.load(
        (check(word(indices, i[:r]), weight.shape[0]), *i[r:])))


def sum_dtype(dtype: DType, target: Place, source: Place) -> DType:
    """The dtype in which rows accumulate items, since many items may go to one row. If items are added in order,
    float64 is as fast as float32, unless accessing the larger buffer takes longer than the sums."""
    wide, rows, items = opmath(dtype), product(target), product(source)
    few = rows.is_const and items.is_const and int(rows) <= SPARSE * int(items)
    caps = build.graph().capabilities
    plain = caps.ordered_scatter and torch.float64 in caps.dtypes and not build.policy().rounds
    return torch.float64 if few and plain and wide is torch.float32 else wide


def counts(indices: Value, size: IndexLike) -> Value:
    """How many times each row is requested."""
    one, zero = const(1, torch.int64), const(0, torch.int64)
    return build.scatter((size,), lambda _: zero, indices.shape,
                         lambda j: (check(word(indices, j), as_index(size)),), lambda _: one, "add")


@lower(aten.embedding_dense_backward, group="embedding gradient")
def embedding_dense_backward(grad: Value, indices: Value, num_weights: IndexLike, padding_idx: IndexLike,
                             scale_grad_by_freq: bool) -> Value:
    r, rows = indices.rank, as_index(num_weights)
    wide = sum_dtype(grad.dtype, (rows, grad.shape[-1]), grad.shape)
    often = counts(indices, rows) if scale_grad_by_freq else None

    def row(j: Place) -> Index:
        w = word(indices, j[:r])
        return check(w, rows, is_not(w, padding_idx))

    def value(j: Place) -> Expr:
        g = cast(grad.load(j), wide)
        return g if often is None else g / cast(often.load((row(j),)), wide)

    out = build.scatter((rows, grad.shape[-1]), lambda _: const(0, wide), grad.shape,
                        lambda j: (row(j), j[-1]), value, "add", not_padding(indices, padding_idx))
    return to_dtype(out, grad.dtype)


def not_padding(indices: Value, padding_idx: IndexLike) -> Callable[[Place], Expr] | None:
    """The mask of a scatter whose points start with a place in `indices`: the index there is not the padding."""
    if isinstance(padding_idx, int) and padding_idx < 0:
        return None
    r = indices.rank
    return lambda j: ne(word(indices, j[:r]), index_value(as_index(padding_idx)))


@lower(aten.embedding_renorm)
def embedding_renorm(weight: Value, indices: Value, max_norm: float, norm_type: float) -> Value:
    """Scale down rows that are requested and whose norm exceeds max_norm."""
    wide = opmath(weight.dtype)
    yes, no = const(True, torch.bool), const(False, torch.bool)
    asked = build.scatter((weight.shape[0],), lambda _: no, indices.shape,
                          lambda j: (check(word(indices, j), weight.shape[0]),), lambda _: yes)

    join, each, whole = p_norm(norm_type)
    total, = build.reduce(weight.shape, [1], build.simple_combine(join, wide),
                          lambda i: each(cast(weight.load(i), wide)))

    def body(i: Place) -> Expr:
        norm = whole(total.load(i[:1]))
        x = cast(weight.load(i), wide)
        return where(asked.load(i[:1]) & (norm > max_norm), x * (max_norm / (norm + 1e-7)), x)

    return build.pointwise(weight.shape, body, weight.dtype)


# ---- bags ----------------------------------------------------------------------------------------------


class Bags:
    """Describes bags: bag b holds the items [offsets[b], offsets[b + 1]); the last one ends at the last item."""

    def __init__(self, indices: Value, offsets: Value, include_last_offset: bool, padding_idx: int) -> None:
        self.indices, self.offsets, self.padding_idx = indices, offsets, padding_idx
        self.items = indices.shape[0]
        self.closed = include_last_offset
        self.count = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]

    def bound(self, b: Index, mask: Expr | None = None) -> Index:
        """Offset b, with ATen's checks: 0 for the first bag, and at most the number of items for the last one."""
        at, last = cast(self.offsets.load((b,), mask), torch.int64), self.offsets.shape[0] - 1
        at = require(at, eq(at, 0) | (index_value(b) > 0), Fault.FIRST_OFFSET)
        at = require(at, (at <= index_value(self.items)) | (index_value(b) < index_value(last)), Fault.LAST_OFFSET)
        return check(at, self.items + 1, mask)

    def first(self, i: Place) -> Expr:
        return index_value(self.bound(i[0]))

    def end(self, i: Place) -> Expr:
        if self.closed:
            end = index_value(self.bound(i[0] + 1))
        else:
            inner = index_value(i[0] + 1) < index_value(self.count)
            end = where(inner, index_value(self.bound(i[0] + 1, inner)), index_value(self.items))
        return require(end, end >= self.first(i), Fault.DECREASING_OFFSETS)

    def counted(self, item: Index) -> Expr:
        w = word(self.indices, (item,))
        wanted = is_not(w, self.padding_idx)
        return const(True, torch.bool) if wanted is None else wanted

    def sizes(self) -> Value:
        """The number of items in each bag, without padding."""
        if self.padding_idx < 0:
            return build.pointwise((self.count,), lambda i: maximum(self.end(i) - self.first(i), 0))
        size, = build.segment((self.count, self.items), 1, self.first, self.end,
                              build.simple_combine("sum", torch.int64),
                              lambda i: cast(self.counted(i[1]), torch.int64))
        return size

    def of_items(self) -> Value:
        """The bag of each item: the number of bags that start at or before it, minus one."""
        started = build.scatter((self.items + 1,), lambda _: const(0, torch.int64), (self.count,),
                                lambda j: (self.bound(j[0]),),
                                lambda _: const(1, torch.int64), "add")
        return build.scan((self.items,), 0, build.simple_combine("sum", torch.int64),
                          lambda i: started.load(i) - cast(eq(index_value(i[0]), 0), torch.int64))[0]


def best_of_bag(dtype: DType, row: DType) -> Combine:
    """The first maximum as (value, row), where a negative row means no item. A NaN only wins as the first item."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        take = (b[1] >= 0) & ((a[1] < 0) | (b[0] > a[0]))
        return where(take, b[0], a[0]), where(take, b[1], a[1])

    return build.make_combine("best_of_bag", (dtype, row), (lowest(dtype), -1), fn)


def adjacent(v: Value, dim: int) -> bool:
    """Whether elements along `dim` are adjacent in memory (true if the layout is still ours to choose)."""
    strides = build.graph().buffers[v.buffer].strides
    if strides is None:
        return True
    offset = as_index(0)
    for s, at in zip(strides, v.index, strict=True):
        offset = offset + s * at
    return v.shape[dim] is as_index(1) or offset.coefficient(dim_vars(v.shape)[dim]) is as_index(1)


@lower(aten._embedding_bag, group="embedding bags")
def embedding_bag(weight: Value, indices: Value, offsets: Value, scale_grad_by_freq: bool = False,
                  mode: int = SUM, sparse: bool = False, per_sample_weights: Value | None = None,
                  include_last_offset: bool = False, padding_idx: int = -1) -> tuple[Value, ...]:
    """(output, bag of each item, size of each bag, row of each maximum)"""
    bags = Bags(indices, offsets, include_last_offset, padding_idx)
    on_cpu = build.graph().on_cpu
    wide, whole = opmath(weight.dtype), offsets.dtype if on_cpu else indices.dtype
    nothing = build.pointwise((0,), lambda _: const(0, whole))
    domain = (bags.count, bags.items, weight.shape[1])

    def item(i: Place) -> Expr:
        row = check(word(indices, i[1:2]), weight.shape[0], fault=Fault.BAG)
        w = cast(weight.load((row, i[2])), wide)
        return w if per_sample_weights is None else w * cast(per_sample_weights.load(i[1:2]), wide)

    if mode == MAX:
        row = narrow(weight.shape[0])
        values, rows = build.segment(
            domain, 1, bags.first, bags.end, best_of_bag(wide, row),
            lambda i: (item(i), cast(where(bags.counted(i[1]), word(indices, i[1:2]), -1), row)))
        output = build.pointwise(
            values.shape, lambda i: where(rows.load(i) < 0, 0, values.load(i)), weight.dtype)
        best = build.pointwise(rows.shape, lambda i: maximum(rows.load(i), 0), whole)
        return output, to_dtype(bags.of_items(), whole), lengthened(to_dtype(bags.sizes(), whole), offsets), best

    total, = build.segment(domain, 1, bags.first, bags.end, build.simple_combine("sum", wide),
                           lambda i: where(bags.counted(i[1]), item(i), 0))
    if mode == MEAN:
        count = bags.sizes()
        output = build.pointwise(total.shape, lambda i: total.load(i) / cast(
            maximum(count.load(i[:1]), 1), wide), weight.dtype)
        sizes = lengthened(to_dtype(count, whole), offsets)
        return output, to_dtype(bags.of_items(), whole), sizes, sizes if on_cpu else nothing

    zeros = lengthened(build.pointwise((bags.count,), lambda _: const(0, whole)), offsets)
    if not on_cpu:
        return to_dtype(total, weight.dtype), to_dtype(bags.of_items(), whole), zeros, nothing
    # ATen has a faster kernel for sums without padding, which does not return the bags of the items.
    fast = (weight.dtype in (torch.float32, torch.float16) and padding_idx < 0 and adjacent(weight, 1)
            and (per_sample_weights is None or adjacent(per_sample_weights, 0)))
    owners = nothing if fast else to_dtype(bags.of_items(), whole)
    return to_dtype(total, weight.dtype), owners, zeros, zeros


def lengthened(sizes: Value, offsets: Value, always: bool = False) -> Value:
    """Pad the sizes to the length of the offsets, which may be one more than the bags; not on CPUs, unless `always`."""
    if sizes.shape[0] is offsets.shape[0] or build.graph().on_cpu and not always:
        return sizes
    inside = sizes.shape[0]

    def padded(i: Place) -> Expr:
        real = index_value(i[0]) < index_value(inside)
        return where(real, sizes.load(i, real), 0)

    return build.pointwise(offsets.shape, padded)


@lower(aten._embedding_bag_forward_only, group="embedding bags")
def embedding_bag_forward_only(weight: Value, indices: Value, offsets: Value, *args: Any, **kwargs: Any
                               ) -> tuple[Value, ...]:
    """As `embedding_bag`, with sizes as long as the offsets, even if those are one more than the bags."""
    output, owners, sizes, best = embedding_bag(weight, indices, offsets, *args, **kwargs)
    return output, owners, lengthened(sizes, offsets, always=True), best


@lower(aten._embedding_bag_dense_backward, group="embedding bag gradients")
def dense_gradient(grad: Value, indices: Value, owners: Value, bag_size: Value, max_indices: Value,
                   num_weights: IndexLike, scale_grad_by_freq: bool, mode: int,
                   per_sample_weights: Value | None, padding_idx: int = -1) -> Value:
    rows = as_index(num_weights)
    shape, places = (rows, grad.shape[1]), (indices.shape[0], grad.shape[1])
    wide = sum_dtype(grad.dtype, shape, grad.shape if mode == MAX else places)
    if mode == MAX:
        out = build.scatter(shape, lambda _: const(0, wide), grad.shape,
                            lambda j: (check(word(max_indices, j), rows), j[1]),
                            lambda j: cast(grad.load(j), wide), "add", lambda j: ne(bag_size.load(j[:1]), 0))
        return to_dtype(out, grad.dtype)
    often = counts(indices, rows) if scale_grad_by_freq else None

    def row(j: Place) -> Index:
        return check(word(indices, j[:1]), rows)

    def value(j: Place) -> Expr:
        bag = check(word(owners, j[:1]), grad.shape[0])
        g = cast(grad.load((bag, j[1])), wide)
        if per_sample_weights is not None:
            g = g * cast(per_sample_weights.load(j[:1]), wide)
        if often is not None:
            g = g / cast(often.load((row(j),)), wide)
        if mode == MEAN:
            g = g / cast(maximum(cast(bag_size.load((bag,)), torch.int64), 1), wide)
        return g

    out = build.scatter(shape, lambda _: const(0, wide), places,
                        lambda j: (row(j), j[1]), value, "add", not_padding(indices, padding_idx))
    return to_dtype(out, grad.dtype)


def owners_of(indices: Value, offsets: Value, offset2bag: Value) -> Value:
    """The bags of the items, recomputed if the forward left them out."""
    kept = not (offset2bag.shape[0].is_const and int(offset2bag.shape[0]) == 0)
    return offset2bag if kept else Bags(indices, offsets, False, -1).of_items()


@lower(aten._embedding_bag_backward)
def embedding_bag_backward(grad: Value, indices: Value, offsets: Value, offset2bag: Value, bag_size: Value,
                           max_indices: Value, num_weights: IndexLike, scale_grad_by_freq: bool, mode: int,
                           sparse: bool, per_sample_weights: Value | None, padding_idx: int = -1) -> Any:
    if sparse:
        return NotImplemented
    return dense_gradient(grad, indices, owners_of(indices, offsets, offset2bag), bag_size, max_indices,
                          num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)


@lower(aten._embedding_bag_per_sample_weights_backward, group="embedding bag gradients")
def embedding_bag_per_sample_weights_backward(grad: Value, weight: Value, indices: Value, offsets: Value,
                                              offset2bag: Value, mode: int, padding_idx: int = -1) -> Value:
    """The gradient of each item's weight: its row of the table times the gradient of its bag."""
    owners, wide = owners_of(indices, offsets, offset2bag), opmath(grad.dtype)

    def weighted(i: Place) -> Expr:
        w = word(indices, i[:1])
        wanted = is_not(w, padding_idx)
        g = cast(grad.load((check(word(owners, i[:1]), grad.shape[0]), i[1])), wide)
        p = g * cast(weight.load((check(w, weight.shape[0], wanted), i[1]), wanted), wide)
        return p if wanted is None else where(wanted, p, 0)

    total, = build.reduce((indices.shape[0], grad.shape[1]), [1], build.simple_combine("sum", wide), weighted)
    return to_dtype(total, grad.dtype)
