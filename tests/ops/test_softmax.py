"""Softmax at its edges: rows of -inf, large numbers, every dimension, low precision, one kernel for a row."""

from __future__ import annotations

import math

import pytest
import torch

from agreement import agree, through

aten = torch.ops.aten
INF = math.inf


def every_softmax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return x.softmax(dim), x.log_softmax(dim), aten._safe_softmax(x, dim)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_every_dimension(dim: int) -> None:
    agree(lambda x: every_softmax(x, dim), torch.randn(5, 7, 33, requires_grad=True))


def test_masked_rows() -> None:
    x = torch.tensor([[-INF, -INF, -INF], [-INF, 0.0, 1.0], [INF, 0.0, 1.0], [math.nan, 0.0, 1.0],
                      [1e4, 0.0, -1e4]])
    agree(lambda x: every_softmax(x, 1), x)


def test_one_number_and_none() -> None:
    agree(lambda a, b: (*every_softmax(a, 0), *every_softmax(b, 1)), torch.tensor(3.0), torch.empty(3, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    x = (4 * torch.randn(8, 100)).to(dtype)
    got = through(lambda x: (x.softmax(1), x.log_softmax(1)))(x)
    wide = x.double()
    torch.testing.assert_close(got, (wide.softmax(1).to(dtype), wide.log_softmax(1).to(dtype)))


def test_gradient_in_another_dtype() -> None:
    agree(lambda x: x.softmax(1, dtype=torch.float32), torch.randn(4, 9).to(torch.bfloat16).requires_grad_())


def test_sizes_known_only_at_the_call() -> None:
    for n in (4, 11):
        agree(lambda x: every_softmax(x, 1), torch.randn(3, n, requires_grad=True), dynamic=True)
