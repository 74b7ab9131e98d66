"""Grid sampling: an image read at real positions, with the gradients of the image and of the grid.

ATen has two sets of formulas, equal but for rounding and for what is not a number. A point that lies on the
border in the one may lie beside it in the other, so a lowering follows its operator's (`Axis`, `PlainAxis`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, Scalar
from flambeau.ir.index import Index, as_index
from flambeau.ir.nodes import Combine, Value
from flambeau.ir.scalar import (
    abs_,
    cast,
    computed,
    const,
    eq,
    floor,
    fmod,
    index_value,
    minimum,
    ne,
    round,
    trunc,
    where,
)
from flambeau.ops.plane import Place, all_of
from flambeau.ops.registry import lower

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


@dataclass(frozen=True)
class Axis:
    """One dimension of the image: from [-1, 1] to a position in [0, size), as in grid_sampler_2d."""

    size: Index
    padding: int
    align: bool

    # A corner outside the image adds zero times its weight, so that a NaN in the grid shows.
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
        """To the image; NaN becomes zero."""
        return where(x > 0, minimum(x, self.number(self.size - 1, x)), 0)

    def reflect(self, x: Expr) -> tuple[Expr, Expr]:
        """The position mirrored at the borders until it lies inside, and whether its direction was turned."""
        low = 0.0 if self.align else -0.5
        period = self.number((self.size - 1 if self.align else self.size) * 2, x)
        away = abs_(x - low)
        extra = away - trunc(away / period) * period
        back = period - extra
        turned = (extra > back) ^ (x - low < 0)
        return minimum(extra, back) + low, turned

    @property
    def is_point(self) -> bool:
        """Both borders are one point: there is nothing to mirror."""
        return self.align and self.size is as_index(1)

    def place(self, x: Expr) -> Expr:
        """An unnormalised position as the padding mode moves it."""
        if self.padding == REFLECTION:
            x = const(0, x.dtype) if self.is_point else self.reflect(x)[0]
        return x if self.padding == ZEROS else self.clip(x)

    def place_with_slope(self, x: Expr) -> tuple[Expr, Expr]:
        """The position and d position / d coordinate; on and beyond the border it does not move."""
        slope = self.slope(x)
        if self.padding == ZEROS:
            return x, slope
        if self.padding == REFLECTION:
            if self.is_point:
                return const(0, x.dtype), const(0, x.dtype)
            x, turned = self.reflect(x)
            slope = where(turned, -slope, slope)
        last = self.number(self.size - 1, x)
        return (where(x <= 0, 0, where(x >= last, last, x)), where((x <= 0) | (x >= last), 0, slope))

    def inside(self, x: Expr) -> Expr:
        """Compared as a float: what is no number or fits no integer is outside."""
        return (x >= 0) & (x < self.number(self.size, x))

    def index(self, x: Expr) -> Index:
        top = self.size.bounds()[1]
        narrow = top is not None and top < 2**31
        return computed(cast(x, torch.int32 if narrow else torch.int64), 0, None if top is None else top - 1)


class PlainAxis(Axis):
    """The same as in grid_sampler_3d."""

    outside_counts = False

    def unnormalize(self, x: Expr) -> Expr:
        if self.align:
            return (x + 1) / 2 * self.number(self.size - 1, x)
        return ((x + 1) * self.number(self.size, x) - 1) / 2

    def clip(self, x: Expr) -> Expr:
        """To the image; NaN becomes the last position."""
        last = self.number(self.size - 1, x)
        return where(x < last, where(x > 0, x, 0), last)

    def reflect(self, x: Expr) -> tuple[Expr, Expr]:
        low = 0.0 if self.align else -0.5
        span = self.number(self.size - 1 if self.align else self.size, x)
        away = abs_(x - low)
        extra = fmod(away, span)
        odd = ne(fmod(floor(away / span), 2), 0)
        return where(odd, span - extra, extra) + low, odd ^ (x - low < 0)


A = -0.75  # the free constant of cubic convolution, as in ATen


def cubic_near(x: Expr) -> Expr:
    return ((A + 2) * x - (A + 3)) * x * x + 1


def cubic_far(x: Expr) -> Expr:
    return ((A * x - 5 * A) * x + 8 * A) * x - 4 * A


def cubic_weights(t: Expr) -> list[Expr]:
    """The weights of the neighbours -1, 0, 1, 2 of a position t past neighbour 0."""
    return [cubic_far(t + 1), cubic_near(t), cubic_near(1 - t), cubic_far(2 - t)]


def cubic_slopes(t: Expr) -> list[Expr]:
    """Minus their derivatives."""

    def near(x: Expr) -> Expr:
        return (3 * (A + 2) * x - 2 * (A + 3)) * x

    def far(x: Expr) -> Expr:
        return (3 * A * x - 10 * A) * x + 8 * A

    return [-far(t + 1), -near(t), near(1 - t), far(2 - t)]


@dataclass(frozen=True)
class Taps:
    """What one output reads along one dimension: positions, their weights, d weight / d position."""

    axis: Axis
    positions: Callable[[Scalar], Expr]  # of neighbour k, for a number or an expression k
    weights: Sequence[Expr]
    slopes: Sequence[Expr]
    moves: Expr  # d position / d coordinate

    def __len__(self) -> int:
        return len(self.weights)


def taps(axis: Axis, mode: int, coordinate: Expr, backward: bool = False) -> Taps:
    x = axis.unnormalize(coordinate)
    one = const(1, x.dtype)
    if mode == BICUBIC:
        base = floor(x)
        return Taps(axis, lambda k: axis.place(base + k - 1), cubic_weights(x - base),
                    [-s for s in cubic_slopes(x - base)], axis.slope(x))
    if mode == NEAREST:
        return Taps(axis, lambda k: round(axis.place(x)), [one], [const(0, x.dtype)], axis.slope(x))
    x, moves = axis.place_with_slope(x) if backward else (axis.place(x), one)
    base = floor(x)
    return Taps(axis, lambda k: base + k, [1 - (x - base), x - base], [-one, one], moves)


class Sampler:
    """The geometry of one call: which taps output (n, *o) has along each dimension."""

    def __init__(self, image: Value, grid: Value, mode: int, padding: int, align: bool,
                 kind: type[Axis]) -> None:
        self.image, self.grid, self.mode, self.kind = image, grid, mode, kind
        self.axes = [kind(n, padding, align) for n in image.shape[2:]]
        self.rank = len(self.axes)
        self.out = grid.shape[1:-1]
        self.dtype = opmath(image.dtype)

    def taps(self, n: Index, o: Place, backward: bool = False) -> list[Taps]:
        """The grid holds x first, the image has it last."""
        return [taps(a, self.mode, cast(self.grid.load((n, *o, self.rank - 1 - k)), self.dtype), backward)
                for k, a in enumerate(self.axes)]

    def read(self, n: Index, c: Index, along: Sequence[Taps], k: Sequence[int]) -> tuple[Expr, Expr]:
        """The image at tap k, zero outside, and whether it is inside."""
        where_to = [t.positions(j) for t, j in zip(along, k, strict=True)]
        inside = all_of([t.axis.inside(x) for t, x in zip(along, where_to, strict=True)])
        at = (t.axis.index(x) for t, x in zip(along, where_to, strict=True))
        return where(inside, cast(self.image.load((n, c, *at), inside), self.dtype), 0), inside

    def term(self, value: Expr, inside: Expr, *factors: Expr) -> Expr:
        for f in factors:
            value = value * f
        return value if self.kind.outside_counts else where(inside, value, 0)


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
                total = total + s.term(*s.read(n, c, along, k), weight)
            return total

        return build.pointwise((*image.shape[:2], *s.out), body, image.dtype)

    return sample


def pick(choices: Sequence[Expr], k: Index) -> Expr:
    out = choices[-1]
    for j in reversed(range(len(choices) - 1)):
        out = where(eq(index_value(k), j), choices[j], out)
    return out


def sums(dtype: torch.dtype, count: int) -> Combine:
    return build.make_combine(f"sum{count}", (dtype,) * count, (0,) * count,
                              lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)))


def image_gradient(s: Sampler, grad: Value) -> Value:
    """Every output adds its gradient, times the weight of each tap, where the tap read."""
    rank = s.rank
    reach = {BILINEAR: 2, NEAREST: 1, BICUBIC: 4}[s.mode]
    source = (*grad.shape, *(as_index(reach),) * rank)

    def along(j: Place) -> tuple[list[Taps], Place, list[Expr]]:
        k = j[2 + rank:]
        each = s.taps(j[0], j[2:2 + rank], backward=True)
        return each, k, [t.positions(index_value(i, s.dtype)) for t, i in zip(each, k, strict=True)]

    def target(j: Place) -> Sequence[Index]:
        each, _, positions = along(j)
        return (j[0], j[1], *(t.axis.index(x) for t, x in zip(each, positions, strict=True)))

    def inside(j: Place) -> Expr:
        each, _, positions = along(j)
        return all_of([t.axis.inside(x) for t, x in zip(each, positions, strict=True)])

    def value(j: Place) -> Expr:
        each, k, _ = along(j)
        out = cast(grad.load(j[:2 + rank]), s.dtype)
        for t, i in zip(each, k, strict=True):
            out = out * pick(t.weights, i)
        return cast(out, s.image.dtype)

    zero = const(0, s.image.dtype)
    return build.scatter(s.image.shape, lambda _: zero, source, target, value, "add", inside)


def grid_gradient(s: Sampler, grad: Value) -> Value:
    """d loss / d coordinate: over the channels, the slope of the interpolated image times the gradient."""
    if s.mode == NEAREST:
        return build.pointwise(s.grid.shape, lambda _: const(0, s.grid.dtype))

    def body(i: Place) -> tuple[Expr, ...]:
        n, *o, c = i
        along = s.taps(n, tuple(o), backward=True)
        g = cast(grad.load((n, c, *o)), s.dtype)
        totals = [const(0, s.dtype)] * s.rank
        for k in itertools.product(*(range(len(t)) for t in along)):
            value, inside = s.read(n, c, along, k)
            for a in range(s.rank):
                factors = [t.slopes[j] if b == a else t.weights[j]
                           for b, (t, j) in enumerate(zip(along, k, strict=True))]
                totals[a] = totals[a] + s.term(value, inside, *factors)
        return tuple(t * g for t in totals)

    channels = s.image.shape[1]
    parts = build.reduce((s.image.shape[0], *s.out, channels), [s.rank + 1], sums(s.dtype, s.rank), body)

    def scaled(i: Place) -> Expr:
        along = s.taps(i[0], i[1:-1], backward=True)
        moved = [p.load(i[:-1]) * t.moves for p, t in zip(parts, along, strict=True)]
        return pick(moved[::-1], i[-1])

    return build.pointwise(s.grid.shape, scaled, s.grid.dtype)


def backward(kind: type[Axis]) -> Callable[..., Any]:
    def gradients(grad: Value, image: Value, grid: Value, mode: int, padding: int, align: bool,
                  output_mask: Sequence[bool] = (True, True)) -> tuple[Value | None, Value]:
        s = Sampler(image, grid, mode, padding, align, kind)
        return image_gradient(s, grad) if output_mask[0] else None, grid_gradient(s, grad)

    return gradients


lower(aten.grid_sampler_2d)(forward(Axis))
lower(aten.grid_sampler_2d_backward)(backward(Axis))
lower(aten.grid_sampler_3d)(forward(PlainAxis))
lower(aten.grid_sampler_3d_backward)(backward(PlainAxis))
