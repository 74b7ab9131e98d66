"""Attention is given to a library's kernel, with arguments that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau import pipeline
from flambeau.config import config
from flambeau.ops import attention_calls as attention

HEADS, LENGTH, SIZE = 4, 8, 16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called in the graphs that are compiled, while the CPU's kernel for attention stands for one that takes no
    more than a GPU's do."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    seen: list[Any] = []

    def taken(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _: float, causal: bool, grouped: bool) -> bool:
        contiguous = all(x is None or x.stride(-1) == 1 for x in (q, k, v, mask))
        return contiguous and q.shape[-1] % 4 == 0 and q.shape[1] == k.shape[1] and not grouped

    monkeypatch.setattr(attention, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(attention, "is_taken", taken)
    monkeypatch.setattr(pipeline, "OBSERVERS", [lambda c: seen.extend(
        n for n in c.gm.graph.nodes if "attention" in str(n.target) or "softmax" in str(n.target))])
    return seen


def heads(size: int = SIZE, count: int = HEADS) -> Tensor:
    return torch.randn(2, LENGTH, count, size).transpose(1, 2)


def padding() -> Tensor:
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 3]])


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "padding": (F.scaled_dot_product_attention, (heads(), heads(), heads(), padding()[:, None, None, :])),
    "crossed mask": (F.scaled_dot_product_attention,
                     (heads(), heads(), heads(), padding()[:, None, :, None].expand(2, 1, -1, LENGTH).clone().mT)),
    "crossed heads": (F.scaled_dot_product_attention, (heads().mT.contiguous().mT, heads(), heads())),
    "odd heads": (F.scaled_dot_product_attention, (heads(6), heads(6), heads(7), padding()[:, None, None, :])),
    "grouped": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
                (heads(), heads(count=2), heads(count=2), padding()[:, None, None, :])),
}


def trained(f: Callable[..., Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
    out = f(*leaves)
    return [out, *torch.autograd.grad(out.cos().sum(), [x for x in leaves if x.requires_grad])]


@pytest.mark.parametrize("name", CASES)
def test_is_one_call(name: str, calls: list[Any]) -> None:
    f, given = CASES[name]
    with config.override(graph_cache=False):
        got = trained(torch.compile(f, backend="flambeau"), given)
    torch.testing.assert_close(got, trained(f, given))
    ops = ["backward" in str(n.target) for n in calls]
    assert ops == [False, True] and all("_for_cpu" in str(n.target) for n in calls)
    assert all(x.meta["val"].stride(-1) == 1 for x in calls[0].all_input_nodes)


def test_what_is_the_same_for_all_queries_stays_so() -> None:
    mask = torch.randn(LENGTH, 2, 3).permute(1, 2, 0)[:, :1, None].expand(2, HEADS, LENGTH, LENGTH)
    laid = attention.in_lines(mask)
    assert torch.equal(laid, mask) and laid.stride() == (LENGTH, 0, 0, 1)
    assert attention.in_lines(laid) is laid


@pytest.mark.parametrize(("numerics", "why"), [("eager", "bits"), ("fast", "no kernel")])
def test_torch_decides_otherwise(numerics: str, why: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For eager's bits, and where no kernel takes it whatever is done."""
    monkeypatch.setattr(attention, "is_taken", lambda *args: why == "bits")
    f, given = CASES["crossed heads"]
    with config.override(graph_cache=False):
        got = torch.compile(f, backend="flambeau", options={"numerics": numerics})(*given)
    torch.testing.assert_close(got, f(*given), rtol=0 if why == "bits" else None, atol=0 if why == "bits" else None)
    assert got.stride() == f(*given).stride() and ["softmax" in str(n.target) for n in calls] == [True]
