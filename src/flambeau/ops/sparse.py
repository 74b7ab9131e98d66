"""Products with sparse matrices, which the CPU computes for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from flambeau.ops.facts import describe
from flambeau.torch_compat.dispatch import AutoDispatchBelowAutograd

aten = torch.ops.aten


def mm_reduce(x: Tensor, other: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """The CPU tells which elements a maximum came from if x wants a gradient, which its copy on the host does not say;
    its backward takes for granted that it did."""
    with AutoDispatchBelowAutograd(), torch.enable_grad():
        return aten._sparse_mm_reduce_impl(x.requires_grad_(), other, reduce)


describe(aten._sparse_mm_reduce_impl.default, instead_of_sparse=mm_reduce)
