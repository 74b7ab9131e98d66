"""What the device's kernels in Python have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from flambeau.torch_compat.dispatch import DisableTorchFunction, untraced


def private(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What a kernel does on the host is not the caller's: neither modes nor a default device reach it, and Dynamo does
    not trace it, although it may be watching the caller."""

    @untraced
    def call(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return kernel(*args, **kwargs)

    return call


@cache
def aten_named(name: str) -> Any:
    """The operator of that name, "index.Tensor" or "equal"."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def short(op: Any) -> str:
    """The name by which a library of kernels for ATen knows it."""
    return str(op.name()).removeprefix("aten::")
