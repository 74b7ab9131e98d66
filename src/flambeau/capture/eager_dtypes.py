"""Checks whether eager has a kernel for the dtypes of a call. If not, eager is called and raises its error.

PyTorch's shape and dtype rules accept some calls that its kernels reject, such as a softmax of integers. So eager
itself is called, once for each combination of dtypes, with tensors of two elements along each axis (for one element,
eager warns about the standard deviation). If those shapes are invalid (a cross product needs three), the call's own
sizes are used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from flambeau.ops.facts import facts
from flambeau.runtime.placement import CPU, common_device, flat
from flambeau.torch_compat.dispatch import DisableAutocast, disable_current_modes, no_python_dispatcher
from flambeau.torch_compat.ops import OpOverload

# Eager's messages about dtypes, and about numbers that a dtype cannot hold. The test tensors may be rejected for other
# reasons, which mean nothing.
_ABOUT_DTYPES = re.compile(r"not implemented for|not support|only supports?\b|[Dd]type\b|scalar type|can't be cast|"
                           "without overflow|negative integer powers")

LARGE = 1 << 40  # small dtypes do not hold it
MOST = 1 << 14  # elements of a tensor in a test call
SMALL = (torch.float16, torch.bfloat16)  # GPUs and our device have kernels for these that the CPU lacks


def attempt(op: OpOverload, args: Any, kwargs: dict[str, Any], given: Callable[[Any], Any]) -> Any:
    """Run an operator on `given(argument)` for each argument; suppresses warnings and restores the random state."""
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
    if not _holds_numbers(op, args, kwargs):
        return False

    def takes(device: torch.device, given: Callable[[Any], Any] = lambda key: key) -> bool:
        return _takes(op, [given(key) for key in keys], device)

    # GPUs have kernels for more dtypes than CPUs, so if the CPU has one, the GPU need not be tried.
    if takes(CPU):
        return True
    if device.type == "cuda":
        return known.random or takes(device)  # must not touch the GPU's random state
    return device.type != "cpu" and _wide(keys[0]) != keys[0] and takes(CPU, _wide)


def _takes(op: OpOverload, keys: Iterable[Any], device: torch.device) -> bool:
    answers = (_has_kernel(op, key, device) for key in keys)
    return next((answer for answer in answers if answer is not None), True)


def _holds_numbers(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether eager accepts the values of run-time integers: integers have no negative powers, and small dtypes do not
    hold every number. If that depends on the value, a guard keeps the graph to values that are accepted."""
    given = {a.name: x for a, x in zip(op._schema.arguments, args, strict=False)} | kwargs
    names = [a.name for a in op._schema.arguments if "number" in str(a.type) and a.name in given]
    numbers = [x for name in names for x in map(_value, flat(given[name])) if isinstance(x, torch.SymInt)]
    dtypes = {x.dtype for x in map(_value, flat((args, tuple(kwargs.values())))) if isinstance(x, torch.Tensor)}
    if not numbers or not dtypes:
        return True

    def takes(n: int) -> bool:
        known = {name: fx.node.map_aggregate(
            given[name], lambda x: n if isinstance(_value(x), torch.SymInt) else x) for name in names}
        return _takes(op, [_described(((), tuple(sorted((given | known).items()))), _two)], CPU)

    def known(x: Any) -> bool:
        """The answer for this call, which a guard then keeps; False if only data give it."""
        return bool(x) if not isinstance(x, torch.SymBool) or x.node.has_hint() else False

    if takes(1):
        if not takes(-1) and not all(known(x >= 0) for x in numbers):
            return False
        if not takes(LARGE):
            ranges = [torch.finfo(d) if d.is_floating_point else torch.iinfo(d) for d in dtypes
                      if d is not torch.bool and not d.is_complex]
            return all(known(x >= r.min) and known(x <= r.max) for x in numbers for r in ranges)
    return True


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else x


def taken_apart(op: OpOverload, formula: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator's decomposition, which accepts any dtype, so that it is used only if eager has a kernel."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        device = common_device(flat((args, tuple(kwargs.values()))))
        return (formula if eager_has_kernel(op, args, kwargs, device) else whole)(*args, **kwargs)

    return asked


def _wide(x: Any) -> Any:
    """The same call in float32: what float32 does not support, such as bit operations, no small float supports."""
    if isinstance(x, _Zeros):
        return _Zeros(torch.float32, x[1]) if x[0] in SMALL else x
    return tuple(map(_wide, x)) if type(x) is tuple else x


def _two(x: torch.Tensor) -> tuple[int, ...]:
    return (2,) * x.dim()


def _own(x: torch.Tensor) -> tuple[int, ...]:
    known = all(isinstance(n, int) for n in x.shape) and x.numel() <= MOST
    return tuple(x.shape) if known else _two(x)


def _described(x: Any, sizes: Callable[[torch.Tensor], tuple[int, ...]]) -> Any:
    """Arguments in a hashable form: dtype and sizes of tensors; numbers unchanged; symbols replaced by 1."""
    if isinstance(x, fx.Node):
        x = x.meta.get("example", x.meta.get("val"))  # for a run-time number: an example value
    if isinstance(x, (list, tuple)):
        return tuple(_described(y, sizes) for y in x)
    if isinstance(x, torch.Tensor):
        return _Zeros(x.dtype, sizes(x))
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return _Number((int if isinstance(x, torch.SymInt) else float, 1))
    if isinstance(x, (bool, int, float)):
        return _Number((type(x), x))
    if isinstance(x, torch.Generator):
        return None  # the generator's state must not change
    hash(x)
    return x


class _Number(tuple[type, Any]):
    """A number with its type, because 1, 1.0 and True are equal but promote differently."""


class _Zeros(tuple[torch.dtype, tuple[int, ...]]):
    def __new__(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> _Zeros:
        return super().__new__(cls, (dtype, shape))

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self[1], dtype=self[0], device=device)


@cache
def _has_kernel(op: Any, key: tuple[Any, ...], device: torch.device) -> bool | None:
    """Whether eager runs these arguments; None if it rejects them for a reason other than dtypes."""
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
