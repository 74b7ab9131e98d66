"""Repeated regions through the whole compiler: bits as without them, and work that does not grow with depth."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import flambeau.debug
from flambeau.bench.models import Block
from flambeau.compile import backend as dynamo
from flambeau.compile import disk_cache as graph_cache
from flambeau.compile import subgraphs
from flambeau.config import config

WIDTH, ROWS = 16, 4


class Deep(nn.Module):
    """Transformer blocks between an embedding and a head."""

    def __init__(self, depth: int, dropout: float = 0.0, kind: Callable[..., nn.Module] = Block) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList(kind(WIDTH, 2, True) for _ in range(depth))
        self.dropout = dropout
        self.light = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.light else block(x)
            x = F.dropout(x, self.dropout, self.training and self.dropout > 0)
        return self.head(x)


def deep(depth: int, **options: Any) -> Deep:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Deep(depth, **options)


def tokens(rows: int = ROWS) -> Tensor:
    return (torch.arange(rows * 8) * 7 % 11).view(rows, 8)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: nn.Module, inputs: Tensor, regions: bool | None = True, **options: Any) -> list[Tensor]:
    """The results and gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(3)
    torch._dynamo.reset()
    function = model if regions is None else torch.compile(
        model, backend="flambeau", options={"regions": regions}, **options)
    out = function(inputs)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize(("dtype", "dropout"), [(torch.float32, 0.0), (torch.bfloat16, 0.2)])
def test_bits_are_those_of_the_whole(dtype: torch.dtype, dropout: float) -> None:
    model = deep(6, dropout=dropout).to(dtype)
    with flambeau.debug.collect_regions() as found:
        ours = step(model, tokens())
    assert [len(g) for g in found[0].groups()] == [5]
    assert equal(ours, step(model, tokens(), regions=False))
    if not dropout:
        torch.testing.assert_close(ours, step(model, tokens(), None))


def test_work_does_not_grow_with_depth() -> None:
    def work(depth: int) -> tuple[int, int]:
        with flambeau.debug.collect() as graphs:
            step(deep(depth), tokens())
        return len(graphs), sum(len(g.texts) for g in graphs)

    assert work(6) == work(11)
    assert work(6)[0] == 6  # forward and backward of the first piece, of a layer, and of the last piece


def test_inference() -> None:
    model = deep(6).eval()
    with torch.no_grad(), flambeau.debug.collect() as graphs:
        ours = torch.compile(model, backend="flambeau")(tokens())
    torch.testing.assert_close(ours, model(tokens()))
    assert len(graphs) == 3


def test_sizes_that_vary() -> None:
    model = deep(6)
    function = torch.compile(model, backend="flambeau")

    def gradients(f: Callable[..., Tensor], inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(inputs).square().mean(), list(model.parameters()))

    with flambeau.debug.collect() as graphs:
        for rows in (4, 7, 3):
            inputs = tokens(rows)
            torch._dynamo.mark_dynamic(inputs, 0)
            torch.testing.assert_close(gradients(function, inputs), gradients(model, inputs))
    assert len(graphs) == 6


def test_checkpointed_layers() -> None:
    model = deep(6)
    model.light = True
    with flambeau.debug.collect_regions() as found:
        ours = step(model, tokens())
    assert [len(g) for g in found[0].groups()] == [6]
    torch.testing.assert_close(ours, step(model, tokens(), None))


class Marked(Block):
    forward = torch.compiler.nested_compile_region(Block.forward)


@pytest.mark.parametrize(("depth", "regions"), [(2, True), (2, False), (6, True)])
def test_marked_layers(depth: int, regions: bool) -> None:
    """Subgraphs that the user marked are inlined if they are few, and also if regions are off."""
    assert equal(step(deep(depth, kind=Marked), tokens(), regions), step(deep(depth), tokens(), regions))


def test_layers_are_marked() -> None:
    class Layer(Block):
        pass

    model = deep(6, kind=Layer)
    expected = step(model, tokens())
    assert flambeau.mark_layers(model) == ["Layer"] == flambeau.mark_layers(model)
    torch.testing.assert_close(model(tokens()), expected[0])  # marks have no effect in eager
    with patch.object(subgraphs, "written_out", wraps=subgraphs.written_out) as used, \
            patch.object(dynamo, "written_out", used):
        assert equal(step(model, tokens()), expected)
    used.assert_called_once()
    assert flambeau.mark_layers(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))) == []


def test_some_layers_are_frozen() -> None:
    model = deep(12)
    for p in model.blocks[5].parameters():
        p.requires_grad_(False)
    ours = step(model, tokens())
    torch.testing.assert_close(ours, step(model, tokens(), None))


def test_a_second_backward_and_kept_graphs() -> None:
    model = deep(6)
    out = torch.compile(model, backend="flambeau")(tokens()).square().mean()
    out.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    out.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once))


def test_hooks_of_parameters_and_gradients_of_some() -> None:
    model = deep(6)
    out = torch.compile(model, backend="flambeau")(tokens()).square().mean()
    wanted = [model.blocks[2].proj.weight, model.tokens.weight]
    torch.testing.assert_close(torch.autograd.grad(out, wanted),
                               torch.autograd.grad(model(tokens()).square().mean(), wanted))


def test_a_later_process_finds_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "SUFFIX", ".graph" + "".join(random.choices(string.ascii_lowercase, k=12)))

    def counted(depth: int) -> tuple[dict[str, int], list[Tensor]]:
        graph_cache.stats.clear()
        made = step(deep(depth), tokens())
        for keeper in list(graph_cache.keepers):
            keeper.join(60)
        return dict(graph_cache.stats), made

    with config.override(verify=False):
        first, fresh = counted(6)
        assert first == {"miss": 3, "stored": 3}
        again, found = counted(6)
        assert again == {"hit": 3} and equal(fresh, found)
        deeper, _ = counted(9)
        assert deeper == {"hit": 3}, "a deeper model has the same pieces"


def test_a_piece_that_does_not_compile() -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("not in pieces")

    model = deep(6)
    with (patch.object(dynamo, "in_pieces", refuse), config.override(verify=False),
          pytest.warns(RuntimeWarning, match="not in pieces")):
        ours = step(model, tokens())
    torch.testing.assert_close(ours, step(model, tokens(), None))


# ---- distributed -------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cached", ["", "stored", "found"])  # without the cache, backwards are compiled later
@pytest.mark.parametrize("bucket", [25, 0.08])  # MB: one graph, and several, of which one holds some layers
def test_ddp(group: None, monkeypatch: pytest.MonkeyPatch, bucket: float, cached: str) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    model = deep(8)
    expected = step(model, tokens(), None)
    with config.override(verify=False, graph_cache=bool(cached)), flambeau.debug.collect_regions() as found:
        ours = step(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket), tokens())
    for keeper in list(graph_cache.keepers):
        keeper.join(60)
    torch.testing.assert_close(ours, expected)
    assert max(len(g) for f in found for g in f.groups()) >= 5


def test_fsdp(group: None) -> None:
    model = deep(8)
    expected = step(model, tokens(), None)
    with flambeau.debug.collect_regions() as found:
        ours = step(fully_shard(model), tokens())
    torch.testing.assert_close([ours[0], *(g.full_tensor() for g in ours[1:])], expected)
    assert max(len(g) for f in found for g in f.groups()) == 7
