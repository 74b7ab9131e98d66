"""Tries a call on the CPU before it is compiled for the device, so that eager's errors are raised.

A lowering says what an operator computes, and would also compute it for arguments that eager rejects: the difference of
booleans, or a source whose shape differs from its index. Only eager's kernels contain the checks, so they are called. A
program that takes numbers as arguments serves every number that eager accepts; the bounds are found by trials too.
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

# Calls with up to this many elements in all tensors are tried as they are: that is faster than tracing them. Larger
# ones are tried with smaller tensors.
_ELEMENTS = 1 << 14
_KEPT = 4  # sizes up to this are not reduced

_MASKS = (torch.bool, torch.uint8)
_META = torch.device("meta")


def refusal(op: OpOverload, args: tuple[Any, ...]) -> Exception | None:
    """The error that eager raises for such a call whatever the tensors contain: with all zeros and with all ones."""
    if not _asked(op, args):
        return None
    if _decides_sizes(op) and math.prod(_numbers(args)) > _ELEMENTS:
        return _raises(op, args, _META)
    few = _fewer(op, args)
    if few is args:
        return _tried(op, args)
    if few is None or (error := _tried(op, few)) is None:
        return None
    # The reduced sizes may be what does not fit together.
    return error if _raises(op, args, _META) or not _raises(op, few, _META) else None


def _asked(op: OpOverload, args: tuple[Any, ...]) -> bool:
    known = facts(op)
    if op.namespace not in SPACES:
        return False  # a kernel from outside of torch may have unknown effects, so it is not called
    masked = known.masks and any(t.dtype in _MASKS for t in _tensors(args[1]))
    return known.checks and not masked  # the required number of values depends on the mask's content


def _tried(op: OpOverload, args: tuple[Any, ...]) -> Exception | None:
    error: Exception | None = None
    for value in (0, 1):  # zeros are valid indices but bad divisors; ones are good divisors but may be bad indices
        error = _raises(op, args, CPU, value)
        if error is None:
            return None
        if isinstance(error, NotImplementedError):
            # The CPU may lack an operator, or a small float dtype, that our device supports.
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
    """Whether arguments other than tensors may determine the sizes of the results."""
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
    """Replace descriptions by filled tensors. `made`: the tensors so far, some operators reject identical ones."""
    def fill(t: TensorLike) -> torch.Tensor:
        if t.same not in made:
            made[t.same] = torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device=device).fill_(value)
        return made[t.same]

    x = _mapped(x, fill)
    if isinstance(x, Number):
        return torch.scalar_tensor(x.value, dtype=x.dtype, device=CPU)
    return None if isinstance(x, torch.Generator) else x


def _fewer(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Reduce large tensors of a call; equal sizes stay equal, larger ones larger. None if there are too many
    dimensions, or if other arguments are sizes too."""
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

Numbers = tuple[int, bool, float, float]  # position in the call's numbers, whether a float, minimum, maximum

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Operators reject numbers outside a dtype's range, or on one side of zero or one.
_WHOLE = sorted({-1, 0, 1, *(x for t in _INTEGERS for x in (torch.iinfo(t).min, torch.iinfo(t).max))})
_POSITIVE = (5e-324, math.nextafter(1, 0), 1.0, math.inf, *(torch.finfo(t).max for t in _FLOATS))
_REAL = sorted({0.0, *(float(x) for x in _WHOLE), *_POSITIVE, *(-x for x in _POSITIVE)})


def taken(op: OpOverload, args: tuple[Any, ...], lift: int) -> tuple[Numbers, ...]:
    """The intervals in which eager accepts the numbers that are arguments of a call's program. Raises UnsupportedError
    if the range of one depends on another, or if numbers determine the size of the results."""
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
    """The first and last number of each run of adjacent trial numbers that eager accepts."""
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
    """The call with some numbers replaced."""
    return map_numbers(op, args, lambda k, x: x if k not in values else replace(x, value=values[k]) if isinstance(
        x, Number) else values[k])
