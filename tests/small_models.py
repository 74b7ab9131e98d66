"""Small functions for tests of targets, which check their outputs and gradients through `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def gradients(f: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x for x in inputs if x.requires_grad]
    y = f(*inputs)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)), (5, 6)),
    "softmax": (lambda x: x.softmax(-1).cumsum(0), (9, 70)),
    "pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 7, 9)),
    "norm": (nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "views": (lambda x: (x.t().contiguous()[1:] * x[:, 1:].t()).sum(1), (6, 8)),
}
