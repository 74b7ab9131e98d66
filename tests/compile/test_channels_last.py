"""Convolutions whose images have contiguous channels: the same values, and the same strides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.compile import backend as dynamo
from flambeau.compile import channels_last as channels
from flambeau.compile.regions.nodes import value
from flambeau.targets.base import Convolution, Target
from flambeau.targets.cpu.target import CpuTarget
from flambeau.targets.cuda.target import CudaTarget

OWN = CpuTarget.channels_last


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.fx.GraphModule, torch.fx.GraphModule]]:
    """The graphs before and after the pass, which runs on the CPU with the settings of NVIDIA GPUs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    seen = []

    def observed(gm: torch.fx.GraphModule, target: Target) -> torch.fx.GraphModule:
        seen.append((gm, channels.channels_last(gm, target)))
        return seen[-1][1]

    monkeypatch.setattr(CpuTarget, "channels_last", CudaTarget.channels_last)
    monkeypatch.setattr(dynamo, "channels_last", observed)
    return seen


def orders(gm: torch.fx.GraphModule) -> list[bool]:
    """For each convolution, whether its image has contiguous channels."""
    return [n.args[0].meta["example_value"].is_contiguous(memory_format=torch.channels_last)
            for n in gm.graph.nodes if channels.name_of(n) == "conv2d"]


def conv(cin: int = 72, cout: int = 72, k: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, k, padding=k // 2, **options)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(), nn.BatchNorm2d(72), nn.ReLU(inplace=True), conv(k=1), nn.BatchNorm2d(72))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return F.relu_(y)


def trained(model: nn.Module, x: Tensor, f: Callable[..., Any]) -> list[Tensor]:
    """The results, gradients and buffers of one training step."""
    x = x.detach().requires_grad_()
    results = f(x)
    results = results if isinstance(results, tuple) else (results,)
    sum((r.square().mean() * (k + 1) for k, r in enumerate(results)), torch.zeros(())).backward()
    assert x.grad is not None
    return [*results, x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def check(model: nn.Module, x: Tensor) -> None:
    other = copy.deepcopy(model)
    for ours, theirs in zip(trained(other, x, torch.compile(other, backend="flambeau")), trained(model, x, model),
                            strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
        assert [(n, a) for n, a in zip(ours.shape, ours.stride()) if n > 1] == [
            (n, a) for n, a in zip(theirs.shape, theirs.stride()) if n > 1]


class Made(nn.Module):
    """Convolutions around a function of two images."""

    def __init__(self, between: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.between = conv(3, 72), conv(), between

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return self.between(y, self.second(y))


def test_a_network(graphs: list[Any]) -> None:
    check(nn.Sequential(conv(3, 72, bias=False), nn.MaxPool2d(2), *(Residual() for _ in range(3)),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(72, 5)), torch.randn(2, 3, 12, 12))
    (before, after), = graphs
    assert not any(orders(before)[:1]) and all(orders(after)) and len(orders(after)) == 7
    copies = [n for n in after.graph.nodes if n.target == "contiguous"]
    assert len(copies) == 1 + 4, copies  # the image, and the weights with windows larger than 1 x 1


@pytest.mark.parametrize("between", [
    lambda y, z: (y, z),
    lambda y, z: (y.view(2, -1), z.reshape(2, -1)),
    lambda y, z: torch.as_strided(z, (2, 5), (1, 7)),
    lambda y, z: torch.cat((y, z), 1)[:, ::2].sum(1),
    lambda y, z: y.permute(0, 2, 3, 1) @ z.transpose(1, 2),
    lambda y, z: z.unfold(2, 2, 1).sum(-1),
    lambda y, z: F.interpolate(y, scale_factor=2.0) + F.interpolate(z, scale_factor=2.0),
    lambda y, z: F.group_norm(y, 8) * torch.sigmoid(z).mean((2, 3), keepdim=True),
    lambda y, z: torch.stack([t.abs().mean() for t in (y / y.stride(0), z)]),
], ids=["returned", "views", "strides", "slices", "products", "windows", "resized", "norms", "asked"])
def test_whoever_looks_sees_the_same(between: Callable[[Tensor, Tensor], Any], graphs: list[Any]) -> None:
    check(Made(between), torch.randn(2, 3, 6, 6))
    assert all(orders(graphs[0][1]))


def test_a_tail_pays(graphs: list[Any]) -> None:
    """What comes after a convolution writes its result in the order of the caller."""
    check(nn.Sequential(conv(3, 72), nn.GELU()), torch.randn(2, 3, 6, 6))
    assert all(orders(graphs[0][1]))


def write_to_view(y: Tensor, z: Tensor) -> Tensor:
    z.flatten(1).add_(1.0)
    return z * y


@pytest.mark.parametrize("model", [
    Made(write_to_view),
    Made(lambda y, z: (y + z)[:, ::2]),
    nn.Sequential(conv(3, 72), conv(72, 72, groups=2)),
    nn.Sequential(conv(3, 16), conv(16, 16)),
    nn.Sequential(conv(3, 72).double(), conv().double()),
    nn.Sequential(conv(3, 72), *(nn.Tanh() for _ in range(60))),
    conv(3, 72),  # the image and the result would have to be copied
    nn.Sequential(conv(3, 72, k=1), nn.ReLU(), conv(k=1)),  # these are matrix products in either layout
], ids=["write", "own", "grouped", "small", "double", "rare", "alone", "points"])
def test_what_keeps_its_order(model: nn.Module, graphs: list[Any]) -> None:
    check(model, torch.randn(2, 3, 6, 6, dtype=next(model.parameters()).dtype))
    before, after = graphs[0]
    assert before is after


def test_autocast_inside(graphs: list[Any]) -> None:
    class Mixed(nn.Module):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.first, self.second, self.fails = conv(3, 72), conv(), fails

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.second(self.first(x))
                if self.fails:
                    y.flatten(1).add_(1.0)
            return y.float()

    for fails in (False, True):
        model = Mixed(fails)
        got = torch.compile(model, backend="flambeau")(x := torch.randn(2, 3, 6, 6))
        torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
        assert (graphs[-1][0] is graphs[-1][1]) == fails and not torch.is_autocast_enabled("cpu")
    assert all(orders(graphs[0][1]))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="flambeau", options={"numerics": "eager"})(x)
    assert len(graphs) == 2  # eager's bits need eager's layout


@pytest.mark.parametrize("sides, window, ordered", [(2, 3, True), (3, 2, True), (2, 1, False), (1, 3, False)])
def test_transposed_convolutions_of_a_cpu(sides: int, window: int, ordered: bool, graphs: list[Any],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN does them several times faster so: those of images and volumes with windows, and no other ones."""
    monkeypatch.setattr(CpuTarget, "channels_last", OWN)
    layer = getattr(nn, f"ConvTranspose{sides}d")(3, 4, window)
    check(nn.Sequential(layer, nn.GELU(), getattr(nn, f"Conv{sides}d")(4, 2, 3)), torch.randn(2, 3, *[5] * sides))
    (before, after), = graphs
    assert (before is not after) == ordered
    halves = Convolution("conv_transpose2d", torch.bfloat16, (3, 4), (1, 1), 1, 1000, True)
    assert [*CpuTarget().channels_last([halves], 1)] == [halves]
    if ordered:
        order = channels.ORDERS[sides + 2]
        images = {channels.name_of(n): value(n.args[0]) for n in after.graph.nodes if channels.convolution(n)}
        assert images[f"conv_transpose{sides}d"].is_contiguous(memory_format=order)


def test_gradients_lie_as_in_eager(graphs: list[Any]) -> None:
    model, x = nn.Sequential(conv(3, 72), nn.ReLU(), conv()), torch.randn(2, 3, 6, 6, requires_grad=True)
    for run in (model, torch.compile(model, backend="flambeau")):
        given = torch.autograd.grad(run(x * 2).sum(), [x, *model.parameters()])
        assert all(g.is_contiguous() for g in given)
    assert all(orders(graphs[0][1]))


def test_sizes_of_the_run(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTarget, "channels_last", OWN)
    layer, x = nn.ConvTranspose2d(3, 4, 3), torch.randn(2, 3, 5, 7)
    torch.testing.assert_close(torch.compile(layer, backend="flambeau", dynamic=True)(x), layer(x))
    assert graphs[0][0] is graphs[0][1]
