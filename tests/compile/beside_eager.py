"""Compares a function under torch.compile(backend="flambeau") with eager: results, layouts, gradients, arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="flambeau", **options)


def tensors(x: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]


def fresh(args: tuple[Any, ...]) -> list[Any]:
    """Copies with the same strides, storage offsets and requires_grad, each with its own memory."""

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        storage = t.detach().untyped_storage().clone()
        twin = t.detach().new_empty(0).set_(storage, t.storage_offset(), t.shape, t.stride())
        return twin.requires_grad_(t.requires_grad)

    return [copy(t) for t in args]


def same(fn: Callable[..., Any], *args: Any, gradients: bool = True, fn_compiled: Callable[..., Any] | None = None,
         **options: Any) -> None:
    """Compares values, strides, which arguments the results alias, gradients, and the arguments afterwards."""
    ours_in, eager_in = fresh(args), fresh(args)
    ours, eager = (fn_compiled or compiled(fn, **options))(*ours_in), fn(*eager_in)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    torch.testing.assert_close(ours_in, eager_in, equal_nan=True)
    for a, b in zip(tensors(ours), tensors(eager), strict=True):
        assert a.stride() == b.stride(), f"strides {a.stride()}, eager has {b.stride()}"
        assert aliases(a, ours_in) == aliases(b, eager_in), "shares memory with other arguments than in eager"
    if gradients:
        torch.testing.assert_close(grads(ours, ours_in), grads(eager, eager_in), equal_nan=True)


def aliases(t: torch.Tensor, args: list[Any]) -> list[int]:
    """The positions of the arguments that t shares memory with."""
    where = t.untyped_storage().data_ptr()
    same_place = [isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == where != 0 for x in args]
    return [k for k, yes in enumerate(same_place) if yes]


def grads(out: Any, args: list[Any]) -> list[Any]:
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    made = [t for t in tensors(out) if t.requires_grad]
    if not wanted or not made:
        return []
    seeds = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape) for t in made]
    return list(torch.autograd.grad(made, wanted, seeds, allow_unused=True))
