"""Reads at computed indices: advanced indexing, index_select, gather, take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.expr import Expr, cast, check, computed, const, index_value, where
from flambeau.ir.faults import WRAPPED, Fault
from flambeau.ir.index import ONE, ZERO, Index
from flambeau.ir.nodes import Shape, Value

from .facts import EVERYWHERE, of_family
from .registry import broadcast_shapes, load_at, lower, scalar_at, wrap_dim
from .view import at_least_1d, flat, is_empty, reshape

aten = torch.ops.aten
of_family(exact=EVERYWHERE)

Locate = Callable[[Expr, Index, int], Index]
MASKS = (torch.bool, torch.uint8)  # dtypes of tensors that act as masks when used as an index


def position(at: Expr, size: Index, fault: Fault, dim: int = 0, mask: Expr | None = None) -> Index:
    """A computed index, checked against the size; for some kinds of faults, negative ones count from the end."""
    at = cast(at, torch.int64)
    return check(where(at < 0, at + index_value(size), at) if fault in WRAPPED else at, size, mask, fault, dim)


@dataclass(frozen=True)
class Advanced:
    """x[..., indices, ...] as in NumPy: index tensors are broadcast with each other. Their common shape replaces them
    in the result if they are adjacent, or else comes first."""

    whole: Shape
    indices: tuple[Value | None, ...]  # one for each dimension of x

    @classmethod
    def of(cls, x: Value, indices: Sequence[Value | None]) -> Advanced | None:
        """The indexing; None if an index is a mask, since the number of elements it selects is unknown here."""
        if any(v is not None and v.dtype in MASKS for v in indices):
            return None
        return cls(x.shape, (*indices, *[None] * (x.rank - len(indices))))

    @property
    def used(self) -> list[int]:
        return [d for d, v in enumerate(self.indices) if v is not None]

    @property
    def common(self) -> Shape:
        return broadcast_shapes(*(v.shape for v in self.indices if v is not None))

    @property
    def front(self) -> int:
        """The dimension of the result at which the common shape begins."""
        used = self.used
        neighbours = used == list(range(used[0], used[-1] + 1)) if used else True
        return used[0] if used and neighbours else 0

    @property
    def shape(self) -> Shape:
        kept = tuple(n for n, v in zip(self.whole, self.indices) if v is None)
        return (*kept[:self.front], *self.common, *kept[self.front:])

    def at(self, i: Sequence[Index], locate: Locate) -> list[Index]:
        """The element of x that element i of the result comes from."""
        end = self.front + len(self.common)
        shared, kept = i[self.front:end], iter((*i[:self.front], *i[end:]))
        # Errors number the indexed dimensions only, as ATen's do.
        return [next(kept) if v is None else locate(load_at(v, shared), n, self.used.index(d))
                for d, (n, v) in enumerate(zip(self.whole, self.indices))]


def checked(at: Expr, size: Index, dim: int) -> Index:
    return position(at, size, Fault.INDEX, dim)


def trusted(at: Expr, size: Index, dim: int) -> Index:
    """An unchecked index: negative ones count from the end, but the caller guarantees the range."""
    at = cast(at, torch.int64)
    hi = size.bounds()[1]
    return computed(where(at < 0, at + index_value(size), at), 0, None if hi is None else max(hi - 1, 0))


@lower(aten.index.Tensor)
def index(x: Value, indices: Sequence[Value | None], locate: Locate = checked) -> Any:
    where_ = Advanced.of(x, indices)
    if where_ is None:
        return NotImplemented
    return build.pointwise(where_.shape, lambda i: x.load(where_.at(i, locate)))


lower(aten._unsafe_index.Tensor)(lambda x, indices: index(x, indices, trusted))


@lower(aten._unsafe_masked_index)
def unsafe_masked_index(x: Value, mask: Value, indices: Sequence[Value | None], fill: Any) -> Any:
    """x[indices] where the mask holds, else `fill`; indices outside of the mask are arbitrary."""
    where_ = Advanced.of(x, indices)
    if where_ is None:
        return NotImplemented

    def body(i: tuple[Index, ...]) -> Expr:
        valid = load_at(mask, i)
        return where(valid, x.load(where_.at(i, trusted), valid), scalar_at(fill, i, x.dtype, x.dtype))

    return build.pointwise(broadcast_shapes(where_.shape, mask.shape), body)


@lower(aten.index_select)
def index_select(x: Value, dim: int, index: Value) -> Value:
    if index.rank > 1:  # eager rejects it
        return NotImplemented
    places = flat(index)
    if x.rank == 0:
        only = reshape(x, (1,))
        return build.pointwise((), lambda i: only.load([position(places.load([ZERO]), ONE, Fault.SELECTED)]))
    d = wrap_dim(dim, x.rank)
    fault = Fault.ROW if d == 1 else Fault.SELECTED  # eager has a separate kernel for the second dimension

    def body(i: tuple[Index, ...]) -> Expr:
        return x.load((*i[:d], position(places.load([i[d]]), x.shape[d], fault, d), *i[d + 1:]))

    return build.pointwise((*x.shape[:d], places.shape[0], *x.shape[d + 1:]), body)


@lower(aten.gather, group="reads by element")
def gather(x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    """out[i, j] = x[index[i, j], j] for dim 0, and so on."""
    source, places = at_least_1d(x), at_least_1d(index)
    d = wrap_dim(dim, source.rank)
    if is_empty(index.shape):  # an empty index may have any number of dimensions
        return build.pointwise(index.shape, lambda i: const(0, x.dtype))

    def body(i: tuple[Index, ...]) -> Expr:
        i = i or (ZERO,)
        return source.load((*i[:d], position(places.load(i), source.shape[d], Fault.ELEMENT, d), *i[d + 1:]))

    return build.pointwise(index.shape, body)


@lower(aten.take)
def take(x: Value, index: Value) -> Value:
    """Elements of x by their row-major position."""
    source = flat(x)
    return build.pointwise(
        index.shape, lambda i: source.load([position(index.load(i), source.shape[0], Fault.TAKEN)]))
