"""Grid sampling: reads an image at real positions, with gradients of the image and the grid.

ATen has two sets of formulas, which are equal except for rounding and NaN. A point on the border in one may lie off it
in the other, so each lowering follows its own operator's (`Axis`, `PlainAxis`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, cast, computed, const, index_value, where
from flambeau.ir.index import Index, IndexLike, as_index, ceildiv, offset_of, product
from flambeau.ir.nodes import Value, dim_vars
from flambeau.ir.scalar import abs_, floor, fma, fmod, isnan, minimum, ne, round, trunc
from flambeau.ops.plane import Place, all_of, cubic_weights, pick
from flambeau.ops.reduction import sums
from flambeau.ops.registry import lower

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
ROW = 16  # channels from which on they are read as rows
WIDE = 4  # elements of a 16-byte access
FEW = 4  # if there are fewer points than positions / 4, changing the image's layout costs more than it gains


@dataclass(frozen=True)
class Axis:
    """One dimension of the image: maps [-1, 1] to a position in [0, size), as in grid_sampler_2d."""

    size: Index
    padding: int
    align: bool

    # A corner outside of the image adds zero times its weight, so that a NaN in the grid propagates.
    outside_counts = True

    def number(self, i: Index, like: Expr) -> Expr:
        return index_value(i, like.dtype)

    def unnormalize(self, x: Expr) -> Expr:
        if self.align:
            return (x + 1) * self.slope(x)
        return (x + 1) * self.slope(x) - 0.5

    def slope(self, like: Expr) -> Expr:
        """d position / d coordinate."""
        return self.number(self.size - 1 if self.align else self.size, like) / 2

    def clip(self, x: Expr) -> Expr:
        """Clip to the image; NaN becomes zero."""
        return where(x > 0, minimum(x, self.number(self.size - 1, x)), 0)

    def reflect(self, x: Expr) -> tuple[Expr, Expr]:
        """The position mirrored at the borders until it is inside, and whether its direction is reversed there."""
        low = 0.0 if self.align else -0.5
        period = self.number((self.size - 1 if self.align else self.size) * 2, x)
        away = abs_(x - low)
        extra = away - trunc(away / period) * period
        back = period - extra
        flipped = (extra > back) ^ (x - low < 0)
        return minimum(extra, back) + low, flipped

    @property
    def is_point(self) -> bool:
        """Whether both borders are one point, so that there is nothing to mirror."""
        return self.align and self.size is as_index(1)

    def moved(self, x: Expr) -> Expr:
        """An unnormalized position after the padding mode is applied, but before clipping."""
        if self.padding == REFLECTION:
            return const(0, x.dtype) if self.is_point else self.reflect(x)[0]
        return x

    def place(self, x: Expr) -> Expr:
        x = self.moved(x)
        return x if self.padding == ZEROS else self.clip(x)

    def has_next(self, moved: Expr) -> Expr:
        """Whether the position has a next one inside the image after clipping."""
        return ~(moved >= self.number(self.size - 1, moved)) & (index_value(self.size) > 1)

    def place_with_slope(self, x: Expr) -> tuple[Expr, Expr]:
        """The position and d position / d coordinate, which is zero on and beyond the border."""
        slope = self.slope(x)
        if self.padding == ZEROS:
            return x, slope
        if self.padding == REFLECTION:
            if self.is_point:
                return const(0, x.dtype), const(0, x.dtype)
            x, flipped = self.reflect(x)
            slope = where(flipped, -slope, slope)
        last = self.number(self.size - 1, x)
        return (where(x <= 0, 0, where(x >= last, last, x)), where((x <= 0) | (x >= last), 0, slope))

    @property
    def top(self) -> int | None:
        size = self.size.bounds()[1]
        return None if size is None else size - 1

    def whole(self, x: Expr) -> Expr:
        """An integral float as an integer; as wide as the float if that suffices."""
        return cast(x, torch.int32 if self.top is not None and self.top < 2**31 else torch.int64)

    def kept(self, x: Expr) -> Expr:
        """`whole` for storing in memory: far outside, including NaN, it becomes -2."""
        return where((x >= -1) & (x < self.number(self.size, x)), self.whole(x), -2)

    def inside(self, x: Expr) -> Expr:
        """Whether an integer or float position is inside; NaN is outside."""
        return (x >= 0) & (x < index_value(self.size, x.dtype))


class PlainAxis(Axis):
    """One dimension of the image, as in grid_sampler_3d."""

    outside_counts = False

    def unnormalize(self, x: Expr) -> Expr:
        if self.align:
            return (x + 1) / 2 * self.number(self.size - 1, x)
        return ((x + 1) * self.number(self.size, x) - 1) / 2

    def clip(self, x: Expr) -> Expr:
        """Clip to the image; NaN becomes the last position."""
        last = self.number(self.size - 1, x)
        return where(x < last, where(x > 0, x, 0), last)

    def has_next(self, moved: Expr) -> Expr:
        return (moved < self.number(self.size - 1, moved)) & (index_value(self.size) > 1)

    def reflect(self, x: Expr) -> tuple[Expr, Expr]:
        low = 0.0 if self.align else -0.5
        span = self.number(self.size - 1 if self.align else self.size, x)
        away = abs_(x - low)
        extra = fmod(away, span)
        odd = ne(fmod(floor(away / span), 2), 0)
        return where(odd, span - extra, extra) + low, odd ^ (x - low < 0)


A = -0.75  # the free constant of cubic convolution, as in ATen


def cubic_slopes(t: Expr) -> list[Expr]:
    """The negated derivatives of `cubic_weights`."""

    def near(x: Expr) -> Expr:
        return (3 * (A + 2) * x - 2 * (A + 3)) * x

    def far(x: Expr) -> Expr:
        return (3 * A * x - 10 * A) * x + 8 * A

    return [-far(t + 1), -near(t), near(1 - t), far(2 - t)]


@dataclass(frozen=True)
class Taps:
    """The positions that one output reads along one dimension, their weights, and d weight / d position."""

    axis: Axis
    position: Callable[[Index], Expr]  # of neighbour k
    weights: Sequence[Expr]
    slopes: Sequence[Expr]
    first: Index | None = None  # set if the taps' addresses are consecutive
    known: Sequence[Expr] | None = None  # whether neighbour k is inside, if its placement determines that

    def inside(self, k: IndexLike) -> Expr:
        """Whether neighbour k is inside, and so reads anything."""
        return self.axis.inside(self.position(as_index(k))) if self.known is None else pick(self.known, as_index(k))

    def __len__(self) -> int:
        return len(self.weights)


def reads_rows(image: Value, grid: Value) -> bool:
    """Whether to read all channels of a position together, as one row: if there are enough channels, and enough
    positions are read to pay for changing the image's layout."""
    if not build.graph().capabilities.gathers_rows:
        return False
    channels, area, points = image.shape[1], product(image.shape[2:]), product(grid.shape[1:-1])
    few = area.is_const and points.is_const and points.const * FEW < area.const
    return not (channels.is_const and channels.const < ROW) and (not few or has_channels_last(image))


def has_channels_last(image: Value) -> bool:
    strides = build.graph().buffers[image.buffer].strides
    if strides is None:
        return False
    channel = dim_vars(image.shape)[1]
    return offset_of(image.index, strides).coefficient(channel) is as_index(1)


def channels_last(image: Value) -> Value:
    """The image with contiguous channels in memory, in rows that are aligned for wide accesses."""
    if has_channels_last(image):
        return image
    n, c, *sizes = image.shape
    rows = build.pointwise((n, *sizes, padded(c)), lambda i: channel(image, i[0], i[-1], i[1:-1]), laid=True)
    return rows.view(image.shape, lambda i: (i[0], *i[2:], i[1]))


def padded(channels: Index) -> Index:
    return ceildiv(channels, WIDE) * WIDE if channels.is_const else channels


def channel(image: Value, n: Index, c: Index, at: Place) -> Expr:
    """One of the padded channels; padding channels are zero."""
    there = index_value(c) < index_value(image.shape[1])
    if padded(image.shape[1]) is image.shape[1]:
        return image.load((n, c, *at))
    return where(there, image.load((n, c, *at), there), 0)


class Sampler:
    """The geometry of one call: the taps of output (n, *o) along each dimension."""

    def __init__(self, image: Value, grid: Value, mode: int, padding: int, align: bool, kind: type[Axis],
                 backward: bool = False) -> None:
        self.grid, self.mode, self.kind, self.backward = grid, mode, kind, backward
        self.rows = reads_rows(image, grid)
        self.image = channels_last(image) if self.rows else image
        self.axes = [kind(n, padding, align) for n in image.shape[2:]]
        self.rank = len(self.axes)
        self.out = grid.shape[1:-1]
        self.dtype = opmath(image.dtype)
        self.places = [self.once(partial(self.position, a)) for a in range(self.rank) if mode != BICUBIC]
        self.parts = [self.once(lambda i, a=a: self.place(a, i) - self.first(a, i))  # type: ignore[misc]
                      for a in range(self.rank) if mode == BILINEAR]

    def once(self, body: Callable[[Place], Expr]) -> Callable[[Place], Expr]:
        """A position that all channels share. A single kernel computes it for all channels itself. In a backward, where
        one kernel scatters and another reduces, it is computed once and stored, unless channels are contiguous."""
        if not self.backward or build.graph().capabilities.gathers_rows:
            return body
        return build.pointwise((self.grid.shape[0], *self.out), body).load

    def coordinate(self, a: int, i: Place) -> Expr:
        """The position in dimension a before padding. The grid stores x first, but it is the image's last dimension."""
        return self.axes[a].unnormalize(cast(self.grid.load((*i, self.rank - 1 - a)), self.dtype))

    def place(self, a: int, i: Place) -> Expr:
        x = self.coordinate(a, i)
        return self.axes[a].place_with_slope(x)[0] if self.backward else self.axes[a].place(x)

    def first(self, a: int, i: Place) -> Expr:
        """The first position that is read."""
        return floor(self.place(a, i)) if self.mode == BILINEAR else round(self.place(a, i))

    def position(self, a: int, i: Place) -> Expr:
        """The first position, in the form in which it is stored."""
        x, axis = self.first(a, i), self.axes[a]
        if not (self.rows or self.backward):
            return x
        if self.backward and axis.padding != ZEROS:  # it is inside already, unless it is NaN
            return where(isnan(self.coordinate(a, i)), -2, axis.whole(x))
        return axis.kept(x)

    def taps(self, n: Index, o: Place) -> list[Taps]:
        return [self.along(a, (n, *o)) for a in range(self.rank)]

    def along(self, a: int, i: Place) -> Taps:
        axis = self.axes[a]
        always = const(True, torch.bool)
        placed = axis.padding != ZEROS and (not self.backward or self.mode == BICUBIC)
        if self.mode == BICUBIC:
            x = self.coordinate(a, i)
            base = floor(x)
            return Taps(axis, lambda k: axis.place(base + index_value(k, x.dtype) - 1), cubic_weights(x - base, A),
                        [-s for s in cubic_slopes(x - base)], known=[always] * 4 if placed else None)
        at, one = self.places[a](i), const(1, self.dtype)
        first = computed(at, 0, axis.top) if self.rows else None
        if self.mode == NEAREST:
            return Taps(axis, lambda k: at, [one], [const(0, self.dtype)], first, [always] if placed else None)
        t = self.parts[a](i)
        known = [always, axis.has_next(axis.moved(self.coordinate(a, i)))] if placed else None
        return Taps(axis, lambda k: at + index_value(k, at.dtype), [1 - t, t], [-one, one], first, known)

    def spot(self, along: Sequence[Taps], k: Sequence[IndexLike]) -> tuple[list[Index], Expr]:
        """The place of tap k in the image, and whether it is inside."""
        at = [t.position(as_index(j)) for t, j in zip(along, k, strict=True)]
        inside = all_of([t.inside(j) for t, j in zip(along, k, strict=True)])
        return [computed(t.axis.whole(x), 0, t.axis.top) if t.first is None else t.first + j
                for t, x, j in zip(along, at, k, strict=True)], inside

    def read(self, n: Index, c: Index, along: Sequence[Taps], k: Sequence[int]) -> tuple[Expr, Expr]:
        """The image at tap k, zero outside; and whether it is inside."""
        at, inside = self.spot(along, k)
        return where(inside, cast(self.image.load((n, c, *at), inside), self.dtype), 0), inside

    def plus(self, total: Expr, value: Expr, inside: Expr, *factors: Expr) -> Expr:
        """Add a tap's value times its factors to the total."""
        if self.rows:  # multiply the factors once for all channels
            weight = reduce(operator.mul, factors)
            weight = weight if self.kind.outside_counts else where(inside, weight, 0)
            return value * weight if total.op == "const" else fma(value, weight, total)
        for f in factors:
            value = value * f
        return total + (value if self.kind.outside_counts else where(inside, value, 0))


def forward(kind: type[Axis]) -> Callable[..., Any]:
    def sample(image: Value, grid: Value, mode: int, padding: int, align: bool) -> Value:
        s = Sampler(image, grid, mode, padding, align, kind)

        def body(i: Place) -> Expr:
            n, c, *o = i
            along = s.taps(n, tuple(o))
            if mode == NEAREST:
                return s.read(n, c, along, (0,) * s.rank)[0]
            if mode == BICUBIC:  # ATen sums rows first
                total = const(0, s.dtype)
                for ky, wy in enumerate(along[0].weights):
                    row = const(0, s.dtype)
                    for kx, wx in enumerate(along[1].weights):
                        row = row + s.read(n, c, along, (ky, kx))[0] * wx
                    total = total + row * wy
                return total
            total = const(0, s.dtype)
            for k in itertools.product(range(2), repeat=s.rank):
                weight = const(1, s.dtype)
                for t, j in zip(reversed(along), reversed(k), strict=True):
                    weight = t.weights[j] * weight
                total = s.plus(total, *s.read(n, c, along, k), weight)
            return total

        return build.pointwise((*image.shape[:2], *s.out), body, image.dtype)

    return sample


def image_gradient(s: Sampler, grad: Value) -> Value:
    """Every output adds its gradient times each tap's weight to the place that the tap read."""
    rank = s.rank
    reach = {BILINEAR: 2, NEAREST: 1, BICUBIC: 4}[s.mode]
    if s.rows:
        return row_gradient(s, grad, reach)
    source = (*grad.shape, *(as_index(reach),) * rank)

    def parts(j: Place) -> tuple[list[Taps], Place]:
        return s.taps(j[0], j[2:2 + rank]), j[2 + rank:]

    def target(j: Place) -> Sequence[Index]:
        return (*j[:2], *s.spot(*parts(j))[0])

    def value(j: Place) -> Expr:
        out = cast(grad.load(j[:2 + rank]), s.dtype)
        for t, k in zip(*parts(j), strict=True):
            out = out * pick(t.weights, k)
        return cast(out, s.image.dtype)

    zero = const(0, s.image.dtype)
    return build.scatter(s.image.shape, lambda _: zero, source, target, value, "add",
                         lambda j: s.spot(*parts(j))[1])


def row_gradient(s: Sampler, grad: Value, reach: int) -> Value:
    """The image gradient, computed with contiguous channels per tap, and then transposed to the image's layout."""
    n, c, *sizes = s.image.shape
    taps = (as_index(reach),) * s.rank

    def parts(j: Place) -> tuple[list[Taps], Place]:
        return s.taps(j[0], j[1 + s.rank:-1]), j[1:1 + s.rank]

    def value(j: Place) -> Expr:
        weight = const(1, s.dtype)
        for t, k in zip(*parts(j), strict=True):
            weight = weight * pick(t.weights, k)
        return cast(channel(grad, j[0], j[-1], j[1 + s.rank:-1]), s.dtype) * weight

    zero = const(0, s.dtype)
    rows = build.scatter((n, *sizes, padded(c)), lambda _: zero, (n, *taps, *s.out, padded(c)),
                         lambda j: (j[0], *s.spot(*parts(j))[0], j[-1]), value, "add", lambda j: s.spot(*parts(j))[1])
    return build.pointwise(s.image.shape, lambda i: rows.load((i[0], *i[2:], i[1])), s.image.dtype)


def grid_gradient(s: Sampler, grad: Value) -> Value:
    """d loss / d coordinate: the sum over channels of the interpolated image's slope times the gradient."""
    if s.mode == NEAREST:
        return build.pointwise(s.grid.shape, lambda _: const(0, s.grid.dtype))

    def body(i: Place) -> tuple[Expr, ...]:
        n, *o, c = i
        along = s.taps(n, tuple(o))
        g = cast(grad.load((n, c, *o)), s.dtype)
        totals = [const(0, s.dtype)] * s.rank
        for k in itertools.product(*(range(len(t)) for t in along)):
            value, inside = s.read(n, c, along, k)
            for a in range(s.rank):
                factors = [t.slopes[j] if b == a else t.weights[j]
                           for b, (t, j) in enumerate(zip(along, k, strict=True))]
                totals[a] = s.plus(totals[a], value, inside, *factors)
        return tuple(t * g for t in totals)

    channels = s.image.shape[1]
    parts = build.reduce((s.image.shape[0], *s.out, channels), [s.rank + 1], sums(s.dtype, s.rank), body)

    def moved(a: int, i: Place) -> Expr:
        """d loss / d position times d position / d coordinate."""
        x, axis = s.coordinate(a, i), s.axes[a]
        return parts[a].load(i) * (axis.slope(x) if s.mode == BICUBIC else axis.place_with_slope(x)[1])

    def scaled(i: Place) -> Expr:
        return pick([moved(a, i[:-1]) for a in reversed(range(s.rank))], i[-1])

    return build.pointwise(s.grid.shape, scaled, s.grid.dtype)


def backward(kind: type[Axis]) -> Callable[..., Any]:
    def gradients(grad: Value, image: Value, grid: Value, mode: int, padding: int, align: bool,
                  output_mask: Sequence[bool] = (True, True)) -> tuple[Value | None, Value]:
        s = Sampler(image, grid, mode, padding, align, kind, backward=True)
        return image_gradient(s, grad) if output_mask[0] else None, grid_gradient(s, grad)

    return gradients


lower(aten.grid_sampler_2d, group="grid sampling")(forward(Axis))
lower(aten.grid_sampler_2d_backward, group="grid sampling")(backward(Axis))
lower(aten.grid_sampler_3d, group="volume sampling")(forward(PlainAxis))
lower(aten.grid_sampler_3d_backward, group="volume sampling")(backward(PlainAxis))
