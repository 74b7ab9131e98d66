"""Memory of tensors: allocation without the dispatcher, and reference counts.

An allocation of a compiled graph by `torch.empty_strided` costs 1 us more than by these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import TensorBase

if TYPE_CHECKING:
    from torch._C._dynamo.guards import TensorGuards

__all__ = ["TensorBase", "TensorGuards", "storage_use_count"]

storage_use_count = torch._C._storage_Use_Count
# Builds of torch without CUDA have no function for it.
_ALLOCATORS = {"empty_strided_cpu": "_empty_strided_cpu", "empty_strided_cuda": "_empty_strided_cuda"}


def __getattr__(name: str) -> Any:
    guards: Any = torch._C._dynamo.guards
    if name == "TensorGuards":  # properties of many tensors, checked in one call: dtype, sizes, keys, devices
        return guards.TensorGuards
    if name in _ALLOCATORS:
        return getattr(guards, _ALLOCATORS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
