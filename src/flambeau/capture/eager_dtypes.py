"""Checks whether eager has a kernel for the dtypes of a call. If not, eager is called and raises its error.

PyTorch's rules for shapes and dtypes let calls through that its kernels refuse, such as a softmax of integers. Eager
itself is asked, once for each combination of dtypes, with tensors of two elements along each axis: eager warns of a
deviation of one. Where those do not fit together (a cross product wants three), with tensors of the call's own sizes.
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

# What eager says about dtypes, and numbers that they do not hold. Such tensors may not fit together in other ways,
# which says nothing.
_ABOUT_DTYPES = re.compile(r"not implemented for|not support|only supports?\b|[Dd]type\b|scalar type|can't be cast|"
                           "without overflow|negative integer powers")

MOST = 1 << 14  # elements of a tensor that eager is asked with
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
    if known.view or not known.checks:
        return True
    call = args, tuple(sorted(kwargs.items()))
    try:
        keys = [_described(call, sizes) for sizes in (_two, _own)]
    except TypeError:  # an argument that is not hashable
        return True

    def takes(device: torch.device, given: Callable[[Any], Any] = lambda key: key) -> bool:
        answers = (_has_kernel(op, given(key), device) for key in keys)
        return next((answer for answer in answers if answer is not None), True)

    # GPUs have kernels for more dtypes than CPUs: where those do, there is no need to ask them.
    if takes(CPU):
        return True
    if device.type == "cuda":
        return known.random or takes(device)  # whose random state is not to be touched
    return device.type != "cpu" and _wide(keys[0]) != keys[0] and takes(CPU, _wide)


def taken_apart(op: OpOverload, formula: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """The formula of an operator in terms of others, which would compute with anything, where eager has a kernel."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        device = common_device(flat((args, tuple(kwargs.values()))))
        return (formula if eager_has_kernel(op, args, kwargs, device) else whole)(*args, **kwargs)

    return asked


def _wide(x: Any) -> Any:
    """The same call in single precision: what that lacks, such as bits of floats, small floats lack everywhere."""
    if isinstance(x, _Zeros):
        return _Zeros(torch.float32, x[1]) if x[0] in SMALL else x
    return tuple(map(_wide, x)) if type(x) is tuple else x


def _two(x: torch.Tensor) -> tuple[int, ...]:
    return (2,) * x.dim()


def _own(x: torch.Tensor) -> tuple[int, ...]:
    known = all(isinstance(n, int) for n in x.shape) and x.numel() <= MOST
    return tuple(x.shape) if known else _two(x)


def _described(x: Any, sizes: Callable[[torch.Tensor], tuple[int, ...]]) -> Any:
    """Arguments as something hashable: dtype and sizes of tensors, numbers as they are, symbols as ones."""
    if isinstance(x, fx.Node):
        x = x.meta.get("example", x.meta.get("val"))  # of a number that only the run has: one of those that it may be
    if isinstance(x, (list, tuple)):
        return tuple(_described(y, sizes) for y in x)
    if isinstance(x, torch.Tensor):
        return _Zeros(x.dtype, sizes(x))
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return _Number((int if isinstance(x, torch.SymInt) else float, 1))
    if isinstance(x, (bool, int, float)):
        return _Number((type(x), x))
    if isinstance(x, torch.Generator):
        return None  # whose state stays as it is
    hash(x)
    return x


class _Number(tuple[type, Any]):
    """1, 1.0 and True are equal, and of different dtypes."""


class _Zeros(tuple[torch.dtype, tuple[int, ...]]):
    def __new__(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> _Zeros:
        return super().__new__(cls, (dtype, shape))

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self[1], dtype=self[0], device=device)


@cache
def _has_kernel(op: Any, key: tuple[Any, ...], device: torch.device) -> bool | None:
    """None where eager refuses these tensors for another reason."""
    def given(x: Any) -> Any:
        if isinstance(x, _Zeros):
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
        return False if _ABOUT_DTYPES.search(str(error)) else None
    return True
