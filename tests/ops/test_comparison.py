"""Comparisons, logic and selection against eager."""

from __future__ import annotations

import math

import pytest
import torch

from agreement import agree
from samples import samples_agree

SAMPLED = (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan",
    "isinf", "isfinite", "isposinf", "isneginf", "isreal", "isclose", "where",
)


def test_nan_compares_as_in_eager() -> None:
    x = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 2.0, math.inf, math.nan])

    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a == b, a != b, a < b, a <= b, a > b, a >= b, torch.logical_and(a, b), torch.logical_or(a, b),
                torch.logical_xor(a, b), torch.logical_not(a), a.isnan(), a.isinf(), a.isfinite(),
                a.isposinf(), a.isneginf()]

    agree(fn, x[:, None], x)


def test_integers_are_finite() -> None:
    agree(lambda n: [n.isnan(), n.isinf(), n.isfinite(), n.isposinf(), n.logical_not()], torch.arange(4))


def test_large_integers_are_compared_exactly() -> None:
    n = torch.tensor([2**53, 2**53 + 1, -(2**63), 2**63 - 1])
    agree(lambda a, b: [a == b, a < b, a >= 2**53 + 1], n[:, None], n)


def test_where_selects_across_dtypes_and_shapes() -> None:
    mask = torch.tensor([True, False, True])

    def fn(m: torch.Tensor, x: torch.Tensor, n: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
        return [torch.where(m, x, n), torch.where(m, n, 2.5), torch.where(m, h, 1.0),
                torch.where(m[:, None], h, n), torch.where(m, 1, 0),
                torch.where(m, n.to(torch.uint8), n.to(torch.int8))]

    agree(fn, mask, torch.randn(2, 3), torch.arange(3), torch.randn(3).half())


def test_the_branch_not_taken_gets_no_gradient() -> None:
    x = torch.tensor([-1.0, 0.0, 4.0], requires_grad=True)
    agree(lambda x: torch.where(x > 0, x, -x).sqrt(), x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(name: str, dtype: torch.dtype) -> None:
    samples_agree(name, dtype, limit=3)
