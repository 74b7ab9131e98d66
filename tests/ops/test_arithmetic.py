"""Arithmetic against eager: promotion, special values, division, powers, and PyTorch's own samples."""

from __future__ import annotations

import math

import pytest
import torch

from agreement import agree, through
from samples import samples_agree

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64)
SPECIAL = (-math.inf, -3e38, -2.5, -1.5, -1.0, -0.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 1.0, 1.5, 2.5, 7.0, 3e38,
           math.inf, math.nan)
SAMPLED = (
    "abs", "add", "addcdiv", "addcmul", "angle", "ceil", "clamp", "clamp_max", "clamp_min", "copysign",
    "deg2rad", "div_floor_rounding", "div_no_rounding_mode", "div_trunc_rounding", "float_power", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "frac", "heaviside", "ldexp", "lerp", "maximum", "minimum",
    "mul", "nan_to_num", "neg", "pow", "rad2deg", "reciprocal", "remainder", "round", "round_decimals_3",
    "round_decimals_neg_3", "rsqrt", "rsub", "sgn", "sign", "signbit", "sqrt", "square", "sub", "trunc",
)


@pytest.mark.parametrize("left", DTYPES, ids=str)
def test_dtypes_are_promoted_as_in_eager(left: torch.dtype) -> None:
    a = torch.tensor([0, 1, 1, 3]).to(left)
    others = [torch.tensor([1, 0, 1, 2]).to(d) for d in DTYPES] + [torch.tensor(2).to(d) for d in DTYPES]

    def fn(a: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        out = [a + 1, a * 2.5, torch.clamp_min(a, 1), a < 0.1, a == 1]
        for b in others:
            out += [a + b, a * b, a / (b + 1), torch.maximum(a, b), torch.where(a > b, a, b), a == b]
        return out

    agree(fn, a, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_special_values_meet_each_other(dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL, dtype=dtype)

    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a + b, a - b, a * b, a / b, torch.pow(a, b), torch.maximum(a, b), torch.minimum(a, b),
                torch.fmax(a, b), torch.fmin(a, b), torch.copysign(a, b), torch.heaviside(a, b),
                torch.clamp(a, b, 1 - b), torch.lerp(a, b, b)]

    agree(fn, values[:, None], values)


def test_remainders_are_exact() -> None:
    """Of quotients far beyond the precision as well: the judge is float64, in which they are."""
    values = torch.tensor([x for x in SPECIAL if x])

    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [torch.fmod(a, b), torch.remainder(a, b)]

    ours = through(fn)(values[:, None], values)
    torch.testing.assert_close(ours, [t.float() for t in fn(values.double()[:, None], values.double())],
                               rtol=0, atol=0, equal_nan=True)


def test_quotients_round_as_asked() -> None:
    a = torch.tensor([-math.inf, -7.5, -6.0, -0.3, -0.0, 0.0, 0.3, 6.0, 7.5, math.inf, math.nan])
    b = torch.tensor([-3.0, -0.1, -0.0, 0.0, 0.1, 2.0, math.inf, math.nan])

    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a // b, torch.div(a, b, rounding_mode="trunc"), torch.div(a, b, rounding_mode="floor")]

    agree(fn, a[:, None], b)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integer_quotients_round_as_asked(dtype: torch.dtype) -> None:
    a = torch.tensor([-100, -7, -1, 0, 1, 7, 100]).to(dtype)
    b = torch.tensor([-50, -3, 2, 3, 7]).to(dtype)

    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a // b, torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b), torch.remainder(a, b),
                a / b, a // 3, a % 3, torch.round(a), a.sign(), a + b, a * b]

    agree(fn, a[:, None], b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_special_values_alone(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.abs(), x.neg(), x.sign(), x.sgn(), x.signbit(), x.floor(), x.ceil(), x.trunc(), x.round(),
                x.frac(), x.reciprocal(), x.sqrt(), x.rsqrt(), x.square(), x.angle(), x.deg2rad(),
                x.rad2deg(), x.nan_to_num(), x.nan_to_num(1.0, 2.0, -3.0), x.clamp(-1, 1), x.clamp(max=0.7),
                x.clamp(1, -1), x.clamp(math.nan, 1.0)]

    agree(fn, torch.tensor(SPECIAL, dtype=dtype))


def test_powers() -> None:
    exponents = (-3, -2, -1, -0.5, 0, 0.5, 1, 2, 2.5, 3, 7, 40)

    def fn(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        out = [x**e for e in exponents] + [n**e for e in exponents if isinstance(e, float) or e >= 0]
        return [*out, 2.0**n, 1**x, 2.5**x, x**x, n**n, torch.ldexp(x, n), torch.float_power(n, 3)]

    x, n = torch.tensor([-math.inf, -2.0, -1.0, -0.0, 0.3, 1.0, 3.0]), torch.tensor([-3, -1, 0, 1, 2, 5, 11])
    agree(fn, x, n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_roots_and_powers_of_one_half(dtype: torch.dtype) -> None:
    """Eager takes roots where a number is the exponent (not of float16), and powers where a tensor is. They differ for
    minus infinity and minus zero."""
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        out = [y for e in (0.5, -0.5) for y in (x**e, x**torch.full_like(x, e), *torch._foreach_pow([x], e),
                                                *torch._foreach_pow([x], [torch.full_like(x, e)]))]
        return [*out, *(y.nan_to_num(1.0).signbit() for y in out)]

    agree(fn, torch.tensor([-math.inf, math.inf, -0.0, 0.0, -1.0, 4.0, math.nan] * 5, dtype=dtype))


def test_roots_as_powers_of_run_time_numbers() -> None:
    x = torch.tensor([-math.inf, math.inf, -0.0, 0.0, -1.0, 4.0, math.nan] * 5)
    compiled = torch.compile(lambda x, e: x**e * 1, backend="flambeau", dynamic=True)
    for e in (0.3, 0.5, 0.7, -0.5, -1.5):
        torch.testing.assert_close(1 / compiled(x, e), 1 / x**e, equal_nan=True)


def test_a_scalar_is_rounded_to_what_it_is_compared_with() -> None:
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    agree(lambda x: [x == 0.1, x <= 0.2, x > 0.3, torch.where(x == 0.1, 1.0, x)], x)


def test_a_size_is_a_number() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        n = x.shape[0]
        return [x * n, x + n, torch.add(x, x, alpha=n), x / n, n - x, x.clamp(max=n), x > n, x**n]

    agree(fn, torch.rand(5), dynamic=True)


def test_gradients_of_products_and_quotients() -> None:
    x, y, z = (torch.rand(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [torch.addcmul(x, y, z, value=2), torch.addcdiv(x, y, z, value=3), torch.lerp(x, y, z),
                torch.lerp(x, y, 0.7), x**y, x**3, (x / y) % z, torch.maximum(x, y)]

    agree(fn, x, y, z)


@pytest.mark.parametrize("left", [(), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("right", [(4,), (2, 1, 4)])
def test_broadcasting(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    agree(lambda a, b: [a + b, b - a, torch.where(a > b, a, b)], torch.randn(left), torch.randn(right))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(name: str) -> None:
    samples_agree(name)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_every_sample(name: str, dtype: torch.dtype) -> None:
    samples_agree(name, dtype, limit=None)
