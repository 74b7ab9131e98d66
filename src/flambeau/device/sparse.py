"""Sparse tensors of the device: their indices and values are tensors of it, and the CPU computes with them.

PyTorch's own sparse kernels that take such a tensor apart, put it together or copy it call other operators and look at
no memory. These serve the device as they are; all others go to fallback.py, part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flambeau.torch_compat.dispatch import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    DispatchKeySet,
    all_operator_names,
    has_kernel_for_key,
)

from .python_kernels import aten_named, private

if TYPE_CHECKING:
    from .fallback import Fallback

aten = torch.ops.aten

# The keys of the device, and those whose kernels the CPU has.
_KEYS = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU"}
_COMPOSITES = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_STRUCTURE = {
    "_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices",
    "_nnz", "sparse_dim", "dense_dim", "_dimI", "_dimV", "is_coalesced", "_coalesced_",
    "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "empty.memory_format", "empty_like",
    "clone", "copy_", "copy_sparse_to_sparse_", "sparse_resize_", "sparse_resize_and_clear_", "resize_as_sparse_",
    "permute", "unsqueeze", "view_as_real", "view_as_complex", "is_pinned", "_pin_memory",
}
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
    """The tensors that hold it: itself, or its indices and values."""
    return tuple(getattr(t, name)() for name in _PARTS[t.layout]) if is_sparse(t) else (t,)


def joined(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """What `like` is, of other parts."""
    if like.layout is torch.sparse_coo:
        return aten._sparse_coo_tensor_unsafe(*parts, like.shape, is_coalesced=like.is_coalesced())
    return aten._sparse_compressed_tensor_unsafe(*parts, like.shape, dtype=like.dtype, layout=like.layout,
                                                 device=parts[-1].device)


def mm_reduce(x: Tensor, other: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """The CPU tells which elements a maximum came from if x wants a gradient, which its copy on the host does not say;
    its backward takes for granted that it did."""
    with AutoDispatchBelowAutograd(), torch.enable_grad():
        return aten._sparse_mm_reduce_impl(x.requires_grad_(), other, reduce)


_INSTEAD: dict[str, Callable[..., Any]] = {"_sparse_mm_reduce_impl": mm_reduce}


def register_sparse(everything: torch.library.Library, aten_library: torch.library.Library, host: Fallback) -> None:
    """`host` computes what looks at memory."""
    has = has_kernel_for_key
    names = [name for name in all_operator_names() if name.startswith("aten::")]
    for key, of_cpu in _KEYS.items():
        everything.fallback(private(host.call), key)
        for name in names:
            if not has(name, of_cpu):
                continue
            if (short := name.removeprefix("aten::")) in _STRUCTURE:
                aten_library.impl(short, _as_on_cpu(short, of_cpu), key)
            elif short in _INSTEAD:
                aten_library.impl(short, host.instead(short, _INSTEAD[short]), key)
            elif any(has(name, composite) for composite in _COMPOSITES):  # which would come before a fallback
                aten_library.impl(short, private(partial(host.call, aten_named(short))), key)


def _as_on_cpu(name: str, key: str) -> Callable[..., Any]:
    keys = DispatchKeySet(getattr(DispatchKey, key))
    return private(partial(aten_named(name).redispatch, keys))
