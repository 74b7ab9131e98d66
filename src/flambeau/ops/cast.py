"""Casts and copies: the same numbers in another dtype or place."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import SUPPORTED, DType
from flambeau.ir.expr import Expr, cast, const, unary, where
from flambeau.ir.nodes import Value
from flambeau.ops.facts import EVERYWHERE, describe, of_family
from flambeau.ops.registry import load_at, lower
from flambeau.torch_compat.prims import prims

aten = torch.ops.aten
of_family(exact=EVERYWHERE)


@lower(aten._to_copy, prims.convert_element_type, takes_fp8=True)
def to_copy(x: Value | float, dtype: DType | None = None, **place: Any) -> Value:
    if not isinstance(x, Value):  # torch's trace of vmap has a number where a tensor of it was
        number = torch.tensor(x)
        return build.pointwise((), lambda i: rounded(const(x, number.dtype), dtype or number.dtype))
    if dtype is not None and dtype not in build.graph().capabilities.dtypes | SUPPORTED:
        return NotImplemented
    return build.pointwise(x.shape, lambda i: rounded(x.load(i), dtype or x.dtype))


@cache
def overflows() -> bool:
    """Whether torch converts numbers that are too large for float8_e4m3fn to NaN, as releases before 2.13 do. Newer
    ones saturate at the largest number, as machines do."""
    return bool(torch.tensor(1e3).to(torch.float8_e4m3fn).float().isnan())


def rounded(x: Expr, dtype: DType) -> Expr:
    if dtype is torch.float8_e4m3fn and x.dtype is not dtype and overflows():
        x = cast(x, torch.float32)
        x = where(unary("abs", x) > 464, float("nan"), x)  # the midpoint between the largest number and the next one
    return cast(x, dtype)


@lower(aten.clone, exact=EVERYWHERE, same=True, strides="preserved", takes_fp8=True)
def clone(x: Value, **layout: Any) -> Value:
    return build.pointwise(x.shape, x.load)


describe(aten._to_copy, strides="preserved")
describe(aten.copy.default, copies_storage=True, strides="copied storage")


@lower(aten.copy, exact=EVERYWHERE, takes_fp8=True)
def copy(x: Value, source: Value, non_blocking: bool = False) -> Value:
    """The source, broadcast and cast to x, which it overwrites."""
    return build.pointwise(x.shape, lambda i: rounded(load_at(source, i), x.dtype))
