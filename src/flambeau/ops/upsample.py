"""Upsampling: nearest, linear, cubic and antialiased resizing, one dimension at a time in the gradients.

A resize is a matrix for each dimension. The forward reads the few taps of a row of it. The gradient reads
a column: each input position gathers from the outputs that touch it, dimension after dimension, so that the
work is the sum of the column lengths and not their product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_float, opmath
from flambeau.ir.expr import Expr
from flambeau.ir.index import Index, IndexLike, as_index, ceildiv, maximum, minimum
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import (
    abs_,
    cast,
    ceil,
    clamp,
    computed,
    const,
    eq,
    floor,
    fold_over,
    index_value,
    where,
)
from flambeau.ir.scalar import maximum as larger
from flambeau.ir.scalar import minimum as smaller
from flambeau.ops.plane import Place, split, within
from flambeau.ops.registry import lower

aten = torch.ops.aten

Tap = tuple[Index, Expr | None]  # where to read, and the weight (None: one)


@dataclass(frozen=True)
class Axis:
    """One dimension resized from n to m. `factor` is the scale the user gave; it goes before n / m."""

    n: Index
    m: Index
    factor: float | None
    align: bool
    dtype: DType  # positions and weights are computed in it

    # An output touches input y if its source position lies in [y - before, y + after); in halves, to stay
    # with integers.
    before = after = 0

    @property
    def slack(self) -> int:
        """More outputs to look at on either side, where rounding decides who touches whom."""
        return 0

    @property
    def shift(self) -> int:
        """The source position of output o is scale * (o + shift/2) - back/2."""
        return 0

    @property
    def back(self) -> int:
        return 0

    @property
    def given(self) -> bool:
        return self.factor is not None and self.factor > 0 and not self.align

    @property
    def scale(self) -> Expr:
        """Input positions per output position."""
        if self.given:
            assert self.factor is not None
            return const(1.0 / self.factor, self.dtype)
        top, bottom = (self.n - 1, self.m - 1) if self.align else (self.n, self.m)
        if top.is_const and bottom.is_const:
            return const(int(top) / int(bottom) if int(bottom) else 0.0, self.dtype)
        ratio = index_value(top, self.dtype) / index_value(bottom, self.dtype)
        return where(index_value(bottom) > 0, ratio, 0) if self.align else ratio

    @property
    def ratio(self) -> tuple[Index, Index] | None:
        """The scale as a fraction of integers, where it is one."""
        if self.align:
            return self.n - 1, self.m - 1
        if not self.given:
            return self.n, self.m
        assert self.factor is not None
        f = Fraction(self.factor).limit_denominator(1024)
        if float(f) == self.factor and self.n * f.numerator is self.m * f.denominator:
            return self.n, self.m
        return None

    def index(self, x: Expr) -> Index:
        """A position in [0, n) that was computed as a float."""
        top = self.n.bounds()[1]
        narrow = top is not None and top < 2**31
        return computed(cast(x, torch.int32 if narrow else torch.int64), 0, None if top is None else top - 1)

    @property
    def last(self) -> Expr:
        return index_value(self.n - 1, self.dtype)

    def taps(self, o: Index) -> list[Tap]:
        raise NotImplementedError

    def weight(self, o: Index, y: Index) -> Expr:
        """How much of input y is in output o."""
        raise NotImplementedError

    def reach(self, y: Index) -> tuple[tuple[IndexLike, IndexLike], Callable[[Index], Index]]:
        """Loop bounds over the outputs that may touch input y, and the output of a loop index."""
        if self.n is as_index(1) or self.m is as_index(1):
            return (0, self.m), lambda j: j
        ratio = self.ratio
        if ratio is None:
            return self._reach_by_float(y), lambda j: j
        num, den = ratio

        def first(past: int, at: IndexLike) -> Index:
            """The first output whose source position is at least `at + past/2`."""
            return ceildiv((as_index(at) * 2 + past + self.back) * den - num * self.shift, num * 2)

        def ends(at: IndexLike) -> tuple[Index, Index]:
            return (maximum(first(-self.before, at) - self.slack, 0),
                    minimum(first(self.after, at) + self.slack, self.m))

        low, high = ends(y)
        if not (self.n.is_const and self.m.is_const):
            return (low, high), lambda j: j
        # As many steps for every position: the loop unrolls, and lanes stay together.
        spans = (ends(k) for k in range(int(self.n)))
        return (0, max(int(b) - int(a) for a, b in spans)), lambda j: low + j

    def _reach_by_float(self, y: Index) -> tuple[IndexLike, IndexLike]:
        assert self.factor is not None
        factor = self.factor

        def first(past: int) -> Expr:
            at = index_value(y * 2 + past + self.back, torch.float64) * (factor / 2) - self.shift / 2
            return cast(ceil(at), torch.int64)

        m = index_value(self.m)
        top = self.m.bounds()[1]
        # A given factor that is too small for the sizes lets the last input take all that lies beyond it.
        high = where(eq(index_value(y), index_value(self.n - 1)), m,
                     clamp(first(self.after) + self.slack, 0, m))
        return (computed(clamp(first(-self.before) - self.slack, 0, m), 0, top), computed(high, 0, top))


class Nearest(Axis):
    after = 2

    @property
    def exact(self) -> bool:
        """Whole multiples for which no rounding can change the source: then it is integer arithmetic."""
        if self.ratio is None or not (self.n.is_const and self.m.is_const):
            return False
        n, m = int(self.n), int(self.m)
        return n % m == 0 or (m % n == 0 and self.safe(m // n))

    @property
    def slack(self) -> int:
        return 0 if self.exact else 1

    def source(self, o: Index) -> Index:
        """floor(o * scale)"""
        if self.exact:
            return ((o * 2 + self.shift) * self.n) // (self.m * 2)
        # ATen takes the floor of a single float whatever the dtype is.
        x = floor(cast(self.position(o), torch.float32))
        return self.index(smaller(x, index_value(self.n - 1, torch.float32)))

    def safe(self, k: int) -> bool:
        """Whether o * (1/k) cannot fall below a whole number when rounded: 1/k is exact."""
        return k & (k - 1) == 0

    def position(self, o: Index) -> Expr:
        return index_value(o, self.dtype) * self.scale

    def taps(self, o: Index) -> list[Tap]:
        return [(self.source(o), None)]

    def weight(self, o: Index, y: Index) -> Expr:
        return where(eq(index_value(self.source(o)), index_value(y)), const(1, self.dtype), 0)


class NearestExact(Nearest):
    """Nearest to the centre of the output cell."""

    @property
    def shift(self) -> int:
        return 1

    def safe(self, k: int) -> bool:
        """Centres of an even number of cells stay half a cell away from whole numbers."""
        return k % 2 == 0

    def position(self, o: Index) -> Expr:
        return larger(self.scale * (index_value(o, self.dtype) + 0.5) - 0.5, 0) + 0.5


class Linear(Axis):
    before = after = 2

    @property
    def shift(self) -> int:
        return 0 if self.align else 1

    @property
    def back(self) -> int:
        return self.shift

    def source(self, o: Index) -> Expr:
        x = index_value(o, self.dtype)
        return x * self.scale if self.align else self.scale * (x + 0.5) - 0.5

    def taps(self, o: Index) -> list[Tap]:
        if self.n is self.m:  # ATen copies, whatever the scale
            return [(o, None)]
        x = larger(self.source(o), 0)
        left = smaller(floor(x), self.last)
        t = smaller(x - left, 1)
        return [(self.index(left), 1 - t), (self.index(smaller(left + 1, self.last)), t)]

    def weight(self, o: Index, y: Index) -> Expr:
        if self.n is self.m:
            return where(eq(index_value(o), index_value(y)), const(1, self.dtype), 0)
        x = clamp(self.source(o), 0, self.last)
        return larger(1 - abs_(x - index_value(y, self.dtype)), 0)


class Cubic(Linear):
    before = after = 4

    def taps(self, o: Index) -> list[Tap]:
        x = self.source(o)
        left = floor(x)
        return [(self.index(clamp(left + (k - 1), 0, self.last)), w)
                for k, w in enumerate(cubic_weights(x - left, -0.75))]

    def weight(self, o: Index, y: Index) -> Expr:
        x, at = self.source(o), index_value(y, self.dtype)
        left = floor(x)
        total = const(0, self.dtype)
        for k, w in enumerate(cubic_weights(x - left, -0.75)):
            total = total + where(eq(clamp(left + (k - 1), 0, self.last), at), w, 0)
        return total


def cubic_near(x: Expr, a: float) -> Expr:
    return ((a + 2) * x - (a + 3)) * x * x + 1


def cubic_far(x: Expr, a: float) -> Expr:
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def cubic_weights(t: Expr, a: float) -> list[Expr]:
    """The weights of the neighbours -1, 0, 1, 2 of a position t past neighbour 0."""
    return [cubic_far(t + 1, a), cubic_near(t, a), cubic_near(1 - t, a), cubic_far(2 - t, a)]


# ---- forward and backward ------------------------------------------------------------------------------


def positions_in(x: DType) -> DType:
    return opmath(x) if is_float(x) else torch.float32


def interpolate(x: Value, axes: Sequence[Axis]) -> Value:
    rank = len(axes)
    compute = axes[0].dtype

    def body(i: Place) -> Expr:
        lead, o = split(i, rank)
        rows = [a.taps(k) for a, k in zip(axes, o, strict=True)]

        def blend(axis: int, place: Place) -> Expr:
            if axis == rank:
                return x.load((*lead, *place))
            parts = [(blend(axis + 1, (*place, at)), w) for at, w in rows[axis]]
            total: Expr | None = None
            for value, w in parts:
                part = value if w is None else cast(value, compute) * w
                total = part if total is None else total + part
            assert total is not None
            return total

        return blend(0, ())

    return build.pointwise((*x.shape[:-rank], *(a.m for a in axes)), body, x.dtype)


def interpolate_backward(grad: Value, axes: Sequence[Axis], dtype: DType) -> Value:
    """The transposed resize, one dimension after the other; rows first, since they are read in order."""
    rank = len(axes)
    g = grad
    for k, axis in enumerate(axes):
        g = gather(g, grad.rank - rank + k, axis, dtype if k == rank - 1 else axis.dtype)
    return g


def gather(g: Value, dim: int, axis: Axis, dtype: DType) -> Value:
    def body(i: Place) -> Expr:
        bounds, output = axis.reach(i[dim])

        def step(w: Place, carry: tuple[Expr, ...]) -> tuple[Expr]:
            o = output(w[0])
            there = within(o, axis.m)
            value = cast(g.load((*i[:dim], o, *i[dim + 1:]), there), axis.dtype)
            return (carry[0] + where(there, value * axis.weight(o, i[dim]), 0),)

        return fold_over([bounds], (const(0, axis.dtype),), step)[0]

    return build.pointwise((*g.shape[:dim], axis.n, *g.shape[dim + 1:]), body, dtype)


def resizing(kind: type[Axis], rank: int, aligned: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The lowerings of op(x, output_size, [align_corners], *scales) and its backward."""

    def axes_of(sizes: Sequence[Index], output_size: Sequence[IndexLike], rest: Sequence[Any], dtype: DType
                ) -> list[Axis]:
        align = bool(rest[0]) if aligned else False
        scales = [*rest[1 if aligned else 0:], *(None,) * rank][:rank]
        return [kind(n, as_index(m), f, align, positions_in(dtype))
                for n, m, f in zip(sizes, output_size, scales, strict=True)]

    def forward(x: Value, output_size: Sequence[IndexLike], *rest: Any, **named: Any) -> Any:
        if not is_float(x.dtype) and not issubclass(kind, Nearest):
            return NotImplemented  # uint8 images: ATen resizes them in fixed point
        return interpolate(x, axes_of(x.shape[-rank:], output_size, (*rest, *named.values()), x.dtype))

    def backward(grad: Value, output_size: Sequence[IndexLike], input_size: Sequence[IndexLike], *rest: Any,
                 **named: Any) -> Value:
        sizes = [as_index(n) for n in input_size][-rank:]
        axes = axes_of(sizes, output_size, (*rest, *named.values()), grad.dtype)
        return interpolate_backward(grad, axes, grad.dtype)

    return forward, backward


for _kind, _rank, _aligned, _name in (
        (Nearest, 1, False, "upsample_nearest1d"),
        (Nearest, 2, False, "upsample_nearest2d"),
        (Nearest, 3, False, "upsample_nearest3d"),
        (NearestExact, 1, False, "_upsample_nearest_exact1d"),
        (NearestExact, 2, False, "_upsample_nearest_exact2d"),
        (NearestExact, 3, False, "_upsample_nearest_exact3d"),
        (Linear, 1, True, "upsample_linear1d"),
        (Linear, 2, True, "upsample_bilinear2d"),
        (Linear, 3, True, "upsample_trilinear3d"),
        (Cubic, 2, True, "upsample_bicubic2d")):
    _forward, _backward = resizing(_kind, _rank, _aligned)
    lower(getattr(aten, _name).default)(_forward)
    lower(getattr(aten, _name + "_backward").default)(_backward)


# ---- antialiased: the filter widens with the scale, and each row is divided by its sum -----------------


@dataclass(frozen=True)
class Filter:
    """Weights of the inputs around the centre of an output: zero beyond `radius` coarse cells."""

    radius: float
    at: Callable[[Expr], Expr]


def triangle(x: Expr) -> Expr:
    return larger(1 - abs_(x), 0)


def cubic(x: Expr) -> Expr:
    """Cubic convolution with the constant of PIL, -0.5."""
    x = abs_(x)
    return where(x < 1, cubic_near(x, -0.5), where(x < 2, cubic_far(x, -0.5), 0))


class Antialiased(Axis):
    filter: Filter

    @property
    def wide(self) -> Expr:
        return larger(self.scale, 1)

    def centre(self, o: Index) -> Expr:
        return self.scale * (index_value(o, self.dtype) + 0.5)

    def span(self, o: Index) -> tuple[Expr, Expr]:
        """The inputs [first, end) that output o reads."""
        support = self.wide * self.filter.radius
        n = index_value(self.n)

        def cut(x: Expr) -> Expr:
            return clamp(cast(x + 0.5, torch.int64), 0, n)

        return cut(self.centre(o) - support), cut(self.centre(o) + support)

    def raw(self, o: Index, y: Index) -> Expr:
        return self.filter.at((index_value(y, self.dtype) - self.centre(o) + 0.5) * (1 / self.wide))

    def totals(self) -> Value:
        """The sum of the weights of every output."""

        def body(i: Place) -> Expr:
            first, end = self.span(i[0])
            top = self.n.bounds()[1]
            total, = fold_over([(computed(first, 0, top), computed(end, 0, top))], (const(0, self.dtype),),
                               lambda w, c: (c[0] + self.raw(i[0], w[0]),))
            return total

        return build.pointwise((self.m,), body)


def resize_antialiased(x: Value, dim: int, axis: Antialiased, dtype: DType) -> Value:
    totals = axis.totals()
    top = axis.n.bounds()[1]

    def body(i: Place) -> Expr:
        o = i[dim]
        first, end = axis.span(o)
        total = totals.load((o,))

        def step(w: Place, carry: tuple[Expr, ...]) -> tuple[Expr]:
            value = cast(x.load((*i[:dim], w[0], *i[dim + 1:])), axis.dtype)
            return (carry[0] + value * (axis.raw(o, w[0]) / total),)

        return fold_over([(computed(first, 0, top), computed(end, 0, top))], (const(0, axis.dtype),), step)[0]

    return build.pointwise((*x.shape[:dim], axis.m, *x.shape[dim + 1:]), body, dtype)


def gather_antialiased(g: Value, dim: int, axis: Antialiased, dtype: DType) -> Value:
    """Input y gathers from the outputs whose span holds it: those with the centre within the support of y."""
    totals = axis.totals()
    top = axis.m.bounds()[1]
    m = index_value(axis.m)

    def body(i: Place) -> Expr:
        y = i[dim]
        at = index_value(y, axis.dtype) + 0.5
        support = axis.wide * axis.filter.radius
        # One more on either side: the span of an output is cut in floating point.
        low = clamp(cast(floor((at - support) / axis.scale - 0.5), torch.int64) - 1, 0, m)
        high = clamp(cast(ceil((at + support) / axis.scale - 0.5), torch.int64) + 2, 0, m)
        bounds = (computed(low, 0, top), computed(high, 0, top))
        if axis.align and (axis.n is as_index(1) or axis.m is as_index(1)):  # the scale is zero
            bounds = (as_index(0), axis.m)

        def step(w: Place, carry: tuple[Expr, ...]) -> tuple[Expr]:
            o = w[0]
            first, end = axis.span(o)
            mine = (index_value(y) >= first) & (index_value(y) < end)
            value = cast(g.load((*i[:dim], o, *i[dim + 1:])), axis.dtype)
            return (carry[0] + where(mine, value * (axis.raw(o, y) / totals.load((o,))), 0),)

        return fold_over([bounds], (const(0, axis.dtype),), step)[0]

    return build.pointwise((*g.shape[:dim], axis.n, *g.shape[dim + 1:]), body, dtype)


class AntialiasedLinear(Antialiased):
    filter = Filter(1.0, triangle)


class AntialiasedCubic(Antialiased):
    filter = Filter(2.0, cubic)


def resizing_antialiased(kind: type[Antialiased]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x: Value, output_size: Sequence[IndexLike], align_corners: bool, *scales: float | None,
                **named: float | None) -> Any:
        if not is_float(x.dtype):
            return NotImplemented  # uint8 images: ATen resizes them in fixed point
        factors = [*scales, *named.values(), None, None][:2]
        axes = [kind(n, as_index(m), f, align_corners, opmath(x.dtype))
                for n, m, f in zip(x.shape[-2:], output_size, factors, strict=True)]
        rows = resize_antialiased(x, x.rank - 1, axes[1], opmath(x.dtype))
        return resize_antialiased(rows, x.rank - 2, axes[0], x.dtype)

    def backward(grad: Value, output_size: Sequence[IndexLike], input_size: Sequence[IndexLike],
                 align_corners: bool, *scales: float | None, **named: float | None) -> Value:
        factors = [*scales, *named.values(), None, None][:2]
        axes = [kind(as_index(n), as_index(m), f, align_corners, opmath(grad.dtype))
                for n, m, f in zip(list(input_size)[-2:], output_size, factors, strict=True)]
        columns = gather_antialiased(grad, grad.rank - 2, axes[0], opmath(grad.dtype))
        return gather_antialiased(columns, grad.rank - 1, axes[1], grad.dtype)

    return forward, backward


for _antialiased, _name in ((AntialiasedLinear, "_upsample_bilinear2d_aa"),
                            (AntialiasedCubic, "_upsample_bicubic2d_aa")):
    _forward, _backward = resizing_antialiased(_antialiased)
    lower(getattr(aten, _name).default)(_forward)
    lower(getattr(aten, _name + "_backward").default)(_backward)
