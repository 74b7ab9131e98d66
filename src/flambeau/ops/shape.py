"""Shape operators that create new arrays: concatenation, padding, rearranging, patches (im2col, col2im)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import opmath, promote
from flambeau.ir.expr import Expr, cast, const, where
from flambeau.ir.index import ONE, ZERO, Index, IndexLike, as_index, maximum, minimum, product
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import sum_over
from flambeau.torch_compat.decomp import suggest_memory_format

from .facts import EVERYWHERE, NOWHERE, describe, of_family
from .registry import broadcast_shapes, load_at, lower, operand, scalar_at, wrap_dim, wrap_dims
from .view import along, equal, flat, is_empty, regroup, reshape, within

aten = torch.ops.aten
of_family(exact=EVERYWHERE)


# ---- joining -----------------------------------------------------------------------------------------


MANY = 64  # tensors: a kernel takes at most this many pointers, and checks at each point which tensor it is in


@lower(aten.cat.default)
def cat(tensors: Sequence[Value], dim: int = 0) -> Value:
    dtype = promote(operand(x) for x in tensors)
    # An empty vector can be joined with anything, for historical reasons.
    real = [x for x in tensors if x.shape != (ZERO,)] or tensors[:1]
    d = wrap_dim(dim, real[0].rank)
    if len(real) > MANY:
        if not build.graph().capabilities.contracts:
            return NotImplemented  # ATen reads each tensor once, whatever their number
        return cat([cat(real[k : k + MANY], d) for k in range(0, len(real), MANY)], d)
    ends = list(itertools.accumulate((x.shape[d] for x in real), initial=ZERO))

    def body(i: tuple[Index, ...]) -> Expr:
        out: Expr | None = None
        for x, start, end in reversed(list(zip(real, ends, ends[1:]))):
            here = within(i[d], start, end)
            part = cast(x.load((*i[:d], i[d] - start, *i[d + 1:]), here), dtype)
            # Parts are tried in order, so the last one needs no condition.
            out = part if out is None else where(within(i[d], 0, end), part, out)
        assert out is not None
        return out

    return build.pointwise((*real[0].shape[:d], ends[-1], *real[0].shape[d + 1:]), body)


# ---- padding -----------------------------------------------------------------------------------------
#
# `pad` starts with the last dimension: (before, after) of the last one, then of the one before it, and so on. A
# negative pad crops.


def _pads(pad: Sequence[IndexLike], rank: int) -> list[tuple[Index, Index]]:
    """(before, after) of each dimension."""
    pairs = [(as_index(a), as_index(b)) for a, b in zip(pad[::2], pad[1::2])]
    return [(ZERO, ZERO)] * (rank - len(pairs)) + pairs[::-1]


def _padded(shape: Sequence[Index], pads: Sequence[tuple[Index, Index]]) -> list[Index]:
    return [n + before + after for n, (before, after) in zip(shape, pads)]


@lower(aten.constant_pad_nd)
def constant_pad_nd(x: Value, pad: Sequence[IndexLike], value: Any = 0) -> Value:
    pads = _pads(pad, x.rank)

    def body(i: tuple[Index, ...]) -> Expr:
        at = [k - before for k, (before, _) in zip(i, pads)]
        inside = const(True, torch.bool)
        for k, n in zip(at, x.shape):
            inside = inside & within(k, 0, n)
        return where(inside, x.load(at, inside), scalar_at(value, i, x.dtype, x.dtype))

    return build.pointwise(_padded(x.shape, pads), body)


def _magnitude(i: Index) -> Index:
    return maximum(i, -i)


def _pad_from_edge(x: Value, padding: Sequence[IndexLike], edge: Callable[[Index, Index], Index]) -> Value:
    """Padding in which point k beyond the edge of a dimension of n points is point edge(k, n)."""
    pads = _pads(padding, x.rank)

    def body(i: tuple[Index, ...]) -> Expr:
        plain = [k - before for k, (before, _) in zip(i, pads)]
        at = [k if pad == (ZERO, ZERO) else edge(k, n) for k, n, pad in zip(plain, x.shape, pads)]
        # Along the last dimension, adjacent inner points are read as adjacent.
        inside = within(plain[-1], 0, x.shape[-1])
        return where(inside, x.load((*at[:-1], plain[-1]), inside), x.load(at, ~inside))

    return build.pointwise(_padded(x.shape, pads), body)


@lower(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)
def reflection_pad(x: Value, padding: Sequence[IndexLike]) -> Value:
    # The index is reflected at zero, then at the last point.
    return _pad_from_edge(x, padding, lambda k, n: n - 1 - _magnitude(n - 1 - _magnitude(k)))


@lower(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)
def replication_pad(x: Value, padding: Sequence[IndexLike]) -> Value:
    return _pad_from_edge(x, padding, lambda k, n: maximum(minimum(k, n - 1), 0))


@lower(aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.reflection_pad3d_backward, exact=NOWHERE)
def reflection_pad_backward(grad: Value, x: Value, padding: Sequence[IndexLike]) -> Value:
    """Each point was read as itself, and as its reflections at the near and far edges."""
    pads, dtype = _pads(padding, x.rank), opmath(grad.dtype)
    nowhere = const(False, torch.bool)

    def images(k: Index, n: Index, outer: Index, before: Index, after: Index) -> list[tuple[Index, Expr]]:
        near, far = before - k, before + (n - 1) * 2 - k
        return [(k + before, within(k + before, 0, outer)),
                (near, nowhere if before is ZERO else within(k, 1, n) & within(near, 0, outer)),
                (far, nowhere if after is ZERO else within(k, 0, n - 1) & within(far, 0, outer))]

    def body(i: tuple[Index, ...]) -> Expr:
        total = const(0, dtype)
        choices = [images(k, n, outer, *pad) for k, n, outer, pad in zip(i, x.shape, grad.shape, pads)]
        for choice in itertools.product(*choices):
            read = const(True, torch.bool)
            for _, valid in choice:
                read = read & valid
            if read is not nowhere:
                seen = grad.load([at for at, _ in choice], read)
                total = total + where(read, cast(seen, dtype), const(0, dtype))
        return total

    return build.pointwise(x.shape, body, grad.dtype)


@lower(aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward, exact=NOWHERE)
def replication_pad_backward(grad: Value, x: Value, padding: Sequence[IndexLike]) -> Value:
    """An inner point was read once, an edge point also by all padding beyond it."""
    pads, dtype = _pads(padding, x.rank), opmath(grad.dtype)
    spread = [d for d, (before, after) in enumerate(pads) if before is not ZERO or after is not ZERO]
    if not spread:
        return grad

    def readers(d: int, k: Index) -> tuple[Index, Index]:
        """The first point that reads k, and the number of such points."""
        before, after = pads[d]
        inner_left = minimum(k, 1)  # 0 at the edge, otherwise 1
        inner_right = minimum(maximum(x.shape[d] - 1 - k, 0), 1)
        return k + before * inner_left, before * (1 - inner_left) + 1 + after * (1 - inner_right)

    def body(i: tuple[Index, ...]) -> Expr:
        runs = [readers(d, i[d]) for d in spread]

        def share(step: tuple[Index, ...]) -> Expr:
            at, inside = list(i), const(True, torch.bool)
            for d, (first, _), k in zip(spread, runs, step):
                at[d] = first + k
                inside = inside & within(at[d], 0, grad.shape[d])  # a negative pad removes readers
            return where(inside, cast(grad.load(at, inside), dtype), const(0, dtype))

        return sum_over([(0, count) for _, count in runs], dtype, share)

    return build.pointwise(x.shape, body, grad.dtype)


# ---- rearranging: index changes here, though PyTorch copies ------------------------------------------


@lower(aten.flip, strides="preserved")
def flip(x: Value, dims: Sequence[int]) -> Value:
    for d in wrap_dims(list(dims), x.rank) if dims else ():
        x = _flipped(x, d)
    return x


def _flipped(x: Value, dim: int) -> Value:
    n = x.shape[dim]
    return along(x, dim, n, lambda i: n - 1 - i)


@lower(aten.roll, strides="rolled")
def roll(x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    if is_empty(x.shape):
        return x
    if not dims:
        return reshape(roll(flat(x), shifts, [0]), x.shape)
    total: dict[int, Index] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        d = wrap_dim(dim, x.rank)
        if x.rank:
            total[d] = total.get(d, ZERO) + shift

    def read(i: tuple[Index, ...], left: Sequence[int], mask: Expr) -> Expr:
        """Along each dimension, read two contiguous runs instead of computing a remainder at each point."""
        if not left:
            return x.load(i, mask)
        d, n = left[0], x.shape[left[0]]
        by = total[d] % n
        wrapped = within(i[d], 0, by)
        return where(wrapped, read((*i[:d], i[d] + n - by, *i[d + 1:]), left[1:], mask & wrapped),
                     read((*i[:d], i[d] - by, *i[d + 1:]), left[1:], mask & ~wrapped))

    return build.pointwise(x.shape, lambda i: read(i, list(total), const(True, torch.bool)))


@lower(aten.repeat)
def repeat(x: Value, repeats: Sequence[IndexLike]) -> Value:
    x = reshape(x, (1,) * (len(repeats) - x.rank) + x.shape)
    return x.view([n * r for n, r in zip(x.shape, repeats)], lambda i: [
        ZERO if n is ONE or n is ZERO else k % n for k, n in zip(i, x.shape)])


# ---- triangles, diagonals, masks ---------------------------------------------------------------------


@lower(aten.tril, strides="contiguous")
def tril(x: Value, diagonal: int = 0) -> Value:
    return build.pointwise(x.shape, lambda i: _keep(x, i, within(i[-1], 0, i[-2] + diagonal + 1)))


@lower(aten.triu, strides="contiguous")
def triu(x: Value, diagonal: int = 0) -> Value:
    return build.pointwise(x.shape, lambda i: _keep(x, i, within(i[-1], i[-2] + diagonal, x.shape[-1])))


def _keep(x: Value, i: Sequence[Index], kept: Expr) -> Expr:
    return where(kept, x.load(i), const(0, x.dtype))


@lower(aten.masked_fill, strides="contiguous")
def masked_fill(x: Value, mask: Value, value: Any) -> Value:
    def body(i: tuple[Index, ...]) -> Expr:
        return where(load_at(mask, i), scalar_at(value, i, x.dtype, x.dtype), load_at(x, i))

    return build.pointwise(broadcast_shapes(x.shape, mask.shape), body)


# ---- patches -----------------------------------------------------------------------------------------


def _patch_counts(size: Sequence[IndexLike], kernel: Sequence[int], dilation: Sequence[int],
                  padding: Sequence[int], stride: Sequence[int]) -> list[Index]:
    """The number of positions of the kernel along each dimension."""
    return [(as_index(n) + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, d, p, s in zip(size, kernel, dilation, padding, stride)]


@lower(aten.im2col, strides="contiguous")
def im2col(x: Value, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
           stride: Sequence[int]) -> Value:
    """(n, c, h, w) to (n, c·kh·kw, positions); points beyond the edge are zero."""
    *lead, c, h, w = x.shape
    counts = _patch_counts((h, w), kernel, dilation, padding, stride)
    rows, columns = (c, *map(as_index, kernel)), tuple(counts)

    def body(i: tuple[Index, ...]) -> Expr:
        channel, *tap = regroup([i[-2]], [product(rows)], rows)
        position = regroup([i[-1]], [product(columns)], columns)
        y, x_ = (at * s + k * d - p for at, s, k, d, p in zip(position, stride, tap, dilation, padding))
        inside = within(y, 0, h) & within(x_, 0, w)
        return where(inside, x.load((*i[:-2], channel, y, x_), inside), const(0, x.dtype))

    return build.pointwise((*lead, product(rows), product(columns)), body)


@lower(aten.col2im, exact=NOWHERE)
def col2im(x: Value, size: Sequence[IndexLike], kernel: Sequence[int], dilation: Sequence[int],
           padding: Sequence[int], stride: Sequence[int]) -> Value:
    """(n, c·kh·kw, positions) to (n, c, h, w): each point sums all patches that contain it."""
    *lead, rows, _ = x.shape
    counts = _patch_counts(size, kernel, dilation, padding, stride)
    channels = rows // (kernel[0] * kernel[1])
    dtype = opmath(x.dtype)

    def body(i: tuple[Index, ...]) -> Expr:
        def share(tap: tuple[Index, ...]) -> Expr:
            inside, at = const(True, torch.bool), []
            for k, d, p, s, n, point in zip(tap, dilation, padding, stride, counts, i[-2:]):
                shifted = point + p - k * d
                inside = inside & within(shifted, 0, n * s) & equal(shifted % s, 0)
                at.append(shifted // s)
            row = (i[-3] * kernel[0] + tap[0]) * kernel[1] + tap[1]
            seen = x.load((*i[:-3], row, at[0] * counts[1] + at[1]), inside)
            return where(inside, cast(seen, dtype), const(0, dtype))

        return sum_over([(0, n) for n in kernel], dtype, share)

    return build.pointwise((*lead, channels, *size), body, x.dtype)


describe(aten.reflection_pad3d.default, aten.replication_pad3d.default, strides="suggested")


def channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Copy to new memory as eager's kernel does, as torch's decomposition may end in a view; empty inputs unchanged."""
    if x.numel() == 0:
        return aten.alias(x)
    n, channels, *rest = x.shape
    mixed = x.reshape(n, groups, channels // groups, *rest).transpose(1, 2).reshape(x.shape)
    return mixed.clone(memory_format=suggest_memory_format(x))


describe(aten.channel_shuffle.default, aten.native_channel_shuffle.default, decomposed=channel_shuffle)
