"""Whether eager has a kernel for the dtypes of a call: where it has none, the call is left to it, and it says so.

PyTorch's rules for shapes and dtypes let calls through that its kernels refuse, such as a softmax of integers. Eager
itself is asked, once for each combination of dtypes, with tensors of two elements along each axis: eager warns of a
deviation of one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from flambeau.ops.facts import facts
from flambeau.runtime.placement import CPU, common_device, flat
from flambeau.torch_compat.dispatch import DisableAutocast, disable_current_modes, no_python_dispatcher
from flambeau.torch_compat.ops import OpOverload

# What eager says about dtypes. Such tensors may not fit together in other ways, which says nothing.
_ABOUT_DTYPES = re.compile(r"not implemented for|not support|only supports?\b|[Dd]type\b|scalar type|can't be cast")

SMALL = (torch.float16, torch.bfloat16)  # GPUs have kernels for them that the CPU lacks, and so has our device


def attempt(op: OpOverload, args: Any, kwargs: dict[str, Any], given: Callable[[Any], Any]) -> Any:
    """Its result for what `given` makes of its arguments; warnings and draws of it leave no trace."""
    state = torch.get_rng_state() if facts(op).random else None
    try:
        with (warnings.catch_warnings(), disable_current_modes(), no_python_dispatcher(), torch.no_grad(),
              DisableAutocast()):
            warnings.simplefilter("ignore")
            return op(*(given(x) for x in args), **{name: given(x) for name, x in kwargs.items()})
    finally:
        if state is not None:
            torch.set_rng_state(state)


def eager_has_kernel(op: OpOverload, args: Any, kwargs: Any, device: torch.device) -> bool:
    known = facts(op)
    if known.view or known.random or not known.checks:
        return True
    try:
        key = _described((args, tuple(sorted(kwargs.items()))))
    except TypeError:  # an argument that is not hashable
        return True
    # GPUs have kernels for more dtypes than CPUs: where those do, there is no need to ask them.
    if _has_kernel(op, key, CPU):
        return True
    if device.type == "cuda":
        return _has_kernel(op, key, device)
    return device.type != "cpu" and (wide := _wide(key)) != key and _has_kernel(op, wide, CPU)


def taken_apart(op: OpOverload, formula: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """The formula of an operator in terms of others, which would compute with anything, where eager has a kernel."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        device = common_device(flat((args, tuple(kwargs.values()))))
        return (formula if eager_has_kernel(op, args, kwargs, device) else whole)(*args, **kwargs)

    return asked


def _wide(x: Any) -> Any:
    """The same call in single precision: what that lacks, such as bits of floats, small floats lack everywhere."""
    if isinstance(x, _Few):
        return _Few(torch.float32, x[1]) if x[0] in SMALL else x
    return tuple(map(_wide, x)) if type(x) is tuple else x


def _described(x: Any) -> Any:
    """Arguments as something hashable: dtype and rank of tensors, numbers as they are, sizes as ones."""
    if isinstance(x, fx.Node):
        x = x.meta.get("example", x.meta.get("val"))  # of a number that only the run has: one of those that it may be
    if isinstance(x, (list, tuple)):
        return tuple(_described(y) for y in x)
    if isinstance(x, torch.Tensor):
        return _Few(x.dtype, x.dim())
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return _Number((int if isinstance(x, torch.SymInt) else float, 1))
    if isinstance(x, (bool, int, float)):
        return _Number((type(x), x))
    hash(x)
    return x


class _Number(tuple[type, Any]):
    """1, 1.0 and True are equal, and of different dtypes."""


class _Few(tuple[torch.dtype, int]):
    def __new__(cls, dtype: torch.dtype, rank: int) -> _Few:
        return super().__new__(cls, (dtype, rank))

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.zeros((2,) * self[1], dtype=self[0], device=device)


@cache
def _has_kernel(op: Any, key: tuple[Any, ...], device: torch.device) -> bool:
    def given(x: Any) -> Any:
        if isinstance(x, _Few):
            return x.tensor(device)
        if isinstance(x, _Number):
            return x[0](x[1])
        if isinstance(x, torch.device):
            return device
        return [given(y) for y in x] if isinstance(x, tuple) else x

    args, kwargs = key
    try:
        attempt(op, args, dict(kwargs), given)
    except Exception as error:
        return not _ABOUT_DTYPES.search(str(error))
    return True
