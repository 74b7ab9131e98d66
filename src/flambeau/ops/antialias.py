"""Antialiased resizing: a filter that widens with the scale, and each output divided by the sum of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flambeau.ir.dtypes import DType, is_float, opmath
from flambeau.ir.expr import Expr, cast, computed, const, index_value, where
from flambeau.ir.index import Index, IndexLike, as_index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import abs_, ceil, clamp, floor, sum_over
from flambeau.ir.scalar import maximum as larger
from flambeau.ops.fixedpoint import resize_bytes
from flambeau.ops.plane import cubic_far, cubic_near
from flambeau.ops.registry import to_dtype
from flambeau.ops.separable import Column, column, gather_all, table
from flambeau.ops.upsample import Axis, lower_resizing

aten = torch.ops.aten


def triangle(x: Expr) -> Expr:
    return larger(1 - abs_(x), 0)


def cubic(x: Expr) -> Expr:
    """Cubic convolution with the constant of PIL, -0.5."""
    x = abs_(x)
    return where(x < 1, cubic_near(x, -0.5), where(x < 2, cubic_far(x, -0.5), 0))


class Antialiased(Axis):
    """A filter that is zero beyond `radius` cells of the coarser side."""

    radius: float
    shape: Callable[[Expr], Expr]

    @property
    def known_scale(self) -> float | None:
        s = self.scale
        return s.attr if s.op == "const" else None

    @property
    def wide(self) -> Expr:
        return larger(self.scale, const(1, self.dtype))

    def centre(self, o: Index) -> Expr:
        return self.scale * (index_value(o, self.dtype) + 0.5)

    def ends(self, o: Index) -> tuple[Expr, Expr]:
        """The inputs [first, end) that output o reads."""
        support = self.wide * self.radius
        n = index_value(self.n)

        def cut(x: Expr) -> Expr:
            return clamp(cast(x + 0.5, torch.int64), 0, n)

        return cut(self.centre(o) - support), cut(self.centre(o) + support)

    def span(self, o: Index) -> tuple[Index, Index, int | None]:
        first, end = self.ends(o)
        s, top = self.known_scale, self.n.bounds()[1]
        most = None if s is None else 2 * math.ceil(max(s, 1.0) * self.radius) + 1
        return computed(first, 0, top), computed(end, 0, top), most

    def reach(self, y: Index) -> tuple[Index, Index, int | None]:
        """The outputs whose centre is near input y, plus one on either side, because spans are computed in floats."""
        s, m, top = self.known_scale, index_value(self.m), self.m.bounds()[1]
        if s == 0:
            return as_index(0), self.m, int(self.m) if self.m.is_const else None
        at, support = index_value(y, self.dtype) + 0.5, self.wide * self.radius
        low = clamp(cast(floor((at - support) / self.scale - 0.5), torch.int64) - 1, 0, m)
        high = clamp(cast(ceil((at + support) / self.scale - 0.5), torch.int64) + 2, 0, m)
        most = None if s is None else math.ceil(2 * max(s, 1.0) * self.radius / s) + 4
        return computed(low, 0, top), computed(high, 0, top), most

    def raw(self, o: Index, y: Index) -> Expr:
        return type(self).shape((index_value(y, self.dtype) - self.centre(o) + 0.5) * (1 / self.wide))

    def weights(self) -> Callable[[Index, Index], Expr]:
        """A function for the weight of input y in output o."""

        def total(o: Index) -> Expr:
            low, high, _ = self.span(o)
            return sum_over([(low, high)], self.dtype, lambda y: self.raw(o, y[0]))

        totals = table(self.m, total)

        def weight(o: Index, y: Index) -> Expr:
            first, end = self.ends(o)
            read = (index_value(y) >= first) & (index_value(y) < end) & (index_value(o) < index_value(self.m))
            # Outputs beyond the last one have no total, and their span is past the end of the input too.
            some = totals(computed(clamp(index_value(o), 0, index_value(self.m - 1))))
            return where(read, self.raw(o, y) / some, 0)

        return weight

    def rows(self) -> Column:
        weight = self.weights()
        return column(self.m, self.n, self.span, lambda y, o: weight(o, y), self.dtype)

    def columns(self) -> Column:
        return column(self.n, self.m, self.reach, self.weights(), self.dtype)


class AntialiasedLinear(Antialiased):
    radius, shape = 1.0, staticmethod(triangle)


class AntialiasedCubic(Antialiased):
    radius, shape = 2.0, staticmethod(cubic)


def resizing(kind: type[Antialiased]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def axes_of(sizes: Sequence[IndexLike], output_size: Sequence[IndexLike], align: bool,
                factors: Sequence[float | None], dtype: DType) -> list[Antialiased]:
        weights_in = opmath(dtype) if is_float(dtype) else torch.float64
        return [kind(as_index(n), as_index(m), f, align, weights_in)
                for n, m, f in zip(list(sizes)[-2:], output_size, [*factors, None, None])]

    def forward(x: Value, output_size: Sequence[IndexLike], align_corners: bool, *scales: float | None,
                **named: float | None) -> Any:
        axes = axes_of(x.shape, output_size, align_corners, (*scales, *named.values()), x.dtype)
        rows = {dim: a.rows() for dim, a in enumerate(axes, x.rank - 2)}
        return to_dtype(gather_all(x, rows), x.dtype) if is_float(x.dtype) else resize_bytes(x, rows)

    def backward(grad: Value, output_size: Sequence[IndexLike], input_size: Sequence[IndexLike],
                 align_corners: bool, *scales: float | None, **named: float | None) -> Value:
        axes = axes_of(input_size, output_size, align_corners, (*scales, *named.values()), grad.dtype)
        return to_dtype(gather_all(grad, {dim: a.columns() for dim, a in enumerate(axes, grad.rank - 2)}), grad.dtype)

    return forward, backward


for _kind, _name in ((AntialiasedLinear, "_upsample_bilinear2d_aa"), (AntialiasedCubic, "_upsample_bicubic2d_aa")):
    _forward, _backward = resizing(_kind)
    lower_resizing(_name, _forward, _backward)
