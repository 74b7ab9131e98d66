"""What is kept, recomputed and sent for a transformer block of LM 24, by the model of times; nothing is computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from flambeau.bench.models import Block, token_loss
from flambeau.capture.decompositions import table
from flambeau.capture.kept_whole import whole_operators
from flambeau.compile import offload
from flambeau.compile.offload import Offload, held_by
from flambeau.compile.offload_times import size_of
from flambeau.compile.partition import partition
from flambeau.ir.tuning import BLOCKS
from flambeau.runtime.streams.host_copies import NOTES, send

LINK = 50.0  # GB/s


class Planned(Exception):
    """Ends a compilation when the graphs are there."""


class End(nn.Module):
    """The end of LM 24, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(1024), nn.Linear(1024, 32768, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return token_loss(self.head(self.norm(x)), torch.zeros(8, 1024, dtype=torch.long))


def plan(monkeypatch: pytest.MonkeyPatch, wish: Any, rate: float = LINK, end: bool = False,
         part: bool = True) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward of a block with the sizes that LM 24 has on a GPU, or of its end, as one piece."""
    monkeypatch.setattr(offload, "movable", lambda n: n.meta["val"].dim() > 0 and size_of(n.meta["val"]) >= 1 << 20)
    found: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def keep(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        given = None if wish is None else Offload(wish, BLOCKS, rate, lambda: 1 << 40, part)
        found.append(partition(joint, *args, offload=given, **kwargs))
        raise Planned

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with whole_operators(False):
            return aot_autograd(fw_compiler=lambda g, _: g, partition_fn=keep, decompositions=table(False))(gm, inputs)

    torch.compiler.reset()
    piece = (End() if end else Block(1024, 16, True)).bfloat16()
    with pytest.raises(Exception, match="Planned"):
        torch.compile(partial(piece), backend=backend)(torch.randn(8, 1024, 1024).bfloat16().requires_grad_())
    return found[0]


def products(graph: fx.Graph) -> int:
    return sum(n.op == "call_function" and "mm" in str(n.target) for n in graph.nodes)


@pytest.mark.parametrize("wish", [0.3, 0.55, 0.7])
def test_nothing_waits_while_something_can_be_recomputed(wish: float, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps, _ = plan(monkeypatch, None)
    forward, _ = plan(monkeypatch, wish)
    sent = sum(size_of(n.meta["val"]) for n in forward.graph.find_nodes(op="call_function", target=send))
    held = held_by(keeps.graph)
    assert held - held_by(forward.graph) + sent >= wish * held
    assert "and 0 MiB while they wait" in forward.meta[NOTES][-1]


def test_what_is_cheap_is_recomputed_and_what_is_expensive_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, plain), (forward, backward) = plan(monkeypatch, None), plan(monkeypatch, 0.3)
    assert products(backward.graph) == products(plain.graph)  # activation and normalizations are enough
    forward, backward = plan(monkeypatch, 0.55)
    assert products(backward.graph) > products(plain.graph)
    assert not forward.graph.find_nodes(op="call_function", target=send)
    monkeypatch.setattr(offload, "COPIES", 0)  # copies have launches too
    forward, _ = plan(monkeypatch, 0.55)
    sent, = forward.graph.find_nodes(op="call_function", target=send)
    assert "attention" in str(sent.args[0].args[0].target)  # its result is not computed again
    # Behind a fast link, products are not computed again either.
    _, backward = plan(monkeypatch, 0.55, 1e3)
    assert products(backward.graph) == products(plain.graph)


def test_the_end_of_a_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward follows at once: to make room for the logits in between would take time, and no memory less."""
    forward, _ = plan(monkeypatch, 0.5, end=True)
    assert not forward.graph.find_nodes(op="call_function", target=send) and NOTES not in forward.meta
    (_, plain), (_, backward) = (plan(monkeypatch, wish, end=True, part=False) for wish in (None, 0.3))
    assert products(backward.graph) == products(plain.graph) == 2
