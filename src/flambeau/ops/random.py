"""Random numbers: Philox 4x32-10. A number depends only on the seed and the position of the element.

Every random operator has its own seed, drawn anew for each run. An element's linear index is its counter, which gives
it four words of 32 bits. Elements that need only one word share a draw among four neighbours where possible. A single
seed with a number for each operator would work too, but a number in the text of a kernel would give equal layers
different kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import SUPPORTED, DType, highest, is_float, opmath
from flambeau.ir.expr import Expr, binary, cast, const, index_value, require, where
from flambeau.ir.faults import Fault
from flambeau.ir.index import Index, IndexLike, as_index
from flambeau.ir.nodes import Value, contiguous_strides
from flambeau.ir.scalar import ceil, cos, eq, exp, log, maximum, minimum, philox, rough_log2, sqrt, tan
from flambeau.ops.facts import WIDE, describe
from flambeau.ops.registry import broadcast_shapes, load_at, lower, pointwise, scalar_at

aten = torch.ops.aten


def seed() -> Value:
    """A new seed: a scalar in memory that the executor fills before each run."""
    g = build.graph()
    g.seeds.append(g.add_buffer((), torch.int64, f"seed{len(g.seeds)}", ()).name)
    return g.whole(g.seeds[-1])


class Stream:
    """The random bits of one element, in the forms that distributions need."""

    def __init__(self, seed: Value, place: Index, shared: bool) -> None:
        self._seed, self._place, self._shared = seed.load(()), place, shared

    def word(self, k: int) -> Expr:
        """The k-th word of 32 bits, as an int64."""
        if not self._shared:
            return philox(self._seed, 0, index_value(self._place), k)
        if k:
            raise ValueError("a shared draw has one word for each element")
        words = [philox(self._seed, 0, index_value(self._place // 4), n) for n in range(4)]
        which, out = index_value(self._place % 4), words[3]
        for n in (2, 1, 0):
            out = where(eq(which, n), words[n], out)
        return out

    def uniform(self, dtype: DType, pair: int = 0) -> Expr:
        """A number in [0, 1), a multiple of the spacing just below one, so that no rounding makes it one."""
        compute, first = opmath(dtype), self.word(2 * pair)
        if dtype is torch.float64:
            return (_small(first, 5, compute) * 2.0**26 + _small(self.word(2 * pair + 1), 6, compute)) * 2.0**-53
        digits = _MANTISSA[dtype]
        return _small(first, 32 - digits, compute) * 2.0**-digits

    def open_uniform(self, dtype: DType) -> Expr:
        """A number in (0, 1], with full precision near zero, which determines the tail of a logarithm."""
        if dtype is torch.float64:
            return self.uniform(dtype) + 2.0**-53
        if self._shared:  # one conversion of all bits, in which the largest numbers round to one
            return cast(cast(self.word(0), torch.uint32), torch.float32) * 2.0**-32 + 2.0**-33
        high, low = _small(self.word(0), 16, torch.float32), self.word(0) & 0xFFFF
        return high * 2.0**-16 + _small(low + 1, 0, torch.float32) * 2.0**-32

    def normal(self, dtype: DType) -> Expr:
        """A normal number by the Box-Muller transform."""
        radius = sqrt(-2 * log(self.open_uniform(dtype)))
        return radius * cos(2 * math.pi * self.uniform(opmath(dtype), pair=1))

    def exponential(self, dtype: DType) -> Expr:
        """An exponential number, never zero: where the logarithm would be zero, it is about the spacing below one."""
        u = self.open_uniform(dtype)
        number = rough_log2(u) * -math.log(2) if self._shared else -log(u)
        return maximum(number, torch.finfo(opmath(dtype)).eps / 2)

    def below(self, count: Any) -> Expr:
        """An integer in [0, count), as a uint64; count is a number up to 2^64 or an Index.

        It is the high word of bits * count, which spreads the unavoidable bias over the whole range.
        """
        high, low = (cast(self.word(k), torch.uint64) for k in (0, 1))
        if isinstance(count, Index):
            count = cast(index_value(count), torch.uint64)
        elif count == 2**64:
            return binary("shl", high, 32) | low
        elif count <= _SMALL_RANGE:
            return binary("shr", high * count, 32)
        else:
            count = const(count, torch.uint64)
        # A 64 x 64 bit product in 32-bit words; no partial sum exceeds 64 bits.
        count_high, count_low = binary("shr", count, 32), count & _WORD
        middle = high * count_low + binary("shr", low * count_low, 32)
        other = low * count_high + (middle & _WORD)
        return high * count_high + binary("shr", middle, 32) + binary("shr", other, 32)


_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_SMALL_RANGE = 2**28  # as in ATen, which draws 64 bits for larger ranges
_WORD = 2**32 - 1


def _small(word: Expr, shift: int, dtype: DType) -> Expr:
    """word >> shift, which has less than 32 bits, as a float; via int32, which every vector unit converts."""
    return cast(cast(binary("shr", word, shift) if shift else word, torch.int32), dtype)


def draw_word(seed: Value, row: Index, column: Index) -> Expr:
    """A float32 number in [0, 1) for a place of a matrix; row and column are the counter."""
    word = philox(seed.load(()), index_value(row), index_value(column), 0)
    return _small(word, 8, torch.float32) * 2.0**-24


Body = Callable[[Stream, tuple[Index, ...]], Expr]


def draw(shape: Sequence[IndexLike], dtype: DType, body: Body, bits: DType | None = None) -> Value:
    """The value of `shape` whose element i is body(random bits, i). `bits`: the precision of the number that the body
    draws, if it draws at most one."""
    if dtype not in SUPPORTED:
        return NotImplemented
    sizes = tuple(as_index(n) for n in shape)
    strides, source = contiguous_strides(sizes), seed()
    shared = bits is not None and bits is not torch.float64 and build.graph().capabilities.shared_words

    def at(i: tuple[Index, ...]) -> Expr:
        return body(Stream(source, sum((n * s for n, s in zip(i, strides, strict=True)), as_index(0)), shared), i)

    return build.pointwise(sizes, at, dtype)


def without_generator(*ops: Any, **facts: Any) -> Callable[[Any], Any]:
    """`@lower` for operators that accept a generator: if one is given, ATen draws, because it owns that state."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        @lower(*ops, **facts)
        @wraps(fn)
        def lowered(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if generator is None else NotImplemented

        return lowered

    return register


describe(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
         strides="preserved")
describe(aten.normal.Tensor_Tensor, strides="contiguous")


# ---- uniform -------------------------------------------------------------------------------------------


def below(high: float, dtype: DType) -> float:
    """The greatest number of the dtype below `high` (subnormals aside)."""
    if high == 0:
        return -torch.finfo(dtype).tiny
    fraction, exponent = math.frexp(high)
    digits = _MANTISSA[dtype] + (fraction == 0.5)  # numbers below a power of two are spaced more closely
    return math.ldexp(math.ceil(math.ldexp(fraction, digits)) - 1, exponent - digits)


def between(size: Sequence[IndexLike], dtype: DType, low: float, high: float) -> Value:
    """Numbers in [low, high), drawn with at least float32 precision, since a narrow dtype has few numbers in [0, 1).
    Results that would round to the upper end become the number below it."""
    compute = opmath(dtype)
    unit = (low, high) == (0, 1) and compute is dtype  # needs no rounding

    def body(r: Stream, i: tuple[Index, ...]) -> Expr:
        value = r.uniform(compute)
        return value if unit else minimum(value * (high - low) + low, max(low, below(high, dtype)))

    return draw(size, dtype, body, compute)


@without_generator(aten.rand)
def rand(size: Sequence[IndexLike], *, dtype: DType | None = None, **place: Any) -> Value:
    return between(size, dtype or torch.get_default_dtype(), 0.0, 1.0)


without_generator(aten.rand_like)(lambda x, dtype=None, **place: rand(x.shape, dtype=dtype or x.dtype))


@without_generator(aten.uniform)
def uniform(x: Value, low: float = 0.0, high: float = 1.0) -> Value:
    return between(x.shape, x.dtype, low, high)


# ---- normal and derived distributions ------------------------------------------------------------------


@without_generator(aten.randn)
def randn(size: Sequence[IndexLike], *, dtype: DType | None = None, **place: Any) -> Value:
    dtype = dtype or torch.get_default_dtype()
    return draw(size, dtype, lambda r, i: r.normal(dtype))


without_generator(aten.randn_like)(lambda x, dtype=None, **place: randn(x.shape, dtype=dtype or x.dtype))


@without_generator(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Any, std: Any = 1.0) -> Value:
    """Normal numbers, in the dtype of the mean if that is a tensor."""
    tensors = [v for v in (mean, std) if isinstance(v, Value)]
    dtype = tensors[0].dtype
    compute = opmath(dtype)

    def body(r: Stream, i: tuple[Index, ...]) -> Expr:
        width = scalar_at(std, i, dtype, compute)
        width = require(width, width >= 0, Fault.DEVIATION) if isinstance(std, Value) else width
        return r.normal(dtype) * width + scalar_at(mean, i, dtype, compute)

    return draw(broadcast_shapes(*(v.shape for v in tensors)), dtype, body)


@without_generator(aten.normal.float_float)
def normal_of_size(mean: float, std: float, size: Sequence[IndexLike], *, dtype: DType | None = None,
                   **place: Any) -> Value:
    dtype = dtype or torch.get_default_dtype()
    return draw(size, dtype, lambda r, i: r.normal(dtype) * std + mean)


@without_generator(aten.normal_functional)
def normal_functional(x: Value, mean: float = 0.0, std: float = 1.0) -> Value:
    return normal_of_size(mean, std, x.shape, dtype=x.dtype)


@without_generator(aten.log_normal)
def log_normal(x: Value, mean: float = 1.0, std: float = 2.0) -> Value:
    return draw(x.shape, x.dtype, lambda r, i: exp(r.normal(x.dtype) * std + mean))


# ---- other continuous distributions --------------------------------------------------------------------


@without_generator(aten.exponential, group="draws")
def exponential(x: Value, lambd: float = 1.0) -> Value:
    return draw(x.shape, x.dtype, lambda r, i: r.exponential(x.dtype) * (1 / lambd), x.dtype)


@without_generator(aten.cauchy)
def cauchy(x: Value, median: float = 0.0, sigma: float = 1.0) -> Value:
    """Cauchy numbers: the cotangent of a number near zero, where floats are dense, with a random sign."""

    def body(r: Stream, i: tuple[Index, ...]) -> Expr:
        size = 1 / tan(r.open_uniform(x.dtype) * (math.pi / 2))
        return where(r.word(3) < 2**31, size, -size) * sigma + median

    return draw(x.shape, x.dtype, body)


# ---- integers ------------------------------------------------------------------------------------------


def _integer_between(r: Stream, low: Any, high: Any) -> Expr:
    """An integer in [low, high), computed unsigned until the end, because the range may be most of the integers."""
    count = high - low
    first = index_value(low) if isinstance(low, Index) else const(low, torch.int64)
    count = int(count) if isinstance(count, Index) and count.is_const else count
    return cast(r.below(count) + cast(first, torch.uint64), torch.int64)


@without_generator(aten.randint.low, aten.randint.low_generator)
def randint(low: Any, high: Any, size: Sequence[IndexLike], *, dtype: DType | None = torch.int64,
            **place: Any) -> Value:
    return draw(size, dtype or torch.int64, lambda r, i: _integer_between(r, low, high))


without_generator(aten.randint.default, aten.randint.generator)(
    lambda high, size, **options: randint(0, high, size, **options))


@without_generator(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like(x: Value, low: Any, high: Any, *, dtype: DType | None = None, **place: Any) -> Value:
    return randint(low, high, x.shape, dtype=dtype or x.dtype)


without_generator(aten.randint_like.default, aten.randint_like.generator)(
    lambda x, high, **options: randint_like(x, 0, high, **options))


@without_generator(aten.random)
def random(x: Value, *bounds: Any) -> Any:
    """Random integers; without an upper bound, up to the last integer below which the dtype represents all."""
    low, high = (0, *bounds) if len(bounds) == 1 else bounds or (0, None)
    last = 2 ** _MANTISSA[x.dtype] if is_float(x.dtype) else int(highest(x.dtype))
    if is_float(x.dtype) and any(isinstance(n, int) and not -last <= n <= last + 1 for n in (low, high)):
        return NotImplemented  # eager warns, with its own text
    return randint(low, 1 + last if high is None else high, x.shape, dtype=x.dtype)


@without_generator(aten.geometric)
def geometric(x: Value, p: float) -> Value:
    """Trials up to the first success: an exponential number divided by -log of the chance of failure, rounded up."""
    compute = opmath(x.dtype) if is_float(x.dtype) else torch.float64
    rate = -math.log1p(-p) if p < 1 else math.inf
    return draw(x.shape, x.dtype, lambda r, i: ceil(r.exponential(compute) * (1 / rate)), compute)


# ---- coins ---------------------------------------------------------------------------------------------


@without_generator(aten.bernoulli.Tensor, group="draws")
def bernoulli_tensor(x: Value, p: Value) -> Value:
    compute = torch.float64 if p.dtype is torch.float64 else torch.float32

    def coin(r: Stream, i: tuple[Index, ...]) -> Expr:
        chance = cast(load_at(p, i), compute)
        return r.uniform(compute) < require(chance, (chance >= 0) & (chance <= 1), Fault.PROBABILITY)

    return draw(x.shape, x.dtype, coin, compute)


without_generator(aten.bernoulli.default, group="draws")(lambda p: bernoulli_tensor(p, p))


@without_generator(aten.bernoulli.p, group="draws")
def bernoulli_p(x: Value, p: float) -> Value:
    return draw(x.shape, x.dtype, lambda r, i: r.uniform(torch.float32) < p, torch.float32)


@lower(aten.native_dropout_backward, exact=WIDE, group="dropout")
@pointwise
def _masked_scale(x: Expr, mask: Expr, scale: Expr) -> Expr:
    return x * mask * scale


@lower(aten.native_dropout, group="dropout")
def native_dropout(x: Value, p: float, train: bool | None = True) -> tuple[Value, Value]:
    if train is False:
        ones = build.pointwise(x.shape, lambda i: const(True, torch.bool))
        return build.pointwise(x.shape, x.load), ones
    mask = draw(x.shape, torch.bool, lambda r, i: r.uniform(torch.float32) < 1 - p, torch.float32)
    return _masked_scale(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


@without_generator(aten.rrelu_with_noise_functional)
def rrelu_with_noise(x: Value, noise: Value, lower: float = 1 / 8, upper: float = 1 / 3,
                     training: bool = False) -> tuple[Value, Value]:
    """A leaky relu with random slopes in training; the noise saves them for the gradient."""
    if not training:
        slope = (lower + upper) / 2
        return pointwise(lambda v: where(v > 0, v, v * slope))(x), noise
    compute = opmath(x.dtype)

    def body(r: Stream, i: tuple[Index, ...]) -> Expr:
        return where(cast(x.load(i), compute) <= 0, r.uniform(compute) * (upper - lower) + lower, 1)

    noise = draw(x.shape, x.dtype, body)
    return pointwise(lambda v, slope: v * slope)(x, noise), noise
