"""Positions in images, used by pooling, grid sampling and upsampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr, const, index_value, where
from flambeau.ir.index import Index, IndexLike, as_index, maximum, minimum
from flambeau.ir.nodes import Value, as_indices, dim_vars
from flambeau.ir.scalar import eq

Place = tuple[Index, ...]
Bounds = Sequence[tuple[IndexLike, IndexLike]]


def split(i: Place, rank: int) -> tuple[Place, Place]:
    """The batch and channel part of an index, and the spatial part."""
    return i[:-rank], i[-rank:]


def flat(place: Place, sizes: Sequence[Index]) -> Index:
    """The row-major position in a plane as one number."""
    out = as_index(0)
    for i, n in zip(place, sizes, strict=True):
        out = out * n + i
    return out


def within(i: Index, size: IndexLike) -> Expr:
    return (index_value(i) >= 0) & (index_value(i) < index_value(as_index(size)))


def nearest(i: Index, size: IndexLike) -> Index:
    """The position, or the nearest one inside: lets a masked value be read without a mask on the load."""
    return maximum(minimum(i, as_index(size) - 1), 0)


def padded(read: Callable[[Place, Expr | None], Expr], lead: Place, at: Place, sizes: Sequence[Index],
           inside: Expr) -> Expr:
    """The value that `read` returns at a place of a plane; zero outside."""
    if build.graph().capabilities.masked_reads:
        value = read((*lead, *at), inside)
    else:
        value = read((*lead, *(nearest(i, n) for i, n in zip(at, sizes, strict=True))), None)
    return where(inside, value, 0)


def all_of(conditions: Sequence[Expr]) -> Expr:
    out = const(True, torch.bool)
    for c in conditions:
        out = out & c
    return out


def together(shape: Sequence[Index], body: Callable[[Place], Sequence[Expr]],
             dtypes: Sequence[DType]) -> tuple[Value, ...]:
    """Several values over one domain from one body, so that a shared loop is generated once."""
    parts = body(as_indices(dim_vars(tuple(shape))))

    def one(e: Expr, dtype: DType) -> Value:
        return build.pointwise(shape, lambda _: e, dtype)

    return tuple(one(e, d) for e, d in zip(parts, dtypes, strict=True))


def pick(choices: Sequence[Expr], k: Index) -> Expr:
    """The k-th choice, where k is only known at run time."""
    out = choices[-1]
    for j in reversed(range(len(choices) - 1)):
        out = where(eq(index_value(k), j), choices[j], out)
    return out


def cubic_near(x: Expr, a: float) -> Expr:
    """The weight of cubic convolution with the free constant a, at a distance below one."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def cubic_far(x: Expr, a: float) -> Expr:
    """The weight of cubic convolution at a distance between one and two."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def cubic_weights(t: Expr, a: float) -> list[Expr]:
    """The weights of the neighbours -1, 0, 1, 2 of a position that is t past neighbour 0."""
    return [cubic_far(t + 1, a), cubic_near(t, a), cubic_near(1 - t, a), cubic_far(2 - t, a)]
