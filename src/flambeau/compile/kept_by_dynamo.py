"""Operators that Dynamo writes out in others, left as they were written where eager's bits are wanted.

`torch.addcdiv` with a number becomes a quotient, a product and a sum, `torch._foreach_lerp_` a difference and a sum, so
that the number may be a tensor. What is written out rounds where eager's kernel does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from flambeau.torch_compat.dynamo import TensorVariable
from flambeau.torch_compat.ops import foreach_lerp_
from flambeau.torch_compat.patches import HANDLERS

# What takes them apart, and where their number is: by name, or at a position.
FUNCTIONS = {torch.addcdiv: "value", foreach_lerp_: 2}
METHODS = {"addcmul_": "value", "addcdiv_": "value", "add_": "alpha"}


def kept_whole(exact: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Within it. `exact` says of what Dynamo compiles for, whether eager's bits are wanted: it may be for others, in
    other threads."""
    return HANDLERS.applied(FUNCTIONS, METHODS, functools.partial(leaving, exact))


def leaving(exact: Callable[[Any], bool], write_out: Callable[..., Any], number: Any) -> Callable[..., Any]:
    @functools.wraps(write_out)
    def handler(self: Any, tx: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = args[number] if isinstance(number, int) and len(args) > number else kwargs.get(number)
        if given is not None and exact(tx.output.compiler_fn) and not isinstance(given.realize(), TensorVariable):
            return None
        return write_out(self, tx, *args, **kwargs)

    return handler
