"""What eager refuses: a call is tried on the CPU before a program is made for calls like it.

A lowering says what an operator computes, and would do so for truth values that eager does not subtract, or a source of
another shape than its index. What an operator checks stands in its kernels alone; so they are asked.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .eager_graph import Number, TensorLike
from .geometry import reach

# Elements of all tensors together, up to which a call is tried: it takes less than the graph does. Larger calls are
# mostly those that have been tried small.
_ELEMENTS = 1 << 14
_SMALL = (torch.float16, torch.bfloat16)


def refusal(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Exception | None:
    """The error that eager raises for such a call whatever is in its tensors: with zeros, and with ones as well."""
    tensors = list(_tensors(args))
    if sum(max(reach(t.shape, t.strides), 1) for t in tensors) > _ELEMENTS:
        return None
    error: Exception | None = None
    for value in (0, 1):  # zeros are indices and no divisors, ones are divisors and seldom indices
        try:
            _try(op, args, value)
        except NotImplementedError as lacks:
            # Of an operator, or of small floats, which GPUs have kernels for, the CPU may have none, and we do.
            of_the_dtype = "not implemented for '" in str(lacks) and not any(t.dtype in _SMALL for t in tensors)
            return lacks if of_the_dtype else None
        except Exception as refused:
            error = refused
        else:
            return None
    return error


def _try(op: torch._ops.OpOverload, args: tuple[Any, ...], value: int) -> None:
    random = torch.Tag.nondeterministic_seeded in op.tags
    state = torch.get_rng_state() if random else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schema = op._schema.arguments
            op(*(_filled(x, value) for a, x in zip(schema, args, strict=True) if not a.kwarg_only),
               **{a.name: _filled(x, value) for a, x in zip(schema, args, strict=True) if a.kwarg_only})
    finally:
        if state is not None:
            torch.set_rng_state(state)


def _tensors(args: Any) -> Any:
    for x in args:
        if isinstance(x, TensorLike):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _filled(x: Any, value: int) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_filled(y, value) for y in x)
    if isinstance(x, TensorLike):
        return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="cpu").fill_(value)
    if isinstance(x, Number):
        return torch.scalar_tensor(x.value, dtype=x.dtype, device="cpu")
    return None if isinstance(x, torch.Generator) else x
