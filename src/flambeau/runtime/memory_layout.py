"""Memory layout of tensors: their extent, whether elements overlap, and copies with the same layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Places from the first element to the last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlapping(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one place: each stride must reach beyond all that smaller ones reach."""
    taken = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < taken:
            return True
        taken += stride * (size - 1)
    return False


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill all that they reach, each place for one of them."""
    return 0 in shape or (reach(shape, strides) == math.prod(shape) and not overlapping(shape, strides))


def dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() or is_dense(t.shape, t.stride())


def copied(t: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
    """A tensor in memory of its own with the same strides, gaps and places that elements share included."""
    t, dtype, device = t.detach(), dtype or t.dtype, device or t.device
    if t.layout is not torch.strided:
        return t.clone().to(device, dtype)
    made = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device)
    count = reach(t.shape, t.stride())
    made.as_strided((count,), (1,)).copy_(t.as_strided((count,), (1,), t.storage_offset()))
    return made
