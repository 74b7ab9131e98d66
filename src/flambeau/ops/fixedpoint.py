"""Resizing of byte images in fixed point, as in ATen and PIL: 16-bit weights, rounded after each dimension."""

from __future__ import annotations

from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.expr import Expr, binary, cast, const, index_value, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import clamp, fold_over
from flambeau.ops.plane import Place, within
from flambeau.ops.separable import Column

MOST_BITS = 22


def resize_bytes(x: Value, columns: dict[int, Column]) -> Any:
    """Resize along the given dimensions, the last one first. Without weight tables (unknown sizes) ATen does it."""
    if any(c.count is None for c in columns.values()):
        return NotImplemented
    for dim in sorted(columns, reverse=True):
        x = resize_along(x, dim, columns[dim])
    return x


def resize_along(x: Value, dim: int, c: Column) -> Value:
    assert c.weights is not None and c.count is not None
    weights, count, size = c.weights, c.count, x.shape[dim]
    greatest, = build.reduce(weights.shape, (0, 1), build.simple_combine("max", weights.dtype),
                             lambda i: weights.load(i))
    bits = build.pointwise((), lambda _: precision(greatest.load(())))

    def fixed(i: Place) -> Expr:
        v = weights.load(i) * cast(power(bits.load(())), weights.dtype)
        return cast(where(v < 0, v - 0.5, v + 0.5), torch.int32)

    whole = build.pointwise(weights.shape, fixed)

    def body(i: Place) -> Expr:
        n = bits.load(())

        def step(k: Place, carry: tuple[Expr, ...]) -> tuple[Expr]:
            j: Index = c.first(i[dim]) + k[0]
            there = within(j, size)
            value = cast(x.load((*i[:dim], j, *i[dim + 1:]), there), torch.int32)
            return (carry[0] + where(there, value * whole.load((i[dim], k[0])), 0),)

        total, = fold_over([(0, count)], (power(n - 1),), step)
        return clamp(binary("shr", total, n), 0, 255)

    return build.pointwise((*x.shape[:dim], c.size, *x.shape[dim + 1:]), body, x.dtype)


def power(n: Expr) -> Expr:
    return binary("shl", const(1, n.dtype), n)


def precision(weight: Expr) -> Expr:
    """The largest number of fraction bits with which the largest weight still fits into 16 bits."""
    total = const(0, torch.int32)
    for p in range(MOST_BITS):
        fits = cast(weight * float(2 ** (p + 1)) + 0.5, torch.int64) < index_value(1 << 15)
        total = total + cast(fits, torch.int32)
    return total
