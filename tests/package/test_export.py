"""Packages have the bits of the compiler, with any sizes, and hold what they are told to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import flambeau

F = nn.functional


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.gelu(self.norm(x))
        return {"soft": torch.softmax(y, -1), "sum": y.sum(0), "best": y.argmax(-1)}


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(64, 24, mode="mean")
        self.table = nn.Embedding(64, 24)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bag(ids, offsets) + self.table(ids[:1])


class Sampling(nn.Module):
    """Sampling and pooling; the height is a size of the run."""

    def forward(self, image: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = F.grid_sample(image, grid, align_corners=False)
        best, where = F.max_pool2d(F.avg_pool2d(found, 2), 2, return_indices=True)
        return best, where, F.adaptive_avg_pool2d(found, 3)


class Scans(nn.Module):
    """Rows and their length are sizes of the run."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.cumsum(-1), x.cumprod(0), *x.cummax(-1), x.logcumsumexp(-1)


class Attention(nn.Module):
    """A layer of a transformer; the length is a size of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.RMSNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.relu(self.norm(self.conv(image)))
        best, where = self.head(y.mean((2, 3))).topk(2)
        return best, where


def batch(name: str, **more: int) -> dict[int, Dim]:
    return {0: Dim(name, **more)}


MODELS = {
    "norms": (Norms, lambda n: (torch.randn(n, 48),), {"x": batch("N", min=2, max=512)}),
    "bags": (Bags, lambda n: (torch.randint(0, 64, (4 * n,)), torch.arange(0, 4 * n, 4)),
             {"ids": batch("ids"), "offsets": batch("bags")}),
    "sampling": (Sampling, lambda n: (torch.randn(n, 3, 16, 16), torch.rand(n, 4 * n, 16, 2) * 2.2 - 1.1),
                 {"image": batch("N"), "grid": {**batch("N"), 1: 4 * Dim("h", min=2, max=16)}}),
    "scans": (Scans, lambda n: (torch.randn(n, 7 * n),), {"x": {**batch("N"), 1: Dim("T", max=4096)}}),
    "attention": (Attention, lambda n: (torch.randn(2, n, 32),), {"x": {1: Dim("T", min=2, max=256)}}),
    "images": (Images, lambda n: (torch.randn(n, 3, 12, 12),), {"image": batch("N")}),
}


def leaves(x: object) -> list[torch.Tensor]:
    if isinstance(x, dict):
        return [y for v in x.values() for y in leaves(v)]
    return [y for v in x for y in leaves(v)] if isinstance(x, list | tuple) else [x]  # type: ignore[list-item]


@pytest.mark.parametrize("name", MODELS)
def test_package_has_the_bits_of_the_compiler(name: str, tmp_path) -> None:
    make, args, shapes = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    path = tmp_path / "model.flam"
    flambeau.export(model, args(5), path, dynamic_shapes=shapes)
    compiled = torch.compile(model, backend="flambeau", options={"target": "cpu-alone"})
    with flambeau.load(path) as module, torch.no_grad():
        for n in (5, 8) if shapes else (5,):
            given = args(n)
            for x, dims in zip(given, (shapes or {}).values()):
                torch._dynamo.mark_dynamic(x, list(dims))  # those sizes are symbols there too
            ours, expected = module.forward(*given), compiled(*given)
            assert type(ours) is type(expected)
            for a, b in zip(leaves(ours), leaves(expected), strict=True):
                assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
            arrays = module.forward(*(x.numpy() for x in given))
            for a, b in zip(leaves(arrays), leaves(expected), strict=True):
                assert isinstance(a, np.ndarray) and np.array_equal(a, b.numpy())
        for n in (0, 1) if name == "images" else ():  # torch traces with sizes from two on, and promises these
            given = args(n)
            for a, b in zip(leaves(module.forward(*given)), leaves(model(*given)), strict=True):
                torch.testing.assert_close(a, b)


def test_functions_with_sizes_of_the_run(tmp_path) -> None:
    def shifted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = x.half() + y[1:]
        return both, both[None].expand(2, -1)

    n = Dim("n")
    flambeau.export(shifted, (torch.ones(4), torch.ones(5)), tmp_path / "f.flam", numerics="eager",
                    dynamic_shapes=({0: n}, {0: n + 1}))
    with flambeau.load(tmp_path / "f.flam") as module:
        x, y = torch.randn(7), torch.randn(8)
        for a, b in zip(module.forward(x, y), shifted(x, y), strict=True):
            assert torch.equal(a, b)
        with pytest.raises(flambeau.Error, match=r"input 'y': expected float32 \[n \+ 1\] contiguous, got "):
            module.forward(x, y[1:])


def test_the_same_model_gives_the_same_bytes(tmp_path) -> None:
    model, args = Norms().eval(), (torch.randn(4, 48),)
    names = [flambeau.export(model, args, tmp_path / f"{k}.flam") for k in range(2)]
    assert names[0] == names[1] and (tmp_path / "0.flam").read_bytes() == (tmp_path / "1.flam").read_bytes()
