"""Whether eager has a kernel for the dtypes of a call: where it has none, the call is left to it, and it says so.

PyTorch's rules for shapes and dtypes let calls through that its kernels refuse, such as a softmax of integers. Eager
itself is asked, once for each combination of dtypes, with tensors of one element.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from .devices import CPU

# What eager says about dtypes. Tensors of one element may not fit together in other ways, which says nothing.
_ABOUT_DTYPES = re.compile(r"not implemented for|not support|only supports?\b|[Dd]type\b")


def eager_has_kernel(n: fx.Node, device: torch.device) -> bool:
    op: Any = n.target
    if not _can_be_asked(op):
        return True
    try:
        key = _described((n.args, tuple(sorted(n.kwargs.items()))))
    except TypeError:  # an argument that is not hashable
        return True
    # GPUs have kernels for more dtypes than CPUs: where those do, there is no need to ask them.
    return _has_kernel(op, key, CPU) or (device.type == "cuda" and _has_kernel(op, key, device))


def _can_be_asked(op: Any) -> bool:
    """A draw would move eager's generator on. Operators for people check their arguments; private ones of several
    tensors and gradients trust who calls them, and may read beyond what they are given."""
    name = op._schema.name.partition("::")[2]
    tensors = sum("Tensor" in str(a.type) for a in op._schema.arguments)
    trusting = (name.startswith("_") and tensors > 1) or "backward" in name
    return not (op.is_view or trusting or torch.Tag.nondeterministic_seeded in op.tags)


def _described(x: Any) -> Any:
    """Arguments as something hashable: dtype and rank of tensors, numbers as they are, sizes as ones."""
    if isinstance(x, fx.Node):
        x = x.meta.get("val")
    if isinstance(x, (list, tuple)):
        return tuple(_described(y) for y in x)
    if isinstance(x, torch.Tensor):
        return _One(x.dtype, x.dim())
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return 1
    hash(x)
    return x


class _One(tuple[torch.dtype, int]):
    def __new__(cls, dtype: torch.dtype, rank: int) -> _One:
        return super().__new__(cls, (dtype, rank))

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.zeros((1,) * self[1], dtype=self[0], device=device)


@cache
def _has_kernel(op: Any, key: tuple[Any, ...], device: torch.device) -> bool:
    def given(x: Any) -> Any:
        if isinstance(x, _One):
            return x.tensor(device)
        return [given(y) for y in x] if isinstance(x, tuple) else x

    args, kwargs = key
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            op(*given(args), **{name: given(value) for name, value in kwargs})
    except Exception as error:
        return not _ABOUT_DTYPES.search(str(error))
    return True
