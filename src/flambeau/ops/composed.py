"""Operators that the device composes of others: results whose size depends on data, random draws that need a sort, and
long concatenations. NotImplemented leaves a call to the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flambeau.ir.dtypes import SUPPORTED

from .facts import describe

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
F = TypeVar("F", bound=Callable[..., Any])
PARTS = 16  # tensors of a list that one kernel joins: its compile time grows with the square of their number


def composed(op: Any, **more: Any) -> Callable[[F], F]:
    """Register a composition as the device's implementation of this operator, together with other facts."""

    def register(fn: F) -> F:
        describe(op, composed=fn, **more)
        return fn

    return register


@composed(aten.equal.default)
def equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x == y).all().item())


@composed(aten.nonzero.default)
def nonzero(x: Tensor) -> Tensor:
    """Number the nonzero elements with a cumulative sum; each then writes its position to the place of its number."""
    mask = (x != 0).reshape(-1)
    numbers = mask.cumsum(0)
    count = int(numbers[-1].item()) if mask.numel() else 0
    # One extra place receives all other elements.
    place = torch.where(mask, numbers - 1, count)
    found = x.new_empty(count + 1, dtype=torch.int64)
    found = found.scatter_(0, place, torch.arange(mask.numel(), device=x.device))[:count]
    columns = []
    for size in reversed(x.shape):
        columns.append(found % size)
        found = found // size
    rows = torch.stack(columns[::-1]) if columns else x.new_empty((0, count), dtype=torch.int64)
    return rows.as_strided((count, x.dim()), (1, count))  # as eager's lie


@composed(aten.masked_select.default)
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    x, mask = torch.broadcast_tensors(x, mask)
    return x.reshape(-1).index_select(0, nonzero(mask.reshape(-1))[:, 0])


def as_places(x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None] | None:
    """Indices with masks converted to positions, all on the device; None if nothing has to be converted."""
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


@composed(aten.index.Tensor)
def index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    places = as_places(x, indices)
    if places is None:
        return NotImplemented
    return aten.index.Tensor(x, places)


@composed(aten._index_put_impl_.default)
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


@composed(aten.histc.default)
def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count integers, which the CPU's operator does not support, but code for accelerators relies on."""
    if x.is_floating_point():
        return NotImplemented
    lo, hi = int(min), int(max)
    if lo == hi and x.numel():
        lo, hi = int(x.min().item()), int(x.max().item())
    if lo == hi:
        lo, hi = lo - 1, hi + 1
    wide = x.reshape(-1).to(torch.int64)
    place = ((wide - lo) * bins // (hi - lo)).clamp_max(bins - 1)
    # One extra place for elements outside of the range.
    place = torch.where((wide >= lo) & (wide <= hi), place, bins)
    return x.new_zeros(bins + 1).index_add_(0, place, torch.ones_like(wide, dtype=x.dtype))[:bins]


# ---- unique ----------------------------------------------------------------------------------------------


def runs(begins: Tensor, order: Tensor | None, inverse: bool, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Describe runs of equal elements, given where they begin: the starts, the run of each element, and the lengths.

    `order`: the original positions of the elements before sorting."""
    starts = nonzero(begins)[:, 0]
    none = starts.new_empty(0)
    number, length = none, none
    if inverse:
        number = begins.cumsum(0) - 1
        number = number if order is None else torch.empty_like(number).scatter_(0, order, number)
    if counts:
        length = torch.cat((starts[1:], starts.new_full((1,), begins.numel()))) - starts if starts.numel() else none
    return starts, number, length


def begins_of(rows: Tensor) -> Tensor:
    """Whether each element, or row, differs from the previous one."""
    other = rows[1:] != rows[:-1]
    other = other.any(1) if other.dim() > 1 else other
    return torch.cat((other.new_ones(min(rows.shape[0], 1)), other))


@composed(aten._unique2.default)
def unique2(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    line, order = x.reshape(-1).sort(stable=True)
    starts, number, length = runs(begins_of(line), order, return_inverse, return_counts)
    return line.index_select(0, starts), number.reshape(x.shape) if return_inverse else number, length


@composed(aten._unique.default)
def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False) -> Any:
    return unique2(x, sorted, return_inverse)[:2]


@composed(aten.unique_consecutive.default)
def unique_consecutive(x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
                       ) -> Any:
    if dim is not None and not (x.dim() == 1 and dim in (0, -1)):
        return unique_dim_consecutive(x, dim, return_inverse, return_counts)
    line = x.reshape(-1)
    starts, number, length = runs(begins_of(line), None, return_inverse, return_counts)
    return line.index_select(0, starts), number.reshape(x.shape) if return_inverse else number, length


# Rows are sorted by one column after another. With more columns than this, the CPU is faster.
_COLUMNS = 64


@composed(aten.unique_dim.default)
def unique_dim(x: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
               ) -> Any:
    if not x.numel() or x.numel() > _COLUMNS * x.shape[dim] or x.is_floating_point() and bool(x.isnan().any()):
        return NotImplemented  # in eager, NaN is neither less nor greater, so rows with one have no order
    rows = x.movedim(dim, 0).reshape(x.shape[dim], -1)
    order = torch.arange(rows.shape[0], device=x.device)
    for column in reversed(rows.unbind(1)):
        order = order.index_select(0, column.index_select(0, order).sort(stable=True)[1])
    return rows_of_runs(x, dim, rows.index_select(0, order), order)


@composed(aten.unique_dim_consecutive.default)
def unique_dim_consecutive(x: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False) -> Any:
    if not x.numel():
        return NotImplemented
    return rows_of_runs(x, dim, x.movedim(dim, 0).reshape(x.shape[dim], -1), None)


def rows_of_runs(x: Tensor, dim: int, rows: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns run numbers and lengths in any case, as the CPU's operator does."""
    starts, number, length = runs(begins_of(rows), order, True, True)
    shape = x.movedim(dim, 0).shape[1:]
    return rows.index_select(0, starts).reshape(-1, *shape).movedim(0, dim), number, length


# ---- draws -----------------------------------------------------------------------------------------------


@composed(aten.multinomial.default)
def multinomial(x: Tensor, n: int, replacement: bool = False, generator: torch.Generator | None = None) -> Tensor:
    """Draw by ranking p_i / q_i with q ~ Exp(1): the largest is at i with probability p_i, and so is the next of the
    rest."""
    if x.dim() not in (1, 2) or not x.is_floating_point() or n <= 0 or x.shape[-1] > 2**24 or (
            not replacement and n > x.shape[-1]):
        return NotImplemented  # eager then raises the error
    if x.dim() == 2 and not x.shape[0]:
        return x.new_empty((0, n), dtype=torch.int64)
    several = replacement and n > 1
    wide = x if x.dtype is torch.float64 else x.float()
    total = wide.sum(-1, keepdim=True)
    wrong = torch.stack(((x < 0).any(), ~x.isfinite().all(), (total <= 0).any())).tolist()
    if any(wrong):
        said = ("encountering probability entry < 0", "encountering probability entry = infinity or NaN",
                "sum of probabilities <= 0")
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"
                           if not several and not wrong[2] or not several and any(wrong[:2])
                           else f"invalid multinomial distribution ({said[wrong.index(True)]})")
    if not several:
        q = x / torch.empty_like(x).exponential_(1, generator=generator)
        return q.argmax(-1, keepdim=True) if n == 1 else q.topk(n)[1]
    drawn = torch.empty((*x.shape[:-1], n), dtype=wide.dtype, device=x.device).uniform_(generator=generator)
    # Take the first cumulative sum that is greater, which never belongs to a category of probability zero. The random
    # number is below one, so its product with the total stays below the total.
    sums = wide.cumsum(-1)
    return torch.searchsorted(sums, drawn * sums[..., -1:], right=True)


@composed(aten.randperm.generator_out)
def randperm(n: int, generator: torch.Generator | None = None, *, out: Tensor) -> Tensor:
    """The sort order of random numbers with so many bits that they are all different."""
    exact = 2 / torch.finfo(out.dtype).eps if out.dtype.is_floating_point else 2**31
    if not n or n > min(exact, 2**31) or out.dtype not in SUPPORTED or torch.tensor(n).to(out.dtype).long() != n:
        return NotImplemented  # includes arguments that eager rejects
    keys = torch.empty(n, dtype=torch.int64, device=out.device).random_(generator=generator)
    if out.shape != (n,):
        out.resize_(n)
    return out.copy_(keys.argsort())


# ---- many parts --------------------------------------------------------------------------------------------


@composed(aten.cat.default, parts=PARTS)
def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return joined(aten.cat.default, tensors, dim, lambda t: t)


@composed(aten.cat.out, parts=PARTS)
def cat_out(tensors: list[Tensor], dim: int = 0, *, out: Tensor) -> Tensor:
    made = cat(tensors, dim)
    return made if made is NotImplemented else aten.cat.out([made], dim, out=out)


@composed(aten.stack.default, parts=PARTS)
def stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return joined(aten.stack.default, tensors, dim, lambda t: t.unsqueeze(dim))


@composed(aten.stack.out, parts=PARTS)
def stack_out(tensors: list[Tensor], dim: int = 0, *, out: Tensor) -> Tensor:
    made = stack(tensors, dim)
    return made if made is NotImplemented else aten.cat.out([made], dim, out=out)


def joined(op: Any, tensors: list[Tensor], dim: int, part: Callable[[Tensor], Tensor]) -> Tensor:
    """Join some tensors at a time, each into its place in the result."""
    if len(tensors) <= PARTS:
        return NotImplemented
    first = tensors[0]
    alike = first.dim() < 4 and all(t.shape == first.shape and t.dtype is first.dtype and t.is_contiguous()
                                    for t in tensors)
    try:
        like = op([torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                   for t in (tensors[:1] if alike else tensors)], dim)
    except (RuntimeError, IndexError):  # the CPU then raises its error
        return NotImplemented
    if alike:
        shape = [*like.shape]
        shape[dim] *= len(tensors)
        like = like.new_empty(shape)
    if like.dtype not in SUPPORTED:
        return NotImplemented
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=first.device)
    # Tensors of shape (0,) can be joined with any others.
    parts = [p for t in tensors if (p := part(t)).shape != (0,) or like.dim() == 1]
    at = 0
    for k in range(0, len(parts), PARTS):
        some = parts[k:k + PARTS]
        size = sum(p.shape[dim] for p in some)
        aten.cat.out(some, dim, out=out.narrow(dim, at, size))
        at += size
    return out
