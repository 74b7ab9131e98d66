"""`flex_attention`: functions of the caller's become expressions of the kernels. In Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'flambeau[cuda]'")

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attended import hold, in_double, leaf, reference, trained
from flambeau import pipeline
from flambeau.config import config
from flambeau.ir.program import AttentionKernel

LENGTH = 150
AT = torch.arange(LENGTH)


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels of attention that are compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Torch has no gradient of its own for CPU tensors, and refuses to take one.
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    seen: list[str] = []
    monkeypatch.setattr(pipeline, "OBSERVERS", [lambda c: seen.extend(
        k.role for k in c.program.kernels if isinstance(k, AttentionKernel))])
    with config.override(target="interpreter", graph_cache=False):
        yield seen


def heads(count: int = 2) -> Tensor:
    return leaf(torch.randn(1, count, LENGTH, 16))


def check(score: Callable[..., Tensor] | None, in_full: Callable[..., Tensor] | None, shown: Tensor | None,
          others: list[Tensor], keys: int = 2, **how: Any) -> None:
    """`in_full`: the same of a matrix of scores. `score` and it take the other tensors last."""
    leaves = [heads(), heads(keys), heads(keys), *others]

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        return flex_attention(q, k, v, None if score is None else lambda *at: score(*at, *more), **how)

    def exactly(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        return reference(q, k, v, None, None if in_full is None else lambda s: in_full(s, *more), shown)

    hold(trained(torch.compile(run, backend="flambeau"), leaves), trained(exactly, in_double(leaves)), torch.float32)


def test_a_cap_and_a_bias_with_its_gradient(roles: list[str]) -> None:
    check(lambda s, z, h, i, j, b: 5 * torch.tanh(s / 5) + b[h, j], lambda s, b: 5 * torch.tanh(s / 5) + b[:, None],
          None, [leaf(torch.randn(2, LENGTH))])
    assert sorted(roles) == ["keys", "out", "queries"]


def test_blocks_that_are_listed(roles: list[str]) -> None:
    blocks = create_block_mask(lambda z, h, i, j: (i >= j) & (i - j < 70), None, None, LENGTH, LENGTH, device="cpu",
                               BLOCK_SIZE=32)
    shown = (AT[:, None] >= AT) & (AT[:, None] - AT < 70)
    check(None, None, shown, [], keys=1, block_mask=blocks, enable_gqa=True)
    assert sorted(roles) == ["keys", "out", "queries"]
