"""Helpers for formulas that must round exactly where eager's kernels do.

nvcc and g++ contract a * b + c to a single rounding. Kernels for small floats compute in float32: most of them
throughout, some with rounding after each step. This was read from the machine code of eager's kernels, or of the same
formulas compiled with nvcc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_float
from flambeau.ir.expr import Expr, Scalar, const, lift
from flambeau.ir.scalar import fma, round_to

_stored: ContextVar[DType] = ContextVar("flambeau_stored", default=torch.float32)


@contextmanager
def storing(dtype: DType) -> Iterator[None]:
    """While active, formulas are written for tensors of this dtype."""
    token = _stored.set(dtype)
    try:
        yield
    finally:
        _stored.reset(token)


def is_exact() -> bool:
    """Whether the current graph must have the bits of eager's kernels."""
    return build.policy().exact


def mad(a: Expr, b: Expr, c: Scalar) -> Expr:
    """a * b + c, contracted as eager's compiler does."""
    return fma(a, b, lift(c, a.dtype)) if build.policy().fuses_multiply_add and is_float(a.dtype) else a * b + c


def rounds_to(dtype: DType) -> bool:
    """Whether the formula is for tensors of this dtype."""
    return _stored.get() is dtype


def as_stored(x: Expr) -> Expr:
    """Round to the dtype of the tensors."""
    return round_to(x, _stored.get())


def step(x: Expr) -> Expr:
    """Round an intermediate result, in a kernel that computes in the dtype of its tensors."""
    return as_stored(x) if build.policy().steps and is_float(x.dtype) else x


def mad_by_steps(a: Expr, b: Expr, c: Scalar) -> Expr:
    """a * b + c in such a kernel: small floats are rounded in between, which prevents contraction."""
    if build.policy().steps and _stored.get() is not a.dtype:
        return step(step(a * b) + c)
    return mad(a, b, c)


def by_kernels(fast: Callable[..., Any], **exact: Callable[..., Any]) -> Callable[..., Any]:
    """Choose a formula: `fast`, or in exact numerics that of eager's kernels by device: `cuda=`, `cpu=`, `both=`."""

    def formula(*args: Any, **named: Any) -> Any:
        kernels = build.policy().kernels
        return exact.get(kernels, exact.get("both", fast) if kernels else fast)(*args, **named)

    return formula


def _as_is(number: float, x: Expr) -> Expr:
    return const(number, x.dtype)


def _as_stored(number: float, x: Expr) -> Expr:
    return round_to(const(number, x.dtype), _stored.get()) if is_float(x.dtype) else const(number, x.dtype)


# A constant that eager's kernels round to the dtype of their tensors: CUDA's kernels, or all of them.
stored = by_kernels(_as_is, cuda=_as_stored)
stored_anywhere = by_kernels(_as_is, both=_as_stored)
