"""What eager refuses: a call is tried on the CPU before the device makes a program for calls like it.

A lowering says what an operator computes, and would do so for truth values that eager does not subtract, or a source of
another shape than its index. What an operator checks stands in its kernels alone; so they are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flambeau.torch_compat.ops import OpOverload

from .devices import CPU
from .eager_dtypes import SMALL, attempt, trusting
from .eager_graph import Number, TensorLike
from .geometry import reach

# Elements of all tensors together, up to which a call is tried: it takes less time than its graph does. What is larger
# has mostly been tried small.
_ELEMENTS = 1 << 14

# A private operator that index_put leaves its checks to.
_CHECKS = ("aten::_index_put_impl_", "aten::_index_put_impl")
_MASKS = (torch.bool, torch.uint8)


def refusal(op: OpOverload, args: tuple[Any, ...]) -> Exception | None:
    """The error that eager raises for such a call whatever is in its tensors: with zeros, and with ones as well."""
    tensors = list(_tensors(args))
    if sum(max(reach(t.shape, t.strides), 1) for t in tensors) > _ELEMENTS:
        return None
    if op._schema.name in _CHECKS:
        if any(t.dtype in _MASKS for t in _tensors(args[1])):  # how many values there should be, is in the mask
            return None
    elif trusting(op):
        return None
    named = [a.kwarg_only for a in op._schema.arguments]
    positional = [x for x, by_name in zip(args, named, strict=True) if not by_name]
    kwargs = {a.name: x for a, x in zip(op._schema.arguments, args, strict=True) if a.kwarg_only}
    error: Exception | None = None
    for value in (0, 1):  # zeros are indices and no divisors, ones are divisors and seldom indices
        try:
            attempt(op, positional, kwargs, lambda x, value=value: _filled(x, value))  # type: ignore[misc]
        except NotImplementedError as lacks:
            # The CPU may lack an operator, or small floats, that we have.
            of_the_dtype = "not implemented for '" in str(lacks) and not any(t.dtype in SMALL for t in tensors)
            return lacks if of_the_dtype else None
        except Exception as refused:
            error = refused
        else:
            return None
    return error


def _tensors(args: Any) -> Iterator[TensorLike]:
    for x in args:
        if isinstance(x, TensorLike):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _filled(x: Any, value: int) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_filled(y, value) for y in x)
    if isinstance(x, TensorLike):
        return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=CPU).fill_(value)
    if isinstance(x, Number):
        return torch.scalar_tensor(x.value, dtype=x.dtype, device=CPU)
    return None if isinstance(x, torch.Generator) else x
