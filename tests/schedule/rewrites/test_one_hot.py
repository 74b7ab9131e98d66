"""Sums that pick one element have no loop, and are what the loop would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agreement import agree
from flambeau.ir.program import LoopKernel
from schedule.programs import launches, programs


def loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, ignore_index=2)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def test_the_slope_of_a_loss_sums_nothing() -> None:
    *_, backward = programs(loss, leaf(4, 5000), torch.arange(4))
    assert all(isinstance(k, LoopKernel) and not k.inner for k in launches(backward))


@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_ignored_classes_add_nothing(numerics: str) -> None:
    target = torch.tensor([0, 2, 4999, 2, 5])
    x = leaf(5, 5000)
    want = torch.autograd.grad(loss(x, target), x)[0]
    y = torch.compile(loss, backend="flambeau", options={"numerics": numerics})(x, target)
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], want)


@pytest.mark.parametrize("f", [
    lambda i, x: (torch.arange(5000) == i[:, None]).to(x.dtype).sum(1),  # some outside
    lambda i, x: torch.where(torch.arange(5000) == i[:, None], x[:, None], 0.0).sum(),
    lambda i, x: torch.where(torch.arange(5000) == i[:, None], x[:, None] * torch.arange(5000), 0.0).sum(1),
    lambda i, x: torch.where(torch.arange(5000) != i[:, None], x[:, None], 0.0).sum(1),
    lambda i, x: torch.where(torch.arange(5000) == i[:, None], x[:, None], 1.0).sum(1),
    lambda i, x: torch.where(torch.arange(5000) * 2 == i[:, None], x[:, None], 0.0).sum(1),
    lambda i, x: torch.where((torch.arange(5000) == i[:, None]) & (x[:, None] > 0), x[:, None], 0.0).sum(1),
    lambda i, x: (torch.arange(5000) == i[:, None]).sum(1), lambda i, x: (torch.arange(5000) == i[:, None]).any(1),
    lambda i, x: torch.where(torch.arange(5000) == i[:, None], x[:, None], 0.0).prod(1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_near_it_stays_right(f: Any, dynamic: bool) -> None:
    agree(f, torch.tensor([0, 4999, -1, 5000, 3, 100000]), torch.tensor([1.5, -2.0, 3.0, 4.0, float("nan"), 6.0]),
          dynamic=dynamic)
