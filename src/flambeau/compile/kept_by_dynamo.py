"""Keeps Dynamo from decomposing some operators if results must equal eager's bit for bit.

Dynamo rewrites `torch.addcdiv` with a number as a quotient, a product and a sum, and `torch._foreach_lerp_` as a
difference and a sum, so that the number may be a tensor. The decomposition rounds where eager's kernel does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from flambeau.ops.facts import names_with
from flambeau.torch_compat.dynamo import TensorVariable
from flambeau.torch_compat.patches import HANDLERS


def handled() -> tuple[dict[Any, Any], dict[str, Any]]:
    """Functions and methods of the affected operators, each with the number's place: a keyword, or a position."""
    numbers = dict(names_with("number"))
    functions = {f"{name}{end}": number for name, number in numbers.items() for end in ("", "_")}
    return ({getattr(torch, name): number for name, number in functions.items() if hasattr(torch, name)},
            {f"{name}_": number for name, number in numbers.items()})


def kept_whole(exact: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """While active, Dynamo keeps these operators whole. `exact` is given the function that Dynamo compiles with and
    says whether its results must equal eager's bits, because other backends may compile in other threads."""
    return HANDLERS.applied(*handled(), functools.partial(leaving, exact))


def leaving(exact: Callable[[Any], bool], write_out: Callable[..., Any], number: Any) -> Callable[..., Any]:
    @functools.wraps(write_out)
    def handler(self: Any, tx: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = args[number] if isinstance(number, int) and len(args) > number else kwargs.get(number)
        if given is not None and exact(tx.output.compiler_fn) and not isinstance(given.realize(), TensorVariable):
            return None
        return write_out(self, tx, *args, **kwargs)

    return handler
