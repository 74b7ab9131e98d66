"""Tries a call on the CPU before it is compiled for the device, so that eager's errors are raised.

A lowering says what an operator computes, and would do so for truth values that eager does not subtract, or a source of
another shape than its index. What an operator checks stands in its kernels alone; so they are asked. A program that
takes numbers as arguments serves those that eager takes as well: between which they lie is found by trials, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import torch

from flambeau.capture.eager_dtypes import SMALL, attempt
from flambeau.errors import UnsupportedError
from flambeau.ir.lines import reach
from flambeau.ops.facts import SPACES, facts
from flambeau.runtime.placement import CPU
from flambeau.torch_compat.ops import OpOverload

from .one_call import Number, TensorLike, map_numbers, numbers_of, plain

# Elements of all tensors together, up to which a call is tried as it is: it takes less time than its graph does. Larger
# ones are tried with smaller tensors.
_ELEMENTS = 1 << 14
_KEPT = 4  # sizes up to this stay as they are

_MASKS = (torch.bool, torch.uint8)
_META = torch.device("meta")


def refusal(op: OpOverload, args: tuple[Any, ...]) -> Exception | None:
    """The error that eager raises for such a call whatever is in its tensors: with zeros, and with ones as well."""
    if not _asked(op, args):
        return None
    if _decides_sizes(op) and math.prod(_numbers(args)) > _ELEMENTS:
        return _raises(op, args, _META)
    few = _fewer(op, args)
    if few is args:
        return _tried(op, args)
    if few is None or (error := _tried(op, few)) is None:
        return None
    # It may be that smaller tensors do not fit together.
    return error if _raises(op, args, _META) or not _raises(op, few, _META) else None


def _asked(op: OpOverload, args: tuple[Any, ...]) -> bool:
    known = facts(op)
    if op.namespace not in SPACES:
        return False  # what somebody else's kernel does besides computing, nobody knows: it is not tried
    masked = known.masks and any(t.dtype in _MASKS for t in _tensors(args[1]))
    return known.checks and not masked  # how many values there should be, is in the mask


def _tried(op: OpOverload, args: tuple[Any, ...]) -> Exception | None:
    error: Exception | None = None
    for value in (0, 1):  # zeros are indices and no divisors, ones are divisors and seldom indices
        error = _raises(op, args, CPU, value)
        if error is None:
            return None
        if isinstance(error, NotImplementedError):
            # The CPU may lack an operator, or small floats, that we have.
            if "not implemented for '" not in str(error):
                return None
            wide = _mapped(args, lambda t: replace(t, dtype=torch.float32) if t.dtype in SMALL else t)
            return error if wide == args or isinstance(_tried(op, wide), NotImplementedError) else None
    return error


def _raises(op: OpOverload, args: tuple[Any, ...], device: torch.device, value: int = 0
            ) -> Exception | None:
    positional = [x for a, x in zip(op._schema.arguments, args, strict=True) if not a.kwarg_only]
    kwargs = {a.name: x for a, x in zip(op._schema.arguments, args, strict=True) if a.kwarg_only}
    made: dict[int, torch.Tensor] = {}
    try:
        attempt(op, positional, kwargs, lambda x: _filled(x, device, value, made))
    except Exception as error:
        return error
    return None


def _decides_sizes(op: OpOverload) -> bool:
    """Whether plain arguments may say how large the results are."""
    return "SymInt" in str(op._schema) or all(a.is_out for a in op._schema.arguments if "Tensor" in str(a.type))


def _numbers(args: Any) -> Iterator[float]:
    for x in args:
        if isinstance(x, (list, tuple)):
            yield from _numbers(x)
        elif isinstance(x, (int, float)):
            yield max(abs(x), 1)


def _tensors(args: Any) -> Iterator[TensorLike]:
    for x in args:
        if isinstance(x, TensorLike):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _mapped(x: Any, change: Callable[[TensorLike], Any]) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_mapped(y, change) for y in x)
    return change(x) if isinstance(x, TensorLike) else x


def _filled(x: Any, device: torch.device, value: int, made: dict[int, torch.Tensor]) -> Any:
    """`made`: the tensors so far. Those that are one in the call are one here: some operators refuse that."""
    def fill(t: TensorLike) -> torch.Tensor:
        if t.same not in made:
            made[t.same] = torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device=device).fill_(value)
        return made[t.same]

    x = _mapped(x, fill)
    if isinstance(x, Number):
        return torch.scalar_tensor(x.value, dtype=x.dtype, device=CPU)
    return None if isinstance(x, torch.Generator) else x


def _fewer(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The call with smaller tensors where it is large: equal sizes stay equal, larger ones larger. None if it has too
    many dimensions for that, or arguments that are sizes as well."""
    if _elements(args) <= _ELEMENTS:
        return args
    if _decides_sizes(op):
        return None
    large = sorted({n for t in _tensors(args) for n in t.shape if n > _KEPT})
    sizes = {n: _KEPT + 1 + k for k, n in enumerate(large)}

    def change(t: TensorLike) -> TensorLike:
        shape = tuple(sizes.get(n, n) for n in t.shape)
        strides, step = [0] * len(shape), 1
        for d in sorted((d for d, stride in enumerate(t.strides) if stride), key=lambda d: (t.strides[d], t.shape[d])):
            strides[d], step = step, step * max(shape[d], 1)
        return replace(t, shape=shape, strides=tuple(strides))

    few: tuple[Any, ...] = _mapped(args, change)
    return few if _elements(few) <= _ELEMENTS else None


def _elements(args: tuple[Any, ...]) -> int:
    return sum(max(reach(t.shape, t.strides), 1) for t in _tensors(args))


# ---- numbers ---------------------------------------------------------------------------------------------

Numbers = tuple[int, bool, float, float]  # which number of the call, whether it is a float, the least and the most

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Operators refuse numbers beyond a dtype's range, or on one side of zero or one.
_WHOLE = sorted({-1, 0, 1, *(x for t in _INTEGERS for x in (torch.iinfo(t).min, torch.iinfo(t).max))})
_POSITIVE = (5e-324, math.nextafter(1, 0), 1.0, math.inf, *(torch.finfo(t).max for t in _FLOATS))
_REAL = sorted({0.0, *(float(x) for x in _WHOLE), *_POSITIVE, *(-x for x in _POSITIVE)})


def taken(op: OpOverload, args: tuple[Any, ...], lift: int) -> tuple[Numbers, ...]:
    """Between which bounds eager takes the numbers of a call that are arguments of its program. UnsupportedError where
    what it takes of one depends on another, or what it returns is as large as they say."""
    if all(a.is_out for a in op._schema.arguments if "Tensor" in str(a.type)):
        raise UnsupportedError("its numbers may say how large it is")
    few = _fewer(op, args) if _asked(op, args) else None
    numbers = {k: x for k, x in enumerate(numbers_of(op, args)) if lift >> k & 1}
    runs = {k: list(_runs(op, few, k, x)) for k, x in numbers.items()}
    if few is not None and len(numbers) > 1:
        inside = [next((run for run in runs[k] if run[0] <= plain(x) <= run[1]), ()) for k, x in numbers.items()]
        for corner in product(*inside):
            if _tried(op, _with(op, few, dict(zip(numbers, corner, strict=True)))) is not None:
                raise UnsupportedError("what eager takes of one number depends on another")
    return tuple((k, isinstance(plain(x), float), *run) for k, x in numbers.items() for run in runs[k])


def _runs(op: OpOverload, args: tuple[Any, ...] | None, k: int, x: Any) -> Iterator[tuple[Any, Any]]:
    """The least and the most of neighbours among the numbers that are tried, all of which eager takes."""
    tried: list[Any] = list(_REAL if isinstance(plain(x), float) else _WHOLE)
    if args is None:
        yield tried[0], tried[-1]
        return
    if isinstance(x, Number):
        limits: Any = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        tried = [n for n in tried if limits.min <= n <= limits.max or math.isinf(n)]
    for takes, run in groupby(tried, lambda n: _tried(op, _with(op, args, {k: n})) is None):
        if takes:
            among = list(run)
            yield among[0], among[-1]


def _with(op: OpOverload, args: tuple[Any, ...], values: dict[int, Any]) -> tuple[Any, ...]:
    """The call with other numbers."""
    return map_numbers(op, args, lambda k, x: x if k not in values else replace(x, value=values[k]) if isinstance(
        x, Number) else values[k])
