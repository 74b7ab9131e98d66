"""Random numbers: Philox 4x32-10, counted by element, so that a draw depends on its seed and its place alone.

Every random operator has a seed, drawn anew for each run. An element's linear index is its counter, and gives it four
words of 32 bits. With a number of the operator in the kernel instead, equal layers would have different kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch._prims  # defines torch.ops.prims

from flambeau.ir import build
from flambeau.ir.dtypes import SUPPORTED, DType, is_float, opmath
from flambeau.ir.expr import Expr, binary, cast, const, index_value, where
from flambeau.ir.index import Index, IndexLike, as_index
from flambeau.ir.nodes import Value, contiguous_strides
from flambeau.ir.scalar import ceil, cos, exp, log, maximum, philox, sqrt, tan
from flambeau.ops.registry import broadcast_shapes, load_at, lower, pointwise, scalar_at

aten = torch.ops.aten
prims = torch.ops.prims


def seed() -> Value:
    """A seed of its own: a scalar in memory that the executor fills before each run."""
    g = build.graph()
    g.seeds.append(g.add_buffer((), torch.int64, f"seed{len(g.seeds)}", ()).name)
    return g.whole(g.seeds[-1])


class Stream:
    """The random bits of one element, as the distributions want them."""

    def __init__(self, seed: Value, place: Index) -> None:
        self._seed, self._place = seed.load(()), index_value(place)

    def word(self, k: int) -> Expr:
        """32 bits as an int64."""
        return philox(self._seed, 0, self._place, k)

    def bits(self, count: int) -> Expr:
        """An integer in [0, 2^count), count up to 63, from the first two words."""
        return binary("shl", self.word(0), count - 32) | binary("shr", self.word(1), 64 - count)

    def uniform(self, dtype: DType, pair: int = 0) -> Expr:
        """In [0, 1), a multiple of the last place below one in that dtype, so that no rounding makes it one."""
        compute, first, second = opmath(dtype), self.word(2 * pair), self.word(2 * pair + 1)
        if dtype is torch.float64:
            return (_small(first, 5, compute) * 2.0**26 + _small(second, 6, compute)) * 2.0**-53
        digits = _MANTISSA[dtype]
        return _small(first, 32 - digits, compute) * 2.0**-digits

    def open_uniform(self, dtype: DType) -> Expr:
        """In (0, 1], with every bit there is near zero: a logarithm makes the tail of a distribution of it."""
        if dtype is torch.float64:
            return self.uniform(dtype) + 2.0**-53
        low = self.word(0) & 0xFFFF
        return _small(self.word(0), 16, torch.float32) * 2.0**-16 + _small(low + 1, 0, torch.float32) * 2.0**-32

    def normal(self, dtype: DType) -> Expr:
        """Box and Muller's transform."""
        radius = sqrt(-2 * log(self.open_uniform(dtype)))
        return radius * cos(2 * math.pi * self.uniform(opmath(dtype), pair=1))

    def exponential(self, dtype: DType) -> Expr:
        """Never zero: numbers rounded to one have a logarithm of about the last place below one."""
        return maximum(-log(self.open_uniform(dtype)), torch.finfo(opmath(dtype)).eps / 2)

    def below(self, count: Any) -> Expr:
        """An int64 in [0, count); count is a number up to 2^64 or an Index."""
        if isinstance(count, Index):
            return binary("mod", self.bits(63), index_value(count))
        if count <= _SMALL_RANGE:
            return binary("shr", self.word(0) * count, 32)
        if count <= 2**63:
            return self.bits(63) if count == 2**63 else binary("mod", self.bits(63), const(count, torch.int64))
        # Beyond the signed integers: all 64 bits, and what lies past the count wraps around once.
        raw = binary("shl", self.word(0), 32) | self.word(1)
        if count == 2**64:
            return raw
        flip = const(-(2**63), torch.int64)
        return where((raw ^ flip) >= (const(count, torch.int64) ^ flip), raw - const(count, torch.int64), raw)


_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_SMALL_RANGE = 2**28  # as in ATen: up to here, 32 bits make every value equally likely, but for one part in 16


def _small(word: Expr, shift: int, dtype: DType) -> Expr:
    """word >> shift, of less than 32 bits, as a float; by way of int32, which every vector unit converts."""
    return cast(cast(binary("shr", word, shift) if shift else word, torch.int32), dtype)


def draw(shape: Sequence[IndexLike], dtype: DType, body: Callable[[Stream, tuple[Index, ...]], Expr]) -> Value:
    """The value of `shape` whose element i is body(random bits, i)."""
    if dtype not in SUPPORTED:
        return NotImplemented
    sizes = tuple(as_index(n) for n in shape)
    strides, source = contiguous_strides(sizes), seed()

    def at(i: tuple[Index, ...]) -> Expr:
        return body(Stream(source, sum((n * s for n, s in zip(i, strides, strict=True)), as_index(0))), i)

    return build.pointwise(sizes, at, dtype)


def without_generator(*ops: Any) -> Callable[[Any], Any]:
    """`@lower` for operators that may be given a generator: its state is its own, so ATen draws from it."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        @lower(*ops)
        @wraps(fn)
        def lowered(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if generator is None else NotImplemented

        return lowered

    return register


# ---- uniform -------------------------------------------------------------------------------------------


@without_generator(aten.rand)
def rand(size: Sequence[IndexLike], *, dtype: DType | None = None, **place: Any) -> Value:
    dtype = dtype or torch.get_default_dtype()
    return draw(size, dtype, lambda r, i: r.uniform(dtype))


@without_generator(aten.rand_like)
def rand_like(x: Value, *, dtype: DType | None = None, **place: Any) -> Value:
    return rand(x.shape, dtype=dtype or x.dtype)


@without_generator(aten.uniform)
def uniform(x: Value, low: float = 0.0, high: float = 1.0) -> Value:
    return draw(x.shape, x.dtype, lambda r, i: r.uniform(x.dtype) * (high - low) + low)


@without_generator(prims.uniform)
def prims_uniform(shape: Sequence[IndexLike], *, low: float, high: float, dtype: DType, **place: Any) -> Value:
    return draw(shape, dtype, lambda r, i: r.uniform(dtype) * (high - low) + low)


# ---- normal and what is made of it ---------------------------------------------------------------------


@without_generator(aten.randn)
def randn(size: Sequence[IndexLike], *, dtype: DType | None = None, **place: Any) -> Value:
    dtype = dtype or torch.get_default_dtype()
    return draw(size, dtype, lambda r, i: r.normal(dtype))


@without_generator(aten.randn_like)
def randn_like(x: Value, *, dtype: DType | None = None, **place: Any) -> Value:
    return randn(x.shape, dtype=dtype or x.dtype)


@without_generator(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Any, std: Any = 1.0) -> Value:
    """In the dtype of the mean, if that is a tensor."""
    tensors = [v for v in (mean, std) if isinstance(v, Value)]
    dtype = tensors[0].dtype
    compute = opmath(dtype)
    return draw(broadcast_shapes(*(v.shape for v in tensors)), dtype, lambda r, i: (
        r.normal(dtype) * scalar_at(std, i, dtype, compute) + scalar_at(mean, i, dtype, compute)))


@without_generator(aten.normal.float_float)
def normal_of_size(mean: float, std: float, size: Sequence[IndexLike], *, dtype: DType | None = None,
                   **place: Any) -> Value:
    dtype = dtype or torch.get_default_dtype()
    return draw(size, dtype, lambda r, i: r.normal(dtype) * std + mean)


@without_generator(prims.normal)
def prims_normal(shape: Sequence[IndexLike], *, mean: float, std: float, dtype: DType, **place: Any) -> Value:
    return normal_of_size(mean, std, shape, dtype=dtype)


@without_generator(aten.normal_functional)
def normal_functional(x: Value, mean: float = 0.0, std: float = 1.0) -> Value:
    return normal_of_size(mean, std, x.shape, dtype=x.dtype)


@without_generator(aten.log_normal)
def log_normal(x: Value, mean: float = 1.0, std: float = 2.0) -> Value:
    return draw(x.shape, x.dtype, lambda r, i: exp(r.normal(x.dtype) * std + mean))


# ---- other continuous distributions --------------------------------------------------------------------


@without_generator(aten.exponential)
def exponential(x: Value, lambd: float = 1.0) -> Value:
    return draw(x.shape, x.dtype, lambda r, i: r.exponential(x.dtype) * (1 / lambd))


@without_generator(aten.cauchy)
def cauchy(x: Value, median: float = 0.0, sigma: float = 1.0) -> Value:
    """A cotangent of what is near zero, where the numbers are dense, and a coin for the sign."""

    def body(r: Stream, i: tuple[Index, ...]) -> Expr:
        size = 1 / tan(r.open_uniform(x.dtype) * (math.pi / 2))
        return where(r.word(3) < 2**31, size, -size) * sigma + median

    return draw(x.shape, x.dtype, body)


# ---- integers ------------------------------------------------------------------------------------------


def _integer_between(r: Stream, low: Any, high: Any) -> Expr:
    """In [low, high), as an int64."""
    count = high - low
    if isinstance(count, Index) and count.is_const:
        count = int(count)
    if isinstance(count, Index):
        return r.below(count) + index_value(as_index(low))
    # The sum goes around the signed integers when the range is most of them.
    unsigned = cast(r.below(count), torch.uint64) + const(int(low), torch.uint64)
    return cast(unsigned, torch.int64) if count > 2**63 else r.below(count) + int(low)


@without_generator(aten.randint.low, aten.randint.low_generator)
def randint(low: Any, high: Any, size: Sequence[IndexLike], *, dtype: DType | None = torch.int64, **place: Any) -> Value:
    return draw(size, dtype or torch.int64, lambda r, i: _integer_between(r, low, high))


@without_generator(aten.randint.default, aten.randint.generator)
def randint_below(high: Any, size: Sequence[IndexLike], **options: Any) -> Value:
    return randint(0, high, size, **options)


@without_generator(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like(x: Value, low: Any, high: Any, *, dtype: DType | None = None, **place: Any) -> Value:
    return randint(low, high, x.shape, dtype=dtype or x.dtype)


@without_generator(aten.randint_like.default, aten.randint_like.generator)
def randint_like_below(x: Value, high: Any, **options: Any) -> Value:
    return randint_like(x, 0, high, **options)


@without_generator(aten.random)
def random(x: Value, *bounds: Any) -> Value:
    """With no upper bound, to the last integer up to which the dtype has them all."""
    low, high = (0, *bounds) if len(bounds) == 1 else bounds or (0, None)
    if high is None:
        last = 2 ** _MANTISSA[x.dtype] if is_float(x.dtype) else 1 if x.dtype is torch.bool else torch.iinfo(x.dtype).max
        high = last + 1
    return randint(low, high, x.shape, dtype=x.dtype)


@without_generator(aten.geometric)
def geometric(x: Value, p: float) -> Value:
    """Trials up to the first success: an exponential number in units of the chance of failure, rounded up."""
    compute = opmath(x.dtype) if is_float(x.dtype) else torch.float64
    rate = -math.log1p(-p) if p < 1 else math.inf
    return draw(x.shape, x.dtype, lambda r, i: ceil(r.exponential(compute) * (1 / rate)))


# ---- coins ---------------------------------------------------------------------------------------------


@without_generator(aten.bernoulli.Tensor)
def bernoulli_tensor(x: Value, p: Value) -> Value:
    compute = torch.float64 if p.dtype is torch.float64 else torch.float32
    return draw(x.shape, x.dtype, lambda r, i: r.uniform(compute) < cast(load_at(p, i), compute))


@without_generator(aten.bernoulli.default)
def bernoulli(p: Value) -> Value:
    return bernoulli_tensor(p, p)


@without_generator(aten.bernoulli.p)
def bernoulli_p(x: Value, p: float) -> Value:
    return draw(x.shape, x.dtype, lambda r, i: r.uniform(torch.float32) < p)


@pointwise
def _masked_scale(x: Expr, mask: Expr, scale: Expr) -> Expr:
    return x * mask * scale


@lower(aten.native_dropout)
def native_dropout(x: Value, p: float, train: bool | None = True) -> tuple[Value, Value]:
    if train is False:
        ones = build.pointwise(x.shape, lambda i: const(True, torch.bool))
        return build.pointwise(x.shape, x.load), ones
    mask = draw(x.shape, torch.bool, lambda r, i: r.uniform(torch.float32) < 1 - p)
    return _masked_scale(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


@lower(aten.native_dropout_backward)
def native_dropout_backward(grad: Value, mask: Value, scale: float) -> Value:
    return _masked_scale(grad, mask, scale)


@without_generator(aten.rrelu_with_noise_functional)
def rrelu_with_noise(x: Value, noise: Value, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
                     ) -> tuple[Value, Value]:
    """A leaky relu whose slope is drawn for each element in training; the noise tells the gradient the slopes."""
    if not training:
        slope = (lower + upper) / 2
        return pointwise(lambda v: where(v > 0, v, v * slope))(x), noise
    compute = opmath(x.dtype)

    def body(r: Stream, i: tuple[Index, ...]) -> Expr:
        return where(cast(x.load(i), compute) <= 0, r.uniform(compute) * (upper - lower) + lower, 1)

    noise = draw(x.shape, x.dtype, body)
    return pointwise(lambda v, slope: v * slope)(x, noise), noise
