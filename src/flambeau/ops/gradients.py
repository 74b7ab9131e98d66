"""Gradients that torch has only as compositions which look at data, as operators of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flambeau.ops.facts import describe
from flambeau.torch_compat.dispatch import (
    AutoDispatchBelowAutograd,
    ForceDispatchKeyGuard,
    excluded_keys,
    included_keys,
)

aten = torch.ops.aten

_around = excluded_keys()
with AutoDispatchBelowAutograd():
    AUTOGRAD = excluded_keys() - _around


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


describe(aten.prod.default, aten.prod.dim_int, traced_exactly=product)
