"""Memory of tensors: allocation without the dispatcher, and reference counts.

In a compiled graph, an allocation with `torch.empty_strided` takes 1 us longer than with these functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import TensorBase

if TYPE_CHECKING:
    from torch._C._dynamo.guards import TensorGuards

__all__ = ["TensorBase", "TensorGuards", "storage_use_count"]

storage_use_count = torch._C._storage_Use_Count
# torch builds without CUDA lack the second one.
_ALLOCATORS = {"empty_strided_cpu": "_empty_strided_cpu", "empty_strided_cuda": "_empty_strided_cuda"}


def __getattr__(name: str) -> Any:
    guards: Any = torch._C._dynamo.guards
    if name == "TensorGuards":  # checks properties of many tensors in one call: dtype, sizes, keys, devices
        return guards.TensorGuards
    if name in _ALLOCATORS:
        return getattr(guards, _ALLOCATORS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
