"""Upsampling: nearest, linear and cubic, one dimension at a time. Gradients are gathers.

A resize is a matrix for each dimension, with a few adjacent taps per row. The taps are stored in tables as long as the
dimension, computed once; the loops over the image multiply table entries and neighbours. The gradient reads the columns
of the same matrix: each input position gathers from the outputs that read it, so nothing is scattered.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_float, opmath
from flambeau.ir.expr import Expr, cast, computed, const, index_value, where
from flambeau.ir.index import Index, IndexLike, as_index, ceildiv, maximum, minimum
from flambeau.ir.nodes import Value, narrow
from flambeau.ir.scalar import abs_, ceil, clamp, eq, floor
from flambeau.ir.scalar import maximum as larger
from flambeau.ir.scalar import minimum as smaller
from flambeau.ops.facts import EVERYWHERE, NOWHERE, Exact, describe
from flambeau.ops.fixedpoint import resize_bytes
from flambeau.ops.plane import Place, cubic_weights, pick, split
from flambeau.ops.registry import lower
from flambeau.ops.separable import Column, column, gather_all, position_table, table
from flambeau.torch_compat.decomp import suggest_memory_format, upsample_compute_output_size
from flambeau.torch_compat.ops import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Axis:
    """One dimension resized from n to m. `factor` is the scale that the user gave; it takes precedence over n / m."""

    n: Index
    m: Index
    factor: float | None
    align: bool
    dtype: DType  # of positions and weights

    # An output reads input y if its source position is in [y - before, y + after); in halves, to stay with integers.
    before = after = 0

    @property
    def slack(self) -> int:
        """Extra outputs to check on either side, if rounding may change which input an output reads."""
        return 0

    @property
    def shift(self) -> int:
        """The offset of sources in half outputs: the source of output o is scale * (o + shift/2) - back/2."""
        return 0

    @property
    def back(self) -> int:
        return 0

    @property
    def given(self) -> bool:
        return self.factor is not None and self.factor > 0 and not self.align

    @property
    def scale(self) -> Expr:
        """The number of input positions per output position."""
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
        """The scale as a fraction of integers; None if it is not one."""
        if self.align:
            return self.n - 1, self.m - 1
        if not self.given:
            return self.n, self.m
        assert self.factor is not None
        f = Fraction(self.factor).limit_denominator(1024)
        if float(f) == self.factor and self.n * f.numerator is self.m * f.denominator:
            return self.n, self.m
        return None

    @property
    def last(self) -> Expr:
        return index_value(self.n - 1, self.dtype)

    def stays(self) -> bool:
        """Whether the size stays unchanged."""
        return self.n is self.m and self.ratio is not None

    @property
    def copies(self) -> bool:
        return self.stays()

    def rows(self) -> Column:
        """The weights of all outputs, for as many inputs as there are taps."""
        count = len(self.taps(as_index(0)))

        def span(o: Index) -> tuple[Index, Index, int | None]:
            first = self.taps(o)[0][0]
            low = computed(cast(first, torch.int64), 0, self.n.bounds()[1])
            return low, low + count, count

        return column(self.m, self.n, span, lambda y, o: self.weight(o, y), self.dtype)

    def outputs(self) -> Column:
        """For every input, the outputs that read it, and their weights."""
        return column(self.n, self.m, self.reach, self.weight, self.dtype)

    def taps(self, o: Index) -> list[tuple[Expr, Expr]]:
        """The positions that output o reads (whole numbers in [0, n)), and their weights."""
        raise NotImplementedError

    def weight(self, o: Index, y: Index) -> Expr:
        """The weight of input y in output o."""
        raise NotImplementedError

    def reach(self, y: Index) -> tuple[Index, Index, int | None]:
        """The outputs [low, high) that may read input y, and the largest such count over all y, if known."""
        if self.n is as_index(1) or self.m is as_index(1):
            return as_index(0), self.m, int(self.m) if self.m.is_const else None
        ratio = self.ratio
        if ratio is None:
            return self._reach_by_float(y)
        num, den = ratio

        def first(past: int, at: IndexLike) -> Index:
            """The first output whose source position is at least `at + past/2`."""
            return ceildiv((as_index(at) * 2 + past + self.back) * den - num * self.shift, num * 2)

        def ends(at: IndexLike) -> tuple[Index, Index]:
            return (maximum(first(-self.before, at) - self.slack, 0),
                    minimum(first(self.after, at) + self.slack, self.m))

        return (*ends(y), self.most)

    @property
    def most(self) -> int | None:
        """The largest number of outputs that may read one input; None if sizes are unknown."""
        if not (self.n.is_const and self.m.is_const):
            return None
        low, high = self.spans(self.slack)
        return int((high - low).max()) if low.numel() else 0

    def spans(self, slack: int) -> tuple[Tensor, Tensor]:
        """The outputs [low, high) for each input, by the arithmetic of `reach`."""
        n, m, ratio = int(self.n), int(self.m), self.ratio

        def first(past: int) -> Tensor:
            at = torch.arange(n) * 2 + past + self.back
            if ratio is None:
                assert self.factor is not None
                return (at.double() * (self.factor / 2) - self.shift / 2).ceil().long()
            num, den = map(int, ratio)
            return -((num * self.shift - at * den) // (num * 2))

        low, high = (first(-self.before) - slack).clamp(0, m), (first(self.after) + slack).clamp(0, m)
        if ratio is None:
            high[-1:] = m
        return low, high

    def _reach_by_float(self, y: Index) -> tuple[Index, Index, int | None]:
        assert self.factor is not None
        factor = self.factor

        def first(past: int) -> Expr:
            at = index_value(y * 2 + past + self.back, torch.float64) * (factor / 2) - self.shift / 2
            return cast(ceil(at), torch.int64)

        m = index_value(self.m)
        top = self.m.bounds()[1]
        # If the given factor is too small for the sizes, the last input is read by all outputs beyond it.
        high = where(eq(index_value(y), index_value(self.n - 1)), m,
                     clamp(first(self.after) + self.slack, 0, m))
        low = clamp(first(-self.before) - self.slack, 0, m)
        return computed(low, 0, top), computed(high, 0, top), self.most


class Nearest(Axis):
    after = 2

    @property
    def exact(self) -> bool:
        """Whether the ratio is integral and rounding cannot change the source, so that integer arithmetic is used."""
        if self.ratio is None or not (self.n.is_const and self.m.is_const):
            return False
        n, m = int(self.n), int(self.m)
        return n % m == 0 or (m % n == 0 and self.safe(m // n))

    @property
    def slack(self) -> int:
        return 0 if self.exact or rounds_well(self) else 1

    def safe(self, k: int) -> bool:
        """Whether rounding o * (1/k) cannot go below an integer, because 1/k is exact."""
        return k & (k - 1) == 0

    def position(self, o: Index) -> Expr:
        return index_value(o, self.dtype) * self.scale

    def positions(self, o: Tensor, scale: float) -> Tensor:
        """The positions of all outputs."""
        return o * scale

    def source(self, o: Index) -> Expr:
        """floor(o * scale)"""
        if self.exact:
            return index_value(((o * 2 + self.shift) * self.n) // (self.m * 2))
        # ATen takes the floor of a single float whatever the dtype is.
        x = floor(cast(self.position(o), torch.float32))
        return cast(smaller(x, index_value(self.n - 1, torch.float32)), torch.int64)

    def weight(self, o: Index, y: Index) -> Expr:
        return cast(eq(self.source(o), index_value(y)), self.dtype)

    def outputs(self) -> Column:
        """For sizes known only at run time, use a table of first outputs: checking each source takes longer."""
        if self.most is not None or self.ratio is None or build.graph().capabilities.waits_for_memory:
            return super().outputs()

        def first(y: Index) -> Expr:
            """The first output whose source is y or later: an estimate, off by at most the slack, is corrected."""
            at, total = self.reach(y)[0], index_value(self.reach(y)[0])
            for k in range(2 * self.slack):
                total = total + cast(self.source(at + k) < index_value(y), torch.int64)
            return smaller(total, index_value(self.m))

        starts = position_table(self.n + 1, self.m + 1, first)
        return column(self.n, self.m, lambda y: (starts(y), starts(y + 1), None), lambda o, y: const(1, self.dtype),
                      self.dtype)


class NearestExact(Nearest):
    """Nearest to the centre of the output cell."""

    @property
    def shift(self) -> int:
        return 1

    def safe(self, k: int) -> bool:
        """Whether k is even: centres then stay half a cell away from integers."""
        return k % 2 == 0

    def position(self, o: Index) -> Expr:
        return larger(self.scale * (index_value(o, self.dtype) + 0.5) - 0.5, 0) + 0.5

    def positions(self, o: Tensor, scale: float) -> Tensor:
        return (scale * (o + 0.5) - 0.5).clamp(min=0) + 0.5


@functools.cache
def rounds_well(axis: Nearest) -> bool:
    """Whether the rounded source of each output is the input that exact arithmetic says reaches it."""
    scale = axis.scale
    if scale.op != "const" or not (axis.n.is_const and axis.m.is_const):
        return False
    at = axis.positions(torch.arange(int(axis.m), dtype=axis.dtype), scale.attr)
    sources = at.float().floor().clamp(max=int(axis.n) - 1).long()
    low, high = (end[sources] for end in axis.spans(0))
    o = torch.arange(int(axis.m))
    return bool(((low <= o) & (o < high)).all())


class Linear(Axis):
    before = after = 2

    @property
    def copies(self) -> bool:
        """Whether ATen copies: if the size is unchanged, whatever the scale."""
        return self.n is self.m

    @property
    def shift(self) -> int:
        return 0 if self.align else 1

    @property
    def back(self) -> int:
        return self.shift

    def source(self, o: Index) -> Expr:
        x = index_value(o, self.dtype)
        return x * self.scale if self.align else self.scale * (x + 0.5) - 0.5

    def taps(self, o: Index) -> list[tuple[Expr, Expr]]:
        x = larger(self.source(o), 0)
        left = smaller(floor(x), self.last)
        t = smaller(x - left, 1)
        return [(left, 1 - t), (smaller(left + 1, self.last), t)]

    def weight(self, o: Index, y: Index) -> Expr:
        return self.close_to(clamp(self.source(o), 0, self.last), y)

    def close_to(self, x: Expr, y: Index) -> Expr:
        return larger(1 - abs_(x - index_value(y, self.dtype)), 0)

    def outputs(self) -> Column:
        if (self.n.is_const and self.m.is_const) or build.graph().capabilities.waits_for_memory:
            return super().outputs()
        source = table(self.m, lambda o: clamp(self.source(o), 0, self.last))
        return column(self.n, self.m, self.reach, lambda o, y: self.close_to(source(o), y), self.dtype)


class Cubic(Linear):
    before = after = 4
    outputs = Axis.outputs

    @property
    def copies(self) -> bool:
        return self.stays()

    def taps(self, o: Index) -> list[tuple[Expr, Expr]]:
        x = self.source(o)
        left = floor(x)
        return [(clamp(left + (k - 1), 0, self.last), w) for k, w in enumerate(cubic_weights(x - left, -0.75))]

    def weight(self, o: Index, y: Index) -> Expr:
        at = index_value(y, self.dtype)
        total = const(0, self.dtype)
        for position, w in self.taps(o):
            total = total + where(eq(position, at), w, 0)
        return total


# ---- forward and backward ------------------------------------------------------------------------------


def at_nearest(x: Value, axes: Sequence[Nearest]) -> Value:
    rank = len(axes)

    def source_of(a: Nearest) -> Callable[[Index], Index]:
        return (lambda o: computed(a.source(o))) if a.exact else position_table(a.m, a.n, a.source)

    sources = [source_of(a) for a in axes]

    def body(i: Place) -> Expr:
        lead, o = split(i, rank)
        return x.load((*lead, *(s(k) for s, k in zip(sources, o, strict=True))))

    return build.pointwise((*x.shape[:-rank], *(a.m for a in axes)), body)


def blend(x: Value, axes: Sequence[Axis]) -> Value:
    """Interpolate the last dimension first, in ATen's order of additions."""
    if build.graph().capabilities.waits_for_memory:  # avoids storing the result between two dimensions
        return blend_at_once(x, axes)
    out = x
    known: dict[Axis, tuple[Value, Value]] = {}
    for dim, axis in reversed(list(enumerate(axes, x.rank - len(axes)))):
        if not axis.copies:
            if axis not in known:
                known[axis] = tap_tables(axis)
            out = blend_along(out, dim, axis, *known[axis])
    return build.pointwise(out.shape, lambda i: out.load(i), x.dtype)


def blend_at_once(x: Value, axes: Sequence[Axis]) -> Value:
    first = x.rank - len(axes)

    def along(i: Place, dim: int, at: Place) -> Expr:
        """The sum over the taps of this dimension and all later ones."""
        if dim == x.rank:
            return cast(x.load(at), axes[0].dtype)
        axis = axes[dim - first]
        if axis.copies:
            return along(i, dim + 1, (*at, i[dim]))
        top = axis.n.bounds()[1]
        parts = [along(i, dim + 1, (*at, computed(cast(place, torch.int64), 0, None if top is None else top - 1)))
                 * weight for place, weight in axis.taps(i[dim])]
        return functools.reduce(operator.add, parts)

    shape = (*x.shape[:first], *(a.m for a in axes))
    return build.pointwise(shape, lambda i: along(i, first, tuple(i[:first])), x.dtype)


def tap_tables(axis: Axis) -> tuple[Value, Value]:
    """Positions and weights of all outputs, tap by tap."""
    shape = (as_index(len(axis.taps(as_index(0)))), axis.m)
    return (build.pointwise(shape, lambda i: pick([at for at, _ in axis.taps(i[1])], i[0]), narrow(axis.n)),
            build.pointwise(shape, lambda i: pick([w for _, w in axis.taps(i[1])], i[0])))


def blend_along(x: Value, dim: int, axis: Axis, positions: Value, weights: Value) -> Value:
    top = axis.n.bounds()[1]

    def body(i: Place) -> Expr:
        total: Expr | None = None
        for k in range(int(positions.shape[0])):
            at = computed(positions.load((k, i[dim])), 0, None if top is None else top - 1)
            part = cast(x.load((*i[:dim], at, *i[dim + 1:])), axis.dtype) * weights.load((k, i[dim]))
            total = part if total is None else total + part
        assert total is not None
        return total

    return build.pointwise((*x.shape[:dim], axis.m, *x.shape[dim + 1:]), body)


def positions_in(x: DType, kind: type[Axis]) -> DType:
    """The dtype of positions: for bytes, ATen computes weights in float64, but the nearest byte in float32."""
    return opmath(x) if is_float(x) else torch.float32 if issubclass(kind, Nearest) else torch.float64


def resizing(kind: type[Axis], rank: int, aligned: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The lowerings of op(x, output_size, [align_corners], *scales) and its backward."""

    def axes_of(sizes: Sequence[Index], output_size: Sequence[IndexLike], rest: Sequence[Any], dtype: DType
                ) -> list[Any]:
        align = bool(rest[0]) if aligned else False
        scales = [*rest[1 if aligned else 0:], *(None,) * rank][:rank]
        return [kind(n, as_index(m), f, align, positions_in(dtype, kind))
                for n, m, f in zip(sizes, output_size, scales, strict=True)]

    def forward(x: Value, output_size: Sequence[IndexLike], *rest: Any, **named: Any) -> Any:
        axes = axes_of(x.shape[-rank:], output_size, (*rest, *named.values()), x.dtype)
        if issubclass(kind, Nearest):
            return at_nearest(x, axes)
        if is_float(x.dtype):
            return blend(x, axes)
        return resize_bytes(x, {dim: a.rows() for dim, a in enumerate(axes, x.rank - rank) if not a.stays()})

    def backward(grad: Value, output_size: Sequence[IndexLike], input_size: Sequence[IndexLike], *rest: Any,
                 **named: Any) -> Value:
        sizes = [as_index(n) for n in input_size][-rank:]
        axes = axes_of(sizes, output_size, (*rest, *named.values()), grad.dtype)
        known = {axis: axis.outputs() for axis in dict.fromkeys(axes) if not axis.copies}
        out = gather_all(grad, {dim: known[axis] for dim, axis in enumerate(axes, grad.rank - rank)
                                if axis in known})
        return build.pointwise(out.shape, lambda i: out.load(i), grad.dtype)

    return forward, backward


# ---- registration --------------------------------------------------------------------------------------


def by_factors(plain: OpOverload) -> Callable[..., Any]:
    """op(x, output_size or None, [align_corners], scale_factors or None) as a call of the plain operator."""

    def kernel(x: torch.Tensor, output_size: Any, *rest: Any) -> Any:
        *align, factors = rest
        size = upsample_compute_output_size(x.size(), output_size, factors)
        return plain(x, size, *align, *(factors or ()))

    return kernel


def gradient_shape(grad: torch.Tensor, output_size: Any, input_size: Any, *rest: Any, **named: Any) -> torch.Tensor:
    return grad.new_empty(input_size).to(memory_format=suggest_memory_format(grad))


def nearest_shape(x: torch.Tensor, output_size: Any, *rest: Any, **named: Any) -> torch.Tensor:
    """The result's shape also for an empty batch, which eager supports; torch's own rule tries to, but fails."""
    if x.dim() != len(output_size) + 2 or any(n <= 0 for n in (*x.shape[1:], *output_size)):
        raise RuntimeError(f"Input and output sizes should be greater than 0, but got input {list(x.shape)} and output "
                           f"{list(output_size)}")
    return x.new_empty((*x.shape[:2], *output_size)).to(memory_format=suggest_memory_format(x))


def lower_resizing(name: str, forward: Callable[..., Any], backward: Callable[..., Any], group: str = "",
                   exact: Exact = NOWHERE) -> None:
    """Register both directions; the form with a list of factors calls the plain one. Shapes of gradients may be
    symbolic, which torch's own rule does not support."""
    packet, gradient = getattr(aten, name), getattr(aten, f"{name}_backward")
    shape = {"traced_shape": nearest_shape} if "nearest" in name else {}
    lower(packet.default, group=group, exact=exact, **shape)(forward)
    lower(gradient.default, group=group, traced_shape=gradient_shape)(backward)
    describe(packet.vec, traced=by_factors(packet.default))


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
    _exact = EVERYWHERE if issubclass(_kind, Nearest) else NOWHERE
    lower_resizing(_name, _forward, _backward, "resizing", _exact)
describe(aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default, aten.upsample_bilinear2d.default,
         aten.upsample_bicubic2d.default, strides="suggested")
