"""Equal calls of a joint graph are merged, unless eager would give two different results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.compile import partition
from flambeau.compile.partition import merge_equal
from flambeau.config import config
from flambeau.ops import attention_calls


def calls(f: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The operators left in a function's graph after merging equal calls; checks that its results did not change."""
    gm = make_fx(f, tracing_mode="fake")(*inputs)
    merge_equal(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    torch.manual_seed(0)
    want = f(*(x.clone() for x in inputs))
    torch.manual_seed(0)
    torch.testing.assert_close(gm(*(x.clone() for x in inputs)), want)
    return [n.target.__name__.partition(".")[0] for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(("f", "left"), [
    (lambda x: x.sin() * x.cos() + x.sin() * x.cos(), ["sin", "cos", "mul", "add"]),
    (lambda x: x.max(0)[0] + x.max(0)[0], ["max", "getitem", "add"]),
    (lambda x: (x + 1) * (x + 1.0), ["add", "add", "mul"]),
    (lambda x: (x.sin(), x.sin()), ["sin", "sin"]),
    (lambda x: x.bernoulli(0.5) + x.bernoulli(0.5), ["bernoulli", "bernoulli", "add"]),
    (lambda x: x.sum() + x.mul_(2).sum() + x.sum(), ["sum", "mul_", "sum", "add", "sum", "add"]),
], ids=["calls", "parts", "types", "returned", "random", "mutated"])
def test_what_is_merged(f: Callable[..., Any], left: list[str]) -> None:
    assert calls(f, torch.linspace(0.1, 0.9, 6).view(2, 3)) == left


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values other than arguments that compiled forwards save for their backwards."""
    seen: list[Any] = []
    cut = partition.min_cut_rematerialization_partition

    def watched(joint: Any, *args: Any, **kwargs: Any) -> Any:
        forward, backward = cut(joint, *args, **kwargs)
        *_, output = forward.graph.nodes
        seen.extend(n for n in output.args[0][kwargs["num_fwd_outputs"]:] if n.op != "placeholder")
        return forward, backward

    monkeypatch.setattr(partition, "min_cut_rematerialization_partition", watched)
    return seen


@pytest.mark.parametrize(("slope", "count"), [(0.01, 2), (0.2, 2), (0.0, 3), (-0.5, 3)])
def test_what_a_leaky_relu_needs(slope: float, count: int, saved: list[Any]) -> None:
    """Its result is kept for the convolution after it, its argument's argument for the norm before it. Its argument is
    kept only where the result does not have the same sign."""
    def f(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        x = F.group_norm(F.conv2d(x, first, padding=1), 2)
        return F.conv2d(F.leaky_relu(x, slope), second)

    torch.manual_seed(0)
    x, *weights = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 3, 3)
    leaves = [w.requires_grad_() for w in weights]
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        got = torch.autograd.grad(torch.compile(f, backend="flambeau")(x, *leaves).sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(f(x, *leaves).sum(), leaves))
    assert sum(n.meta["val"].numel() == 2 * 4 * 5 * 5 for n in saved) == count, saved


def test_a_loss_over_classes_keeps_no_logarithms(saved: list[Any]) -> None:
    """But the logits, as they came out of a product, and two numbers for each row."""
    def f(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight).float().view(-1, 17), y.view(-1))

    torch.manual_seed(0)
    x, weight = (torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((2, 6, 8), (8, 17)))
    y = torch.randint(17, (2, 6))
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        got = torch.compile(f, backend="flambeau")(x, weight, y)
        slopes = torch.autograd.grad(got, (x, weight))
    torch.testing.assert_close(got, f(x, weight, y))
    torch.testing.assert_close(slopes, torch.autograd.grad(f(x, weight, y), (x, weight)))
    kept = [n.meta["val"] for n in saved if n.meta["val"].numel() >= 12]
    assert [t.dtype for t in kept if t.numel() == 12 * 17] == [torch.bfloat16]
    assert [t.dtype for t in kept if t.numel() == 12] == [torch.float32] * 2


def test_arguments_in_another_order_are_not_kept_twice(saved: list[Any]) -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        order = torch.channels_last
        y = F.conv2d(x.contiguous(memory_format=order), weight.contiguous(memory_format=order))
        return F.conv2d(y.sin().contiguous(), weight[:, :2].mT)

    torch.manual_seed(0)
    leaves = [torch.randn(2, 3, 7, 7).requires_grad_(), torch.randn(2, 3, 3, 3).requires_grad_()]
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        got = torch.autograd.grad(torch.compile(f, backend="flambeau")(*leaves).square().sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(f(*leaves).square().sum(), leaves))
    assert saved and not [n for n in saved if n.target is torch.ops.aten.clone.default
                          and n.args[0].op == "placeholder"], saved


@pytest.mark.parametrize("f", [lambda x, y: torch.tanh(x) * y, lambda x, y: y * F.softplus(x) * torch.sigmoid(x)])
def test_gates_are_computed_again(f: Callable[..., Any], saved: list[Any]) -> None:
    """Nothing is saved for gates, although autograd detaches the values that it would save."""
    leaves = [torch.linspace(-2, 2, 6).requires_grad_(), torch.linspace(1, 3, 6).requires_grad_()]
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        got = torch.autograd.grad(torch.compile(f, backend="flambeau")(*leaves).square().sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(f(*leaves).square().sum(), leaves))
    assert not saved


@pytest.mark.parametrize(("made", "kept"), [
    (lambda rows, full: (rows[:, None] - torch.arange(12)).abs() < 3, 0),
    (lambda rows, full: (rows[:, None] == rows).expand(2, 1, 12, 12), 0),
    (lambda rows, full: full > 0.5, 1),  # as large as its input, or larger
    (lambda rows, full: torch.rand(12, 12) > 0.2, 1),  # random numbers are drawn only once
], ids=["window", "documents", "of a matrix", "random"])
def test_masks_of_smaller_tensors_are_not_kept(made: Callable[[Tensor, Tensor], Tensor], kept: int, saved: list[Any],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_calls, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(attention_calls, "is_taken", lambda asked: False)
    torch._dynamo.reset()

    def f(q: Tensor, rows: Tensor, full: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, made(rows, full))

    q = torch.randn(2, 1, 12, 4, requires_grad=True)
    with config.override(graph_cache=False):
        torch.compile(f, backend="flambeau")(q, torch.arange(12) // 5, torch.rand(12, 12)).sum().backward()
    assert len([n for n in saved if n.meta["val"].dtype is torch.bool]) == kept
