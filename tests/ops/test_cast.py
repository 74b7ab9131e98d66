"""Casts and copies against eager."""

from __future__ import annotations

import math

import pytest
import torch

from agreement import agree, through

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS)


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_every_cast(source: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 100, 127]).to(source)
    agree(lambda x: [x.to(d) for d in DTYPES], x)


@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=str)
def test_floats_are_cut_and_rounded(source: torch.dtype) -> None:
    x = torch.tensor([-2.7, -0.5, 0.3, 1.5, 1.0000001, 70000.0, 1e-8, 3.4e38, -0.0], dtype=source)
    agree(lambda x: [x.to(d) for d in (*FLOATS, torch.bool)], x)
    agree(lambda x: [x.to(d) for d in INTEGERS[1:]], x[:5])


def test_nan_and_infinity_stay_what_they_are() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf])
    agree(lambda x: [x.half(), x.bfloat16(), x.double(), x.bool(), x.half().float()], x)


def test_a_clone_is_memory_of_its_own() -> None:
    x = torch.randn(3)
    y = through(lambda x: x.clone())(x)
    y.add_(1)
    assert not torch.equal(x, y)


def test_copies_are_broadcast_and_cast() -> None:
    def fn(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return x.clone().copy_(source)

    agree(fn, torch.zeros(2, 3, dtype=torch.bfloat16), torch.randn(3, dtype=torch.float64))


def test_a_number_that_nested_vmaps_cast() -> None:
    agree(lambda x: torch.vmap(torch.vmap(lambda a: a * 2 + 1))(x), torch.randn(5, 7))
