"""Large results are written over inputs that are no longer read, and over no other memory."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flambeau.compile.partition import maker_of
from flambeau.config import config
from flambeau.debug import collect

ROWS, COLUMNS = 512, 1024  # two megabytes


@pytest.fixture(autouse=True)
def _known_sizes() -> None:
    """What was compiled for other sizes before, would be compiled for any now."""
    torch._dynamo.reset()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def taken(graphs: list[Any]) -> list[str]:
    return [b.over for g in graphs for b in g.program.buffers if b.place == "over"]


def loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w, target)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = drawn(ROWS, 16) / 4, drawn(16, COLUMNS) / 4
    return x.requires_grad_(), w.requires_grad_(), torch.arange(ROWS)


def test_a_gradient_takes_the_memory_of_what_was_saved_for_it() -> None:
    x, w, target = problem()
    want = torch.autograd.grad(loss(x, w, target), (x, w))
    with collect() as graphs:
        compiled = torch.compile(loss, backend="flambeau")
        got = torch.autograd.grad(compiled(x, w, target), (x, w))
    assert taken(graphs) and graphs[-1].package.overwritten
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("graph_cache", [False, True])
def test_a_backward_that_runs_again_takes_copies(graph_cache: bool) -> None:
    x, w, target = problem()
    with config.override(graph_cache=graph_cache):
        compiled = torch.compile(loss, backend="flambeau")
        first = torch.autograd.grad(compiled(x, w, target), (x, w))
        out = compiled(x, w, target)
        for retain in (True, True, False):
            torch.testing.assert_close(torch.autograd.grad(out, (x, w), retain_graph=retain), first, rtol=0, atol=0)


def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).log_softmax(1)
    return (y * y).sum(), y.view(-1, 2)


def views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).tanh()
    a, b = y.t(), y.view(-1)
    return (a.sin() * a).sum() + (b.cos() * b).sum(), y[:1]


@pytest.mark.parametrize("function", [both, views])
def test_what_else_the_caller_holds_stays(function: Any) -> None:
    x, w, _ = problem()
    compiled = torch.compile(function, backend="flambeau")
    want, held = function(x, w)
    for _ in range(2):
        out, seen = compiled(x, w)
        before = seen.detach().clone()
        gradients = torch.autograd.grad(want, (x, w), retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(out, (x, w)), gradients, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen.detach(), before, rtol=0, atol=0)
        torch.testing.assert_close(seen, held)


def test_results_of_calls_are_written_over_and_constants_are_not() -> None:
    table = drawn(ROWS, COLUMNS)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.conv2d(x, w, padding=1)
        return ((h.relu() + 1).sum((2, 3)) @ (table * 2).flatten()[: h.shape[1], None]).square()

    x, w = drawn(2, 4, 128, 128), drawn(8, 4, 3, 3)
    kept = table.clone()
    compiled = torch.compile(function, backend="flambeau")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, w), function(x, w), rtol=1e-4, atol=1e-2)
    assert torch.equal(table, kept)


def test_a_chain_through_calls() -> None:
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())))
    x = drawn(2, 8, 160, 160)
    with torch.no_grad(), collect() as graphs:
        compiled = torch.compile(net, backend="flambeau")
        got = compiled(x)
    assert len(taken(graphs)) == 3
    torch.testing.assert_close(got, net(x).detach(), rtol=1e-4, atol=1e-5)
    before = got.clone()
    with torch.no_grad():
        compiled(-x)
    assert torch.equal(got, before)  # the next call has other memory


def test_what_is_returned_is_no_view_to_autograd() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1)
    x = drawn(2, 8, 160, 160).requires_grad_()
    with collect() as graphs:
        got, want = torch.compile(lambda x: conv(x) * 3 + 1, backend="flambeau")(x), conv(x) * 3 + 1
    assert len(taken(graphs)) == 1
    for y in (got, want):
        assert y._base is None
        y.mul_(2)  # torch refuses that of a view that was made within a function of autograd
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (got, want)), rtol=1e-4, atol=1e-4)


def test_who_made_the_memory() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.mm.default, (x, x))
    secret = graph.call_function(torch.ops.aten._unsafe_view.default, (made, [4, 4]))
    view = graph.call_function(torch.ops.aten.t.default, (secret,))
    several = graph.call_function(torch.ops.aten.native_layer_norm.default, (view, [4], None, None, 1e-5))
    first, second = (graph.call_function(operator.getitem, (several, k)) for k in (0, 1))
    unknown = graph.call_function(torch.relu, (view,))
    assert maker_of(view) is maker_of(secret) is maker_of(made) is made
    assert maker_of(first) is maker_of(second) is several
    assert maker_of(unknown) is maker_of(graph.call_function(torch.ops.aten.t.default, (x,))) is None
