"""Helpers for the device's kernels that are written in Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from flambeau.torch_compat.dispatch import DisableTorchFunction, untraced


def private(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Isolate a kernel's work on the host from its caller: modes and default devices do not affect it, and Dynamo does
    not trace it, even if it is watching the caller."""

    @untraced
    def call(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return kernel(*args, **kwargs)

    return call


@cache
def aten_named(name: str) -> Any:
    """The ATen operator with this name, such as "index.Tensor" or "equal"."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def short(op: Any) -> str:
    """The operator's name in a torch.library.Library for ATen."""
    return str(op.name()).removeprefix("aten::")
