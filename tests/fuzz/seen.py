"""Everything that a caller can observe of a call: results, inputs afterwards, gradients, and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .program import Program


@dataclass
class Seen:
    """The observable properties of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    grad: bool
    value: Tensor


@dataclass
class Call:
    """The observable effects of one call."""

    error: BaseException | None = None
    results: list[Seen] = field(default_factory=list)
    inputs: list[Seen] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)  # the whole storage of each input
    gradients: list[Seen | None] = field(default_factory=list)
    shared: dict[tuple[int, int], int] = field(default_factory=dict)  # pairs of tensors: offset in bytes between them
    same: list[int] = field(default_factory=list)  # for each result the first tensor that is the same object


def seen(t: Tensor) -> Seen:
    value = t.detach().cpu()
    return Seen(t.dtype, tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.requires_grad,
                value.clone(memory_format=torch.contiguous_format))


def storage_of(t: Tensor) -> Tensor:
    flat = t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return flat.cpu().clone()


def call(program: Program, function: Callable[..., Any], sizes: Mapping[str, int], device: str = "cpu",
         is_wide: bool = False) -> Call:
    """Makes one call with fresh arguments, and records its observable effects."""
    torch.manual_seed(0)
    args = program.call(sizes, device, is_wide)
    tensors = [a for a in args if isinstance(a, Tensor)]
    out = Call()
    try:
        made = list(function(*args))
        out.results = [seen(t) for t in made]
    except Exception as e:
        out.error = e
        return out
    everything = [*tensors, *made]
    out.inputs = [seen(t) for t in tensors]
    out.memory = [storage_of(t) for t in tensors]
    out.same = [next(j for j, o in enumerate(everything) if o is t) for t in made]
    for j, a in enumerate(everything):
        for k in range(max(j + 1, len(tensors)), len(everything)):
            b = everything[k]
            x, y = a.untyped_storage(), b.untyped_storage()
            if x._cdata == y._cdata:
                far = b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size()
                out.shared[j, k] = far if a.numel() and b.numel() else 0  # offsets of empty tensors do not count
    leaves = [a for a in tensors if a.requires_grad]
    live = list({id(t): t for t in made if t.requires_grad}.values())
    if program.grad and live and leaves:
        try:
            seeds = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape).to(t.device) for t in live]
            gradients = torch.autograd.grad(live, leaves, seeds, allow_unused=True)
            out.gradients = [g if g is None else seen(g) for g in gradients]
        except Exception as e:
            out.error = e
    return out
