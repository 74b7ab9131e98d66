"""Operators of the device that are made of others: those whose results are as large as data say, and their users.

Where the others cannot serve a call either (a dtype that only the CPU has), it goes on to the fallback.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flambeau.ir.dtypes import SUPPORTED

from .device_kernels import aten_named, private

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x == y).all().item())


def nonzero(x: Tensor) -> Tensor:
    """Elements that are not zero are counted through; each writes its place at its number."""
    mask = (x != 0).reshape(-1)
    numbers = mask.cumsum(0)
    count = int(numbers[-1].item()) if mask.numel() else 0
    # One place more, for all the others.
    place = torch.where(mask, numbers - 1, count)
    found = x.new_empty(count + 1, dtype=torch.int64)
    found = found.scatter_(0, place, torch.arange(mask.numel(), device=x.device))[:count]
    columns = []
    for size in reversed(x.shape):
        columns.append(found % size)
        found = found // size
    return torch.stack(columns[::-1], 1) if columns else x.new_empty((count, 0), dtype=torch.int64)


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x.reshape(-1).index_select(0, nonzero(mask.reshape(-1))[:, 0])


def as_places(x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None] | None:
    """Indices with places instead of masks, all on the device; None where they are so already."""
    if not any(i is not None and (i.dtype in _MASKS or i.device != x.device) for i in indices):
        return None
    out: list[Tensor | None] = []
    for i in indices:
        if i is None:
            out.append(None)
        elif i.dtype in _MASKS:
            if i.dtype is torch.uint8:
                warnings.warn("indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool "
                              "instead.", stacklevel=2)
            at = len(out)
            for k, (size, expected) in enumerate(zip(i.shape, x.shape[at:])):
                if size != expected:
                    raise IndexError(f"The shape of the mask {list(i.shape)} at index {k} does not match the shape of "
                                     f"the indexed tensor {list(x.shape)} at index {at + k}")
            out.extend(nonzero(i.to(x.device)).unbind(1))
        else:
            out.append(i.to(x.device))
    return out


def index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    places = as_places(x, indices)
    if places is None:
        return NotImplemented
    return aten.index.Tensor(x, places)


def index_put_impl_(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False,
                    unsafe: bool = False) -> Tensor:
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and mask.dtype is torch.bool and values.numel() == 1 and not accumulate \
            and mask.dim() <= x.dim() and mask.shape == x.shape[:mask.dim()]:
        mask = mask.to(x.device).reshape(*mask.shape, *(1,) * (x.dim() - mask.dim()))
        return x.masked_fill_(mask, values.reshape(()).to(x.dtype))
    places = as_places(x, indices)
    if places is None:
        return NotImplemented
    return aten._index_put_impl_.default(x, places, values, accumulate, unsafe)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of integers, which the CPU does not count, and code for accelerators takes for granted."""
    if x.is_floating_point():
        return NotImplemented
    lo, hi = int(min), int(max)
    if lo == hi and x.numel():
        lo, hi = int(x.min().item()), int(x.max().item())
    if lo == hi:
        lo, hi = lo - 1, hi + 1
    wide = x.reshape(-1).to(torch.int64)
    place = ((wide - lo) * bins // (hi - lo)).clamp_max(bins - 1)
    # One place more, for what is outside.
    place = torch.where((wide >= lo) & (wide <= hi), place, bins)
    return x.new_zeros(bins + 1).index_add_(0, place, torch.ones_like(wide, dtype=x.dtype))[:bins]


_COMPOSED: dict[str, Callable[..., Any]] = {
    "equal": equal, "nonzero": nonzero, "masked_select": masked_select, "index.Tensor": index,
    "_index_put_impl_": index_put_impl_, "histc": histc,
}


def register_composed(aten_library: torch.library.Library, otherwise: Callable[..., Any]) -> None:
    """`otherwise(op, *args)` computes what these cannot."""
    for name, compute in _COMPOSED.items():
        aten_library.impl(name, private(_composed(aten_named(name), compute, otherwise)), "PrivateUse1")


def _composed(op: Any, compute: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor, *args: Any) -> Any:
        mixed = x.is_cpu or any(isinstance(a, Tensor) and a.device != x.device for a in args)
        out = NotImplemented if x.dtype not in SUPPORTED or mixed else compute(x, *args)
        return otherwise(op, x, *args) if out is NotImplemented else out

    return call
