"""Casts and copies: the same numbers in another dtype or place."""

from __future__ import annotations

from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import SUPPORTED, DType
from flambeau.ir.nodes import Value
from flambeau.ops.facts import EVERYWHERE, describe, of_family
from flambeau.ops.registry import load_at, lower
from flambeau.torch_compat.prims import prims

aten = torch.ops.aten
of_family(exact=EVERYWHERE)


@lower(aten._to_copy, prims.convert_element_type)
def to_copy(x: Value, dtype: DType | None = None, **place: Any) -> Value:
    if dtype is not None and dtype not in SUPPORTED:
        return NotImplemented
    return build.pointwise(x.shape, x.load, dtype)


@lower(aten.clone, exact=EVERYWHERE, same=True, strides="preserved")
def clone(x: Value, **layout: Any) -> Value:
    return build.pointwise(x.shape, x.load)


describe(aten._to_copy, strides="preserved")
describe(aten.copy.default, copies_storage=True, strides="copied storage")


@lower(aten.copy, exact=EVERYWHERE)
def copy(x: Value, source: Value, non_blocking: bool = False) -> Value:
    """x overwritten by the source, which is broadcast and cast to it."""
    return build.pointwise(x.shape, lambda i: load_at(source, i), x.dtype)
