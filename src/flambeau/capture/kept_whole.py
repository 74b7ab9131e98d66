"""Operators kept whole while a graph is captured, where torch takes them apart before any table is asked.

Some operators have Python kernels of torch below autograd that write them as many small ones (upsampling becomes
a dozen gathers, and its gradient as many scatters). Within `whole_operators` those kernels are put aside for what we
lower, and the forms of upsampling with a list of scale factors call the plain operator. Their gradients get
shapes that may be symbolic, which torch's own do not.

In exact numerics all of those kernels are put aside: eager does not use them (its dropout on a CPU is another). And
gradients for which eager looks at the data, which nobody can who traces, are calls that look when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.torch_compat import patches
from flambeau.torch_compat.decomp import suggest_memory_format, upsample_compute_output_size
from flambeau.torch_compat.dispatch import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    ForceDispatchKeyGuard,
    excluded_keys,
    included_keys,
)
from flambeau.torch_compat.ops import OpOverload, OpOverloadPacket

from .eager_dtypes import taken_apart

aten = torch.ops.aten

_around = excluded_keys()
with AutoDispatchBelowAutograd():
    AUTOGRAD = excluded_keys() - _around

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
RESIZES = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
           "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
           "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")

# Here torch's own kernels only say what eager's do: which memory is written, or how long something is.
UNROUNDED = ("broadcast_tensors", "empty", "native_batch_norm", "one_hot", "pad_sequence", "tensor_split",
             "unsafe_chunk")

# Losses that torch takes apart before it takes their gradients.
FORMULAS = (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default)


@contextmanager
def recording() -> Iterator[None]:
    """Autograd, within an operator, where it is off."""
    excluded = excluded_keys() - AUTOGRAD
    with ForceDispatchKeyGuard(included_keys(), excluded), torch.enable_grad():
        yield


torch.library.define("flambeau::prod_backward", "(Tensor grad, Tensor x, int? dim, bool keepdim) -> Tensor")


@torch.library.impl("flambeau::prod_backward", "CompositeExplicitAutograd")
def prod_backward(grad: torch.Tensor, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    """By autograd itself: what it does where there are zeros has no operator."""
    with recording():
        x = x.detach().requires_grad_()
        result = x.prod() if dim is None else x.prod(dim, keepdim)
    found = torch.autograd.grad(result, x, grad)[0]
    return found if x.dim() else found.clone()  # which may be the gradient that was given


@torch.library.register_fake("flambeau::prod_backward")
def _(grad: torch.Tensor, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    return torch.empty_like(x)


class Product(torch.autograd.Function):
    """aten.prod, whose gradient is one call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        ctx.where = dim, keepdim
        with AutoDispatchBelowAutograd():
            made = aten.prod.default(x) if dim is None else aten.prod.dim_int(x, dim, keepdim)
        ctx.save_for_backward(x, made)  # what eager keeps must not be written to
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return torch.ops.flambeau.prod_backward.default(grad, x, *ctx.where), None, None


def product(x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *,
            dtype: torch.dtype | None = None) -> Any:
    return Product.apply(x if dtype is None else x.to(dtype), dim, keepdim)


def by_factors(plain: OpOverload) -> Callable[..., Any]:
    """op(x, output_size or None, [align_corners], scale_factors or None) as a call of the plain operator."""

    def kernel(x: torch.Tensor, output_size: Any, *rest: Any) -> Any:
        *align, factors = rest
        size = upsample_compute_output_size(x.size(), output_size, factors)
        return plain(x, size, *align, *(factors or ()))

    return kernel


def gradient_shape(grad: torch.Tensor, output_size: Any, input_size: Any, *rest: Any, **named: Any) -> torch.Tensor:
    return grad.new_empty(input_size).to(memory_format=suggest_memory_format(grad))


def below_autograd(op: OpOverload) -> Callable[..., Any]:
    """The operator itself, where torch has written its gradient as that of a formula."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return kernel


@cache
def with_formula() -> tuple[OpOverload, ...]:
    """The operators for which torch has such kernels, but for those that round nothing."""
    packets = (getattr(aten, name) for name in dir(aten) if name not in UNROUNDED)
    every = (getattr(p, o) for p in packets if isinstance(p, OpOverloadPacket) for o in p.overloads())
    return tuple(op for op in every if any(k in op.py_kernels for k in KEYS))


@contextmanager
def whole_operators(exact: bool = False) -> Iterator[None]:
    ops_loaded()
    wanted: dict[OpOverload, dict[Any, Any]] = {
        op: {} for op in (with_formula() if exact else LOWERINGS) if any(k in op.py_kernels for k in KEYS)}
    for op in () if exact else FORMULAS:
        formula = op.py_kernels[DispatchKey.Autograd]
        wanted[op] = {DispatchKey.Autograd: taken_apart(op, formula, below_autograd(op))}
    for name in RESIZES:
        packet = getattr(aten, name)
        if packet.default in LOWERINGS:
            wanted[packet.vec] = dict.fromkeys(KEYS, by_factors(packet.default))
            wanted[getattr(aten, name + "_backward").default] = {DispatchKey.Meta: gradient_shape}
    wanted[aten.cumprod_backward.default] = dict.fromkeys(KEYS, torch.ops.flambeau.cumprod_backward.default)
    if exact:
        wanted |= {op: {DispatchKey.Autograd: product} for op in (aten.prod.default, aten.prod.dim_int)}
    aside = dict.fromkeys(KEYS, patches.MISSING)
    with patches.KERNELS.applied({op: aside | kernels for op, kernels in wanted.items()}):
        yield
