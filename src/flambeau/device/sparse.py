"""Sparse tensors on the device: indices and values are stored on the device, and the CPU computes with them.

PyTorch's sparse kernels that only access a tensor's parts, assemble it or copy it call other operators and touch no
memory. They work for the device unchanged; all other operators go to fallback.py, part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flambeau.ops.facts import facts
from flambeau.torch_compat.dispatch import (
    DispatchKey,
    DispatchKeySet,
    all_operator_names,
    has_kernel_for_key,
)

from .python_kernels import aten_named, private, short

if TYPE_CHECKING:
    from .fallback import Fallback

aten = torch.ops.aten

# The device's dispatch keys, and the CPU keys whose kernels serve them.
_KEYS = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU"}
_COMPOSITES = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_sparse(t: Tensor) -> bool:
    return t.layout in _PARTS


def parts(t: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the data: the tensor itself, or its indices and values."""
    return tuple(getattr(t, name)() for name in _PARTS[t.layout]) if is_sparse(t) else (t,)


def joined(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """A sparse tensor like `like` with other parts."""
    if like.layout is torch.sparse_coo:
        return aten._sparse_coo_tensor_unsafe(*parts, like.shape, is_coalesced=like.is_coalesced())
    return aten._sparse_compressed_tensor_unsafe(*parts, like.shape, dtype=like.dtype, layout=like.layout,
                                                 device=parts[-1].device)


def register_sparse(everything: torch.library.Library, aten_library: torch.library.Library, host: Fallback) -> None:
    """Register the sparse operators; `host` computes those that access memory."""
    has = has_kernel_for_key
    names = [name for name in all_operator_names() if name.startswith("aten::")]
    for key, of_cpu in _KEYS.items():
        everything.fallback(private(host.call), key)
        for name in names:
            if not has(name, of_cpu):
                continue
            op = aten_named(name.removeprefix("aten::"))
            if facts(op).sparse_structure:
                keys = DispatchKeySet(getattr(DispatchKey, of_cpu))
                aten_library.impl(short(op), private(partial(op.redispatch, keys)), key)
            elif (compute := facts(op).instead_of_sparse) is not None:
                aten_library.impl(short(op), host.instead(op, compute), key)
            elif any(has(name, composite) for composite in _COMPOSITES):  # these would precede a fallback
                aten_library.impl(short(op), private(partial(host.call, op)), key)
