"""Maps that write across the rows or columns of a reduction are kernels of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flambeau.debug


def kernels(fn: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Checks the values against float64, and counts the kernels."""
    torch.compiler.reset()
    with flambeau.debug.collect() as graphs:
        got = torch.compile(fn, backend="flambeau")(x)
    eager = fn(x)
    assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
    room = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[x.dtype]
    torch.testing.assert_close(got.double(), fn(x.double()), rtol=room, atol=room)
    return sum(len(g.texts) for g in graphs)


def group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x, 4).contiguous()


def images(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(N, C, H, W) whose rows run along H in memory."""
    n, c, h, w = sizes
    return torch.randn(n, c, w, h).to(dtype).transpose(2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_long_row(dtype: torch.dtype) -> None:
    assert kernels(group_norm, images(2, 28, 45, 37, dtype=dtype)) == 2
    assert kernels(group_norm, torch.randn(2, 28, 45, 37).to(dtype)) == 1


def test_a_row_that_stays_in_the_cache() -> None:
    assert kernels(group_norm, images(2, 4, 21, 13)) == 1


def test_few_columns_that_are_written_apart() -> None:
    def normal(x: Tensor) -> Tensor:
        return x.log_softmax(0)

    assert kernels(normal, torch.randn(3, 900, 13).transpose(1, 2)) == 2
    assert kernels(normal, torch.randn(3, 900, 64).transpose(1, 2)) == 1
    assert kernels(normal, torch.randn(3, 13, 900)) == 1


def test_a_row_whose_values_are_kept_beside_its_sum() -> None:
    def softmax(x: Tensor) -> Tensor:
        y = x.flatten(1).softmax(1).view(x.shape)
        return (y * y.sum((1, 2), keepdim=True)).contiguous()

    kernels(softmax, images(1, 3, 91, 67)[0])
