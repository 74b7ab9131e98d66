"""Pooling over windows. Gradients are gathers: a position visits the windows that contain it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, accumulator, highest, is_float, lowest, opmath
from flambeau.ir.expr import Expr, cast, check, computed, const, index_value, where
from flambeau.ir.faults import Fault
from flambeau.ir.index import Index, IndexLike, about, as_index, ceildiv, maximum, minimum, product, unflat
from flambeau.ir.nodes import Value, narrow
from flambeau.ir.scalar import clamp, eq, fold_over, isnan, round_to, sum_over
from flambeau.ops.facts import EVERYWHERE, NOWHERE, describe
from flambeau.ops.plane import Bounds, Place, all_of, flat, nearest, padded, split, together, within
from flambeau.ops.registry import lower, to_dtype
from flambeau.ops.separable import (
    Ends,
    along_shares,
    are_long,
    few_taps,
    share_length,
    share_lengths,
    share_of,
    tabled,
    tabled_span,
)

aten = torch.ops.aten


def per_axis(given: Sequence[int] | int, rank: int, default: Sequence[int] = ()) -> list[int]:
    """One number for all spatial dimensions, one for each, or none (the default)."""
    numbers = [given] if isinstance(given, int) else list(given) or list(default)
    return numbers * rank if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class Axis:
    """One spatial dimension of a pooling: window o covers o*stride - padding + w*dilation, w < kernel."""

    size: Index
    kernel: int
    stride: int
    padding: int
    dilation: int
    out: Index

    def place(self, o: Index, w: IndexLike) -> Index:
        return o * self.stride - self.padding + as_index(w) * self.dilation

    def nearest(self, o: Index, w: IndexLike) -> Index:
        """The place, or for padding the nearest place inside, which belongs to the same window (without dilation)."""
        return nearest(self.place(o, w), self.size)

    def first(self, o: Index) -> Index:
        """The first place of window o that is not padding."""
        start = self.place(o, 0)
        return maximum(start, start % self.dilation)

    @property
    def span(self) -> int:
        """The number of positions that a window spans, including gaps from dilation."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def candidates(self) -> int:
        """The maximal number of windows that contain one position."""
        return -(-self.span // self.stride)

    def candidate(self, x: Index, j: Index) -> Index:
        """The j-th window that may contain position x, in ascending order; it may lie outside [0, out)."""
        return (x + self.padding) // self.stride - (self.candidates - 1) + j

    def holds(self, o: Index, x: Index) -> Expr:
        """Whether window o, which starts at or before x, reaches x."""
        return index_value(x - self.place(o, 0)) < self.span

    def count(self, o: Index, with_padding: bool) -> Index:
        """ATen's divisor in this dimension: padding counts if `with_padding`, positions beyond the padding never do."""
        start = self.place(o, 0)
        end = minimum(start + self.kernel, self.size + self.padding)
        return end - start if with_padding else minimum(end, self.size) - maximum(start, 0)


def geometry(x: Value, rank: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
             ceil_mode: bool) -> list[Axis]:
    kernels = per_axis(kernel_size, rank)
    axes = []
    for n, k, s, p, d in zip(x.shape[-rank:], kernels, per_axis(stride, rank, kernels),
                             per_axis(padding, rank), per_axis(dilation, rank), strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        # With ceil_mode the last window must still start inside the input or its left padding.
        out = minimum(ceildiv(span, s) + 1, ceildiv(n + p, s)) if ceil_mode else span // s + 1
        axes.append(Axis(n, k, s, p, d, out))
    return axes


# ---- maximum -----------------------------------------------------------------------------------------


def greatest(x: Value, lead: Place, bounds: Bounds, place: Callable[[Place], Place], first: Place,
             padded: bool = False) -> tuple[Expr, Expr]:
    """The maximum over a window and its flat position: the first maximum, or the last NaN if there is one.

    padded: some places may lie outside the input."""
    sizes = x.shape[len(lead):]
    position = narrow(product(sizes))
    dtype = opmath(x.dtype)
    least = const(lowest(dtype), dtype)

    def step(w: Place, carry: tuple[Expr, ...]) -> tuple[Expr, Expr]:
        best, at = carry
        p = place(w)
        inside = all_of([within(i, n) for i, n in zip(p, sizes, strict=True) if padded])
        value = where(inside, cast(x.load((*lead, *p), inside), dtype), least)
        better = value > best
        take = better | isnan(value) if is_float(dtype) else better
        return where(take, value, best), where(take, index_value(flat(p, sizes), position), at)

    best, at = fold_over(bounds, (least, index_value(flat(first, sizes), position)), step)
    return best, cast(at, torch.int64)


def max_gradient(grad: Value, x: Value, indices: Value, rank: int, asked: float,
                 bounds: Callable[[Place], Bounds],
                 window: Callable[[Place, Place], Place] = lambda _, w: w,
                 holds: Callable[[Place, Place], Expr] | None = None) -> Value:
    """The gradient of a maximum: each position adds the gradients of those candidate windows whose saved index is its
    own. If too many positions would check each window, windows add their gradients to zeros instead.

    asked: about how many positions check each window. holds: whether a window can contain a position at all."""
    caps = build.graph().capabilities
    atomics = not caps.deterministic and caps.swaps("add", x.dtype) and asked > caps.tuning.asked
    if caps.ordered_scatter or atomics:
        return put_back(to_dtype(grad, x.dtype), indices, x.shape[:-rank], x.shape[-rank:], "add")
    dtype = opmath(x.dtype)

    def body(i: Place) -> Expr:
        lead, here = split(i, rank)
        position = narrow(product(x.shape[-rank:]))
        own = index_value(flat(here, x.shape[-rank:]), position)

        def share(w: Place) -> Expr:
            o = window(here, w)
            there = all_of([within(k, n) for k, n in zip(o, grad.shape[-rank:], strict=True)])
            there = there if holds is None else there & holds(o, here)
            at = where(there, cast(indices.load((*lead, *o), there), torch.int64), -1)  # -1 matches no position
            mine = eq(cast(at, position), own)
            return where(mine, cast(grad.load((*lead, *o), there), dtype), 0)

        return sum_over(bounds(here), dtype, share)

    return build.pointwise(x.shape, body, x.dtype)


def max_pool(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
                ceil_mode: bool = False) -> tuple[Value, ...]:
        axes = geometry(x, rank, kernel_size, stride, padding, dilation, ceil_mode)

        def body(i: Place) -> tuple[Expr, Expr]:
            lead, o = split(i, rank)
            # Out-of-range places read the nearest element inside: that changes no maximum, and needs no mask.
            dilated = any(a.dilation > 1 for a in axes)
            place = Axis.place if dilated else Axis.nearest
            return greatest(x, lead, [(0, a.kernel) for a in axes],
                            lambda w: tuple(place(a, k, j) for a, k, j in zip(axes, o, w, strict=True)),
                            tuple(a.first(k) for a, k in zip(axes, o, strict=True)), dilated)

        return together((*x.shape[:-rank], *(a.out for a in axes)), body, (x.dtype, torch.int64))

    def backward(grad: Value, x: Value, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
                 ceil_mode: bool, indices: Value) -> Value:
        axes = geometry(x, rank, kernel_size, stride, padding, dilation, ceil_mode)
        return max_gradient(
            grad, x, indices, rank, math.prod(a.span for a in axes), lambda _: [(0, a.candidates) for a in axes],
            lambda here, w: tuple(a.candidate(k, j) for a, k, j in zip(axes, here, w, strict=True)),
            lambda o, here: all_of([a.holds(k, h) for a, k, h in zip(axes, o, here, strict=True)]))

    return forward, backward


# ---- mean --------------------------------------------------------------------------------------------


def divisor(axes: Sequence[Axis], o: Place, with_padding: bool, override: int | None, dtype: DType) -> Expr:
    if override is not None:
        return const(override, dtype)
    return index_value(product(a.count(k, with_padding) for a, k in zip(axes, o, strict=True)), dtype)


def avg_pool(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
                count_include_pad: bool = True, divisor_override: int | None = None) -> Value:
        axes = geometry(x, rank, kernel_size, stride, padding, 1, ceil_mode)
        dtype = accumulator(x.dtype)

        def body(i: Place) -> Expr:
            lead, o = split(i, rank)

            def element(w: Place) -> Expr:
                p = tuple(a.place(k, j) for a, k, j in zip(axes, o, w, strict=True))
                inside = all_of([within(k, a.size) for a, k in zip(axes, p, strict=True)])
                near = tuple(nearest(k, a.size) for a, k in zip(axes, p, strict=True))
                return where(inside, cast(x.load((*lead, *near)), dtype), 0)

            total = sum_over([(0, a.kernel) for a in axes], dtype, element)
            # Integers are divided rounding towards zero, as in C.
            return total / divisor(axes, o, count_include_pad, divisor_override, dtype)

        return build.pointwise((*x.shape[:-rank], *(a.out for a in axes)), body, x.dtype)

    def backward(grad: Value, x: Value, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
                 count_include_pad: bool, divisor_override: int | None = None) -> Value:
        axes = geometry(x, rank, kernel_size, stride, padding, 1, ceil_mode)
        dtype = opmath(x.dtype)
        firsts = [tabled(a.size, a.out, lambda x, a=a: a.candidate(x, as_index(0))) for a in axes]  # type: ignore[misc]
        # Each window divides its gradient once, not once per position.
        shares_ = build.pointwise(grad.shape, lambda i: cast(grad.load(i), dtype) / divisor(
            axes, split(i, rank)[1], count_include_pad, divisor_override, dtype))

        def body(i: Place) -> Expr:
            lead, here = split(i, rank)

            def share(w: Place) -> Expr:
                o = tuple(first(k) + j for first, k, j in zip(firsts, here, w, strict=True))
                mine = all_of([within(k, a.out) & a.holds(k, h)
                               for a, k, h in zip(axes, o, here, strict=True)])
                return padded(shares_.load, lead, o, grad.shape[-rank:], mine)

            return sum_over([(0, a.candidates) for a in axes], dtype, share)

        return build.pointwise(x.shape, body, x.dtype)

    return forward, backward


lower(aten.avg_pool1d)(avg_pool(1)[0])


# ---- adaptive: window o of m covers [o*n/m, (o+1)*n/m), ends rounded outwards -------------------------


def sum_all(x: Value, sizes: Sequence[Index]) -> Value:
    """Sum over the shares of the last dimensions, one dimension after another.

    The last dimension is the one not read in order, so it is summed when the data is smallest."""
    dims = [(dim, size) for dim, size in enumerate(sizes, x.rank - len(sizes)) if size is not x.shape[dim]]
    grows = any(x.shape[dim].is_const and size.is_const and int(x.shape[dim]) < int(size) for dim, size in dims)
    combine = build.simple_combine("sum", opmath(x.dtype))
    kept, shape = not few_taps([(x.shape[dim], size) for dim, size in dims]), list(x.shape)
    read: Callable[[Place], Sequence[Expr]] = lambda i: [x.load(i)]  # noqa: E731
    for dim, size in reversed(dims) if grows else dims:
        read = along_shares(shape, dim, size, read, combine, kept)
        shape[dim] = size
    return build.pointwise(shape, lambda i: read(i)[0])


def adaptive_avg_pool(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Sum along one dimension after another; each output is then divided once per dimension, as in ATen."""

    def divided(x: Value, n: Sequence[Index], m: Sequence[Index], dtype: DType) -> Value:
        lengths = [share_length(size, parts, opmath(dtype)) for size, parts in zip(n, m, strict=True)]

        def body(i: Place) -> Expr:
            out = cast(x.load(i), opmath(dtype))
            for o, length in zip(i[-rank:], lengths, strict=True):
                out = out / length(o)
            return out

        return build.pointwise(x.shape, body)

    def forward(x: Value, output_size: Sequence[IndexLike]) -> Value:
        m = [as_index(s) for s in output_size]
        return to_dtype(divided(sum_all(x, m), x.shape[-rank:], m, x.dtype), x.dtype)

    def backward(grad: Value, x: Value) -> Value:
        n, m = x.shape[-rank:], grad.shape[-rank:]
        return to_dtype(sum_all(divided(grad, n, m, grad.dtype), n), x.dtype)

    return forward, backward


def next_greater(a: Sequence[Expr], b: Sequence[Expr]) -> tuple[Expr, ...]:
    """Combine a value and a later one, with their positions: the greater, the first of equal ones, the last NaN."""
    (v, at), (w, there) = a, b
    take = (w > v) | isnan(w) if is_float(v.dtype) else w > v
    return where(take, w, v), where(take, there, at)


def first_or_greater(a: Sequence[Expr], b: Sequence[Expr]) -> tuple[Expr, ...]:
    """As `next_greater`, where a may be the identity: its position is after all others, and a value may equal it."""
    (v, at), (w, there) = a, b
    take = (w > v) | (there < at)
    take = take | isnan(w) if is_float(v.dtype) else take
    return where(take, w, v), where(take, there, at)


def greater(a: Sequence[Expr], b: Sequence[Expr]) -> tuple[Expr, ...]:
    """As `next_greater`, for two values in any order with marked positions. Every comparison with a NaN counts as
    equal, and the mark of a NaN comes before all positions."""
    (v, at), (w, there) = a, b
    take = (w > v) | (~(w < v) & (there < at))
    return where(take, w, v), where(take, there, at)


def marked(value: Expr, at: Expr) -> Expr:
    """The position, or for a NaN a negative number that decreases with the position."""
    return where(isnan(value), -1 - at, at) if is_float(value.dtype) else at


def unmarked(at: Expr) -> Expr:
    return where(at < 0, -1 - at, at)


def adaptive_max_pool(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x: Value, output_size: Sequence[IndexLike]) -> tuple[Value, ...]:
        """Process one dimension after another; a position so far covers the dimensions that are done."""
        n, dtype = x.shape[-rank:], opmath(x.dtype)
        sizes = [as_index(m) for m in output_size]
        kept = not few_taps([(source, size) for source, size in zip(n, sizes, strict=True) if size is not source])
        position, shape = narrow(product(n)), list(x.shape)
        value: Callable[[Place], Expr] = lambda i: cast(x.load(i), dtype)  # noqa: E731
        place: Callable[[Place], Expr] = lambda i: const(0, position)  # noqa: E731
        ordered = True  # positions so far cover only one dimension, so they increase along it
        for dim, (size, source) in enumerate(zip(sizes, n, strict=True), x.rank - rank):

            def at(i: Place, before: Callable[[Place], Expr] = place, dim: int = dim) -> Expr:
                return before(i) * index_value(x.shape[dim], position) + index_value(i[dim], position)

            place = at
            if size is not source:
                quick = ordered and not are_long(source, size)
                known = source.is_const and size.is_const  # without the identity: a share starts with its first element
                combine = build.make_combine("greatest", (dtype, position), (lowest(dtype), highest(position)),
                                             greater if not quick else next_greater if known else first_or_greater)

                def read(i: Place, value: Callable[[Place], Expr] = value, at: Callable[[Place], Expr] = at,
                         quick: bool = quick) -> tuple[Expr, Expr]:
                    return value(i), at(i) if quick else marked(value(i), at(i))

                found = along_shares(tuple(shape), dim, size, read, combine, kept)
                shape[dim] = size
                ordered = False

                def value(i: Place, found: Callable[[Place], Sequence[Expr]] = found) -> Expr:
                    return found(i)[0]

                def place(i: Place, found: Callable[[Place], Sequence[Expr]] = found) -> Expr:
                    return unmarked(found(i)[1])
        return together(shape, lambda i: (value(i), place(i)), (x.dtype, torch.int64))

    def backward(grad: Value, x: Value, indices: Value) -> Any:
        if not (grad.rank == x.rank == indices.rank) or not build.graph().agree(grad.shape, indices.shape):
            return NotImplemented  # eager raises the error
        pairs = list(zip(grad.shape[-rank:], x.shape[-rank:], strict=True))
        counts = [share_lengths(m, n)[1] for m, n in pairs]
        known = [m.is_const and n.is_const for m, n in pairs]

        def span_of(m: Index, n: Index) -> Ends:
            return lambda k: share_of(k, m, n)

        spans = [span_of(m, n) if k else tabled_span(n, m, span_of(m, n)) for (m, n), k in zip(pairs, known)]

        def windows(here: Place) -> Bounds:
            """Constant bounds if sizes are known: a window too far away cannot have saved the position."""
            bounds = [span(k) for span, k in zip(spans, here, strict=True)]
            return [(lo, lo + c if k else hi) for (lo, hi), c, k in zip(bounds, counts, known, strict=True)]

        inputs, outputs = (about(product(v.shape), build.graph().typical, 0) for v in (x, grad))
        return max_gradient(grad, x, indices, rank, math.prod(counts) * inputs / max(outputs, 1), windows)

    return forward, backward


for _group, _exact, _pool, _name in (
        ("max pooling", EVERYWHERE, max_pool(2), "max_pool2d_with_indices"),
        ("max pooling", EVERYWHERE, max_pool(3), "max_pool3d_with_indices"),
        ("average pooling", NOWHERE, avg_pool(2), "avg_pool2d"),
        ("average pooling", NOWHERE, avg_pool(3), "avg_pool3d"),
        ("adaptive pooling", NOWHERE, adaptive_avg_pool(2), "_adaptive_avg_pool2d"),
        ("adaptive pooling", NOWHERE, adaptive_avg_pool(3), "_adaptive_avg_pool3d"),
        ("adaptive pooling", EVERYWHERE, adaptive_max_pool(2), "adaptive_max_pool2d"),
        ("adaptive pooling", EVERYWHERE, adaptive_max_pool(3), "adaptive_max_pool3d")):
    lower(getattr(aten, _name), exact=_exact, group=_group)(_pool[0])
    lower(getattr(aten, f"{_name}_backward"), group=_group)(_pool[1])


# ---- writing to the positions of maxima ------------------------------------------------------------------


def put_back(x: Value, indices: Value, lead: tuple[Index, ...], sizes: Sequence[Index], mode: str) -> Value:
    """Zeros of (*lead, *sizes) with each x set at, or added to, its flat position in the plane."""
    rank = len(sizes)

    def target(j: Place) -> Place:
        return (*j[:-rank], *unflat(check(indices.load(j), product(sizes), fault=Fault.POOLED), sizes))

    return build.scatter((*lead, *sizes), lambda _: const(0, x.dtype), x.shape, target, lambda j: x.load(j), mode)


@lower(aten.max_unpool2d, aten.max_unpool3d, exact=EVERYWHERE, group="unpooling")
def max_unpool(x: Value, indices: Value, output_size: Sequence[IndexLike], stride: Any = (),
               padding: Any = ()) -> Value:
    sizes = [as_index(n) for n in output_size]
    rank = len(sizes)
    given = zip(sizes, x.shape[-rank:], stride or [None] * rank, padding or [0] * rank, strict=True)
    cells = [c for one in given if (c := cell(*one)) is not None]
    # Rows that cells do not fill exactly cannot be written in even pieces, so zeros are written first.
    if build.graph().capabilities.ordered_scatter or len(cells) < rank or sizes[-1].const % cells[-1].stride:
        return put_back(x, indices, x.shape[:-rank], sizes, "set")
    return put_into_cells(x, indices, sizes, cells)


def cell(size: Index, count: Index, stride: int | None, padding: int) -> Axis | None:
    """The non-overlapping windows from which the values of an unpooling probably came; None if sizes are unknown."""
    if not size.is_const or not count.is_const or count.const == 0:
        return None
    step = stride or max(1, round(size.const / count.const))
    return Axis(size, step, step, padding, 1, count)


def put_into_cells(x: Value, indices: Value, sizes: Sequence[Index], cells: Sequence[Axis]) -> Value:
    """Zeros of the given sizes with each x set at its flat position, which normally lies in its own cell.

    Each position looks into its cell, so everything is written once, in order; values outside of their cell follow."""
    rank = len(sizes)
    position = narrow(product(sizes))

    def start(i: Place) -> Expr:
        lead, here = split(i, rank)
        o = tuple(a.candidate(k, as_index(0)) for a, k in zip(cells, here, strict=True))
        there = all_of([within(k, a.out) for a, k in zip(cells, o, strict=True)])
        at = where(there, cast(indices.load((*lead, *o), there), torch.int64), -1)
        mine = eq(cast(at, position), index_value(flat(here, sizes), position))
        return where(mine, x.load((*lead, *o), there), 0)

    def target(j: Place) -> Place:
        return unflat(check(indices.load(j), product(sizes), fault=Fault.POOLED), sizes)

    def stray(j: Place) -> Expr:
        own = all_of([eq(index_value(a.candidate(k, as_index(0))), index_value(o))
                      for a, k, o in zip(cells, target(j), j[-rank:], strict=True)])
        return ~own

    return build.scatter((*x.shape[:-rank], *sizes), start, x.shape, lambda j: (*j[:-rank], *target(j)),
                         lambda j: x.load(j, stray(j)), "set", stray)


@lower(aten.fractional_max_pool2d, aten.fractional_max_pool3d, exact=EVERYWHERE)
def fractional_max_pool(x: Value, kernel_size: Sequence[int], output_size: Sequence[int], samples: Value
                        ) -> tuple[Value, ...]:
    """Max pooling over windows of fixed size at pseudo-random increasing starts; one sample per plane and dimension."""
    rank, dtype = len(kernel_size), samples.dtype
    sizes = x.shape[-rank:]

    def start(lead: Place, axis: int, o: Index) -> Index:
        last = sizes[axis] - kernel_size[axis]
        if output_size[axis] == 1:
            return last
        column = 1 - axis if rank == 2 else axis  # ATen orders the two samples of a plane from the width
        plane = lead if len(lead) == 2 else (as_index(0), *lead)
        sample = cast(samples.load((*plane, column)), opmath(dtype))
        alpha = round_to(index_value(last, sample.dtype) / (output_size[axis] - 1), dtype)

        def cut(v: Expr) -> Expr:
            return cast(round_to(round_to(v, dtype) * alpha, dtype), torch.int64)

        begin = where(eq(index_value(o), output_size[axis] - 1), index_value(last),
                      cut(index_value(o, sample.dtype) + sample) - cut(sample))
        return computed(clamp(begin, 0, index_value(last)), 0, last.bounds()[1])

    def body(i: Place) -> tuple[Expr, Expr]:
        lead, o = split(i, rank)
        starts = tuple(start(lead, a, k) for a, k in enumerate(o))
        return greatest(x, lead, [(0, k) for k in kernel_size],
                        lambda w: tuple(s + j for s, j in zip(starts, w, strict=True)), starts)

    return together((*x.shape[:-rank], *(as_index(n) for n in output_size)), body, (x.dtype, torch.int64))


@lower(aten.fractional_max_pool2d_backward, aten.fractional_max_pool3d_backward)
def fractional_max_pool_backward(grad: Value, x: Value, kernel_size: Sequence[int],
                                 output_size: Sequence[int], indices: Value) -> Value:
    rank = len(kernel_size)
    return put_back(grad, indices, x.shape[:-rank], x.shape[-rank:], "add")


describe(aten.max_unpool2d.default, strides="suggested")
describe(aten.max_pool3d_with_indices.default, strides="pooled")
