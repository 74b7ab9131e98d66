"""Equal calls of a joint graph are merged, unless eager would give two different results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.frontends.partition import merge_equal


def calls(f: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The operators that are left of a function's graph, which computes what it did before."""
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
