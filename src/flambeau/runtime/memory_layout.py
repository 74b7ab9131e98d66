"""Memory layout of tensors: whether they have gaps, and copies with the same layout."""

from __future__ import annotations

import torch

from flambeau.ir.lines import is_dense, reach


def dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() or is_dense(t.shape, t.stride())


def copied(t: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
    """Copy a tensor into new memory with the same strides, including gaps and overlapping elements."""
    t, dtype, device = t.detach(), dtype or t.dtype, device or t.device
    if t.layout is not torch.strided:
        return t.clone().to(device, dtype)
    made = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device)
    count = reach(t.shape, t.stride())
    made.as_strided((count,), (1,)).copy_(t.as_strided((count,), (1,), t.storage_offset()))
    return made
