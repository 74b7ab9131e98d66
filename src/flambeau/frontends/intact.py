"""Operators that Dynamo writes out in others, left as they were written where eager's bits are wanted.

`torch.addcdiv` with a number becomes a quotient, a product and a sum, `torch._foreach_lerp_` a difference and a sum, so
that the number may be a tensor. What is written out rounds where eager's kernel does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable

# What takes them apart, and where their number is: by name, or at a position.
FUNCTIONS = {torch.addcdiv: "value", torch._foreach_lerp_: 2}
METHODS = {"addcmul_": "value", "addcdiv_": "value", "add_": "alpha"}


def install(exact: Callable[[Any], bool]) -> None:
    """Once for a process. `exact` says of what Dynamo compiles for, whether eager's bits are wanted."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function, number in FUNCTIONS.items():
        if function in handlers:  # not every release writes out every one
            handlers[function] = leaving(handlers[function], number, exact)
    for name, number in METHODS.items():
        method = getattr(TensorVariable, f"method_{name}", None)
        if method is not None:
            setattr(TensorVariable, f"method_{name}", leaving(method, number, exact))


def leaving(write_out: Callable[..., Any], number: Any, exact: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(write_out)
    def handler(self: Any, tx: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = args[number] if isinstance(number, int) and len(args) > number else kwargs.get(number)
        if given is not None and exact(tx.output.compiler_fn) and not isinstance(given.realize(), TensorVariable):
            return None
        return write_out(self, tx, *args, **kwargs)

    return handler
