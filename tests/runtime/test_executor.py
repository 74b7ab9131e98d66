"""The run function: memory comes when the first step needs it, and goes after the last."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flambeau
from flambeau.config import config
from flambeau.targets.cpu.target import CpuTarget

SIDE = 640  # a matrix has more than a mebibyte


class Blocks:
    """How many matrices live that the target allocated, and how many at most lived at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def gone(self) -> None:
        self.now -= 1

    def allocate(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        t = torch.empty_strided(shape, strides, dtype=dtype)
        if t.numel() == SIDE * SIDE:
            self.now += 1
            self.most = max(self.most, self.now)
            weakref.finalize(t, self.gone)
        return t


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocks]:
    """Matrices are allocated one by one, as on a GPU."""
    made, capabilities = Blocks(), CpuTarget.capabilities
    monkeypatch.setattr(CpuTarget, "allocator", lambda self, device: made.allocate)
    monkeypatch.setattr(CpuTarget, "capabilities", lambda self: replace(capabilities(self), arena_most=1 << 20))
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        yield made


def test_nothing_else_launches_kernels() -> None:
    """Outside of `targets`, and the bench that measures them, only the executor launches kernels: one place joins
    launches to plans, and only plans call built kernels."""
    source = Path(flambeau.__file__).parent
    rooms = [p for p in source.rglob("*.py") if p.relative_to(source).parts[0] not in ("targets", "bench")]
    assert [p.name for p in rooms if re.search(r"target\.plan\(", p.read_text())] == ["launch_plan.py"]
    calls = re.compile(r"(launch|kernel|launches\[\w+\]|kernels\[\w+\])\(\[")  # of pointers
    assert not [p.name for p in rooms if calls.search(p.read_text())]


def deep(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = torch.softmax(x @ w, -1)
    return x


def test_intermediates_go_when_they_are_dead(blocks: Blocks) -> None:
    x, *weights = (torch.randn(SIDE, SIDE) for _ in range(9))
    got = torch.compile(deep, backend="flambeau")(x, *weights)
    torch.testing.assert_close(got, deep(x, *weights))
    assert 2 <= blocks.most <= 3, "what a product reads, its result, and the one after"


@pytest.mark.parametrize(("step", "most"), [
    (lambda x, k: x.cumsum(k % 2) / SIDE, 1),  # each over the one before
    (lambda x, k: x.flip(0, 1).cumsum(k % 2) / SIDE, 2)])
def test_a_chain_of_launches_is_cut_where_memory_goes(blocks: Blocks, step: Any, most: int) -> None:
    def scans(x: Tensor) -> Tensor:
        for k in range(8):
            x = step(x, k)
        return x

    x = torch.randn(SIDE, SIDE)
    torch.testing.assert_close(torch.compile(scans, backend="flambeau")(x), scans(x))
    assert most <= blocks.most <= most + most // 2


def test_gradients_come_when_saved_tensors_go(blocks: Blocks) -> None:
    x, *weights = (torch.randn(SIDE, SIDE) / 8 for _ in range(9))
    leaves = [w.clone().requires_grad_() for w in weights]
    result = torch.compile(deep, backend="flambeau")(x, *leaves)
    saved, blocks.most = blocks.now, 0
    assert saved == len(weights), "one for each softmax; the last one is the result"
    expected = torch.autograd.grad(deep(x, *leaves).sum(), leaves)
    grads = torch.autograd.grad(result.sum(), leaves)
    torch.testing.assert_close(grads, expected)
    assert blocks.now == len(grads) + 1
    # The gradient that goes back, what the next product makes of it, and one gradient of a weight more than there are
    # saved tensors less; not all gradients beside all that is saved.
    assert blocks.most <= saved + 4
