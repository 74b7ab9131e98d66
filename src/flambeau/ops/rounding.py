"""Helpers for formulas that have to round exactly where eager's kernels do.

nvcc and g++ contract a * b + c to one rounding; kernels for small floats compute in float32, most of them up to the
end, some step by step. Read from the machine code of eager's kernels, or of the same formulas compiled with nvcc.
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
    """While a formula for tensors of this dtype is being written."""
    token = _stored.set(dtype)
    try:
        yield
    finally:
        _stored.reset(token)


def is_exact() -> bool:
    """Whether the current graph has the bits of eager's kernels."""
    return build.policy().exact


def mad(a: Expr, b: Expr, c: Scalar) -> Expr:
    """a * b + c as eager's compiler has it."""
    return fma(a, b, lift(c, a.dtype)) if build.policy().fuses_multiply_add and is_float(a.dtype) else a * b + c


def as_stored(x: Expr) -> Expr:
    """With the digits of the tensors' dtype."""
    return round_to(x, _stored.get())


def step(x: Expr) -> Expr:
    """A result within a kernel that computes in the dtype of its tensors."""
    return as_stored(x) if build.policy().steps and is_float(x.dtype) else x


def mad_by_steps(a: Expr, b: Expr, c: Scalar) -> Expr:
    """a * b + c in such a kernel: small floats are rounded in between, so that nothing is contracted."""
    if build.policy().steps and _stored.get() is not a.dtype:
        return step(step(a * b) + c)
    return mad(a, b, c)


def by_kernels(fast: Callable[..., Any], **exact: Callable[..., Any]) -> Callable[..., Any]:
    """A formula, and those of eager's kernels by the type of their device: `cuda=`, `cpu=`, or `both=`."""

    def formula(*args: Any, **named: Any) -> Any:
        kernels = build.policy().kernels
        return exact.get(kernels, exact.get("both", fast) if kernels else fast)(*args, **named)

    return formula


def _as_is(number: float, x: Expr) -> Expr:
    return const(number, x.dtype)


def _as_stored(number: float, x: Expr) -> Expr:
    return round_to(const(number, x.dtype), _stored.get()) if is_float(x.dtype) else const(number, x.dtype)


# A number that eager's kernels have in the dtype of their tensors x: those for CUDA, or all of them.
stored = by_kernels(_as_is, cuda=_as_stored)
stored_anywhere = by_kernels(_as_is, both=_as_stored)
