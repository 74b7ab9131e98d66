"""Inputs that share memory: writes to one of them, and views of them among the results, behave as in eager."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from .beside_eager import compiled

# Three arguments in two storages: the first two share one, where they are disjoint or overlap.
BEGINNINGS = {"apart": 10, "overlapping": 7}


def written(x: Tensor, y: Tensor, z: Tensor) -> Any:
    x.add_(1)
    return y.fill_(2).t(), x[1]


def part_of_written(x: Tensor, y: Tensor, z: Tensor) -> Any:
    return y.add_(1)[1:], x[0]


def parts(x: Tensor, y: Tensor, z: Tensor) -> Any:
    x.add_(1)
    return y.view(9)[4:], y.split(2)[-1]


def written_elsewhere(x: Tensor, y: Tensor, z: Tensor) -> Any:
    y.mul_(2)
    return z.add_(1)[1:], z.split(2)[-1]


def of_intermediates(x: Tensor, y: Tensor, z: Tensor) -> Any:
    x.mul_(2)
    v, w = z * 2, y * z
    return v.t(), v[1:], w[1:], w, y.split(2)[-1], y.t(), x[2]


def run(fn: Callable[..., Any], second: int, gradients: bool) -> list[Any]:
    """The values, strides, places in memory and gradients of a function's results."""
    first, other = (torch.linspace(-2, n, 20, requires_grad=gradients) for n in (3, 5))
    bases = [first * 1, other * 1]
    x, y, z = (bases[k][at:at + 9].view(3, 3) for k, at in ((0, 0), (0, second), (1, 10)))
    made = fn(x, y, z)
    storages = [b.untyped_storage()._cdata for b in bases]
    out: list[Any] = [*made, *bases]
    out += [(t.stride(), t.storage_offset(), [t.untyped_storage()._cdata == s for s in storages]) for t in made]
    if gradients:
        ends = (*made, *bases)
        total = sum((t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() * (k + 2) for k, t in enumerate(ends))
        out += torch.autograd.grad(total, (first, other))
    return out


# Two cases in which torch itself is wrong: with gradients, it does not trace two writes to overlapping inputs, and it
# confuses an input that is written to with one in the same memory that is saved.
TORCHS = [(written, "overlapping", True), (of_intermediates, "apart", True)]
CASES = [case for case in product((written, part_of_written, parts, written_elsewhere, of_intermediates), BEGINNINGS,
                                  (False, True)) if case not in TORCHS]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("fn", "place", "gradients"), CASES)
def test_views_of_inputs(fn: Callable[..., Any], place: str, gradients: bool, dynamic: bool | None) -> None:
    second = BEGINNINGS[place]
    torch.testing.assert_close(run(compiled(fn, dynamic=dynamic), second, gradients), run(fn, second, gradients))
