"""Small models of five kinds train on the device "flambeau" without the CPU's help; test_device.py runs this apart."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flambeau
from flambeau.device.fallback import reset_fallbacks


class Language(nn.Module):
    """With one weight for words at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(self.embedding(x))).flatten(0, 1), x.flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, 1, 1, groups=2), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Volumes(nn.Module):
    """Down, up, and both joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.up = nn.Conv3d(4, 6, 2, 2), nn.ConvTranspose3d(6, 4, 2, 2)
        self.last = nn.Conv3d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)))
        joined = torch.cat([self.up(F.relu(self.down(h))), h], 1)
        return F.binary_cross_entropy_with_logits(self.last(joined), (x > 0).float())


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 8, mode=mode) for mode in ("sum", "mean"))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self.head(torch.cat([bag(x) for bag in self.bags], 1)),
                                                  (x[:, :1] > 9).float())


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(5, 6), nn.GRU(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0])[0].square().mean()


INPUTS = {
    Language: lambda: torch.randint(20, (2, 7)), Images: lambda: torch.randn(2, 3, 16, 16),
    Volumes: lambda: torch.randn(1, 2, 4, 4, 4), Bags: lambda: torch.randint(30, (6, 4)),
    Sequences: lambda: torch.randn(3, 2, 5)}


@pytest.mark.parametrize("kind", INPUTS)
def test_training_needs_no_cpu(kind: type[nn.Module]) -> None:
    flambeau.enable_device()
    torch.manual_seed(0)
    model, x = kind(), INPUTS[kind]()
    reset_fallbacks()
    losses = []
    for device in ("cpu", "flambeau"):
        there, given = copy.deepcopy(model), x.to(device)
        optimizer = torch.optim.AdamW(there.parameters(), 1e-2)
        there.to(device)
        for _ in range(3):
            optimizer.zero_grad()
            loss = there(given)
            loss.backward()
            nn.utils.clip_grad_norm_(there.parameters(), 1.0)
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert flambeau.fallbacks() == []
