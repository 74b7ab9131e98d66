"""Attention in float64, written out, for tests to hold kernels against; and how it is called in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
Score = Callable[[Tensor], Tensor]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, score: Score | None = None,
              mask: Tensor | None = None) -> Tensor:
    """Attention by its definition; rows in which every key is masked are zero."""
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if score is None else score(s)
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    hidden = (s == -torch.inf).all(-1, keepdim=True)  # fully masked rows: their gradients are zero, not NaN
    return torch.softmax(s.masked_fill(hidden, 0), -1).masked_fill(hidden, 0) @ v


def trained(f: Callable[..., Tensor], leaves: Sequence[Tensor], given: Sequence[Any] = (), grad: Tensor | None = None
            ) -> list[Tensor]:
    """The result of f and the gradients of the leaves, for `grad` (or a fixed random one) as the result's gradient."""
    out = f(*leaves, *given)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64) \
        if grad is None else grad
    wanting = [x for x in leaves if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanting, grad.to(out.dtype))]


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def in_double(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in xs]


def hold(got: Sequence[Tensor], want: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Checks every result by the norm of its error. A result that is zero by cancellation may be off by a small part
    of the largest result."""
    assert len(got) == len(want)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and not a.isnan().any(), k
        error = (a.double() - b).norm()
        least = 4 * ROUNDING[dtype]  # for a gradient that is zero by cancellation
        assert error <= ROUNDING[dtype] * b.norm() or error <= least * max(x.norm() for x in want) * 0.05, (
            k, float(error / b.norm().clamp_min(1e-30)))
