"""Bits against eager: logic, shifts by too much, divisors, floats taken apart."""

from __future__ import annotations

import math

import pytest
import torch

from agreement import agree
from samples import samples_agree

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SAMPLED = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
           "bitwise_right_shift", "gcd", "lcm", "nextafter", "frexp")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts_beyond_the_width(dtype: torch.dtype) -> None:
    """Of signed numbers the sign stays, of everything else nothing."""
    a = torch.tensor([-128, -1, 0, 1, 77]).to(dtype)
    by = torch.tensor([-1, 0, 1, 7, 8, 15, 31, 63, 64]).to(dtype)
    agree(lambda a, b: [a << b, a >> b, a << 3, a >> 3], a[:, None], by)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_logic_and_divisors(dtype: torch.dtype) -> None:
    a = torch.tensor([-12, -1, 0, 1, 8, 100]).to(dtype)

    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a & b, a | b, a ^ b, ~a, a & 3, torch.gcd(a, b), torch.lcm(a, b)]

    agree(fn, a[:, None], a)


def test_logic_of_bools() -> None:
    b = torch.tensor([True, False])
    agree(lambda a, b: [a & b, a | b, a ^ b, ~a], b[:, None], b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_neighbours(dtype: torch.dtype) -> None:
    x = torch.tensor([-math.inf, -1.0, -1e-45, -0.0, 0.0, 1.0, 1.5, 3e38, math.inf, math.nan]).to(dtype)
    agree(torch.nextafter, x[:, None], x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_mantissas_and_exponents(dtype: torch.dtype) -> None:
    x = torch.tensor([-12.5, -1.0, -0.3, -0.0, 0.0, 0.5, 1.0, 3.0, 1e4]).to(dtype)
    limits = torch.finfo(dtype)
    edges = torch.tensor([limits.max, limits.tiny, limits.tiny / 4, math.inf, math.nan], dtype=dtype)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        mantissa, exponent = torch.frexp(x)
        return [mantissa, exponent]

    agree(fn, x)
    agree(lambda x: fn(x)[0], edges)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(name: str, dtype: torch.dtype) -> None:
    samples_agree(name, dtype)
