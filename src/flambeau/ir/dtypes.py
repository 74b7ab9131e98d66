"""Dtype rules: categories, type promotion, and the precision of arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

DType = torch.dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
SUPPORTED = frozenset((*FLOATS, *INTS, *UNSIGNED, torch.bool))
# Some machines have these as well, but only for factors of products and for storage: nothing else is computed in them.
FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))


def is_float(d: DType) -> bool:
    return d.is_floating_point


def is_bool(d: DType) -> bool:
    return d is torch.bool


def is_int(d: DType) -> bool:
    return not d.is_floating_point and not d.is_complex and d is not torch.bool


def opmath(d: DType) -> DType:
    """The dtype in which ATen computes on values of dtype d: smaller floats in float32."""
    return torch.float32 if d in (torch.float16, torch.bfloat16) or d in FP8 else d


def accumulator(d: DType) -> DType:
    """The dtype in which sums and products of d are kept."""
    return opmath(d) if is_float(d) else torch.int64


def lowest(d: DType) -> float | int | bool:
    return float("-inf") if is_float(d) else False if is_bool(d) else torch.iinfo(d).min


def highest(d: DType) -> float | int | bool:
    return float("inf") if is_float(d) else True if is_bool(d) else torch.iinfo(d).max


@dataclass(frozen=True)
class Operand:
    """The properties of an argument that promotion needs: a tensor of some rank, or a Python number (rank None)."""

    dtype: DType
    rank: int | None


def number_dtype(x: bool | int | float) -> DType:
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        return torch.int64
    if isinstance(x, float):
        return torch.get_default_dtype()
    raise TypeError(f"{x!r} is not a real number")


def _category(d: DType) -> int:
    return 0 if is_bool(d) else 2 if is_float(d) else 1


def promote(operands: Iterable[Operand]) -> DType:
    """Returns the promoted dtype by PyTorch's rule: tensors with dimensions decide, then zero-dimensional ones, then
    Python numbers. A lower group takes part only if its category (bool, int, float) is higher."""
    groups: list[DType | None] = [None, None, None]
    for o in operands:
        g = 2 if o.rank is None else 1 if o.rank == 0 else 0
        old = groups[g]
        groups[g] = o.dtype if old is None else torch.promote_types(old, o.dtype)
    result: DType | None = None
    for g, d in enumerate(groups):
        if d is None:
            continue
        if g == 2 and d.is_floating_point:
            d = torch.get_default_dtype()
        if result is None or _category(d) > _category(result):
            result = d
    if result is None:
        raise ValueError("promote: no operands")
    return result


def int_to_float(d: DType) -> DType:
    """Returns the default float for integers and bools, as in true division and transcendental functions."""
    return d if is_float(d) else torch.get_default_dtype()
