"""Which operators torch takes apart before we see them: all of its core decompositions but those we lower, and those
that say so (`Facts.decomposed`).

In exact numerics only those that move values: eager does not take apart what has a kernel, and its kernel rounds in its
own places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from flambeau.ops import LOWERINGS
from flambeau.ops.facts import described, facts, name_of, overloads_with
from flambeau.torch_compat.decomp import core_aten_decompositions, decomposition_table
from flambeau.torch_compat.ops import OpOverload


def of_floats(decomposition: Callable[..., Any], alike: bool) -> Callable[..., Any]:
    """What eager does not take stays whole: then ATen raises its error."""

    def taken_apart(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else x
        mixed = other.is_floating_point() and other.dtype is not x.dtype
        if not x.is_floating_point() or (mixed and alike):
            return NotImplemented
        return decomposition(x, *args, **kwargs)

    return taken_apart


@lru_cache(maxsize=2)
def table(exact: bool = False) -> dict[Any, Callable[..., Any]]:
    own = {op: how for op, how in overloads_with("decomposed").items() if callable(how)}
    named = {name for name, _ in described("decomposed") if isinstance(name, str)}
    more = {op: how for op, how in decomposition_table.items() if isinstance(op, OpOverload)
            and name_of(op) in named and (facts(op).exact or not exact)}
    if exact:
        return {**more, **own}
    out = {**core_aten_decompositions(), **more}
    # What we lower stays whole, and so does what is one library call.
    for op in (*LOWERINGS, *overloads_with("library")):
        out.pop(op, None)
    out.update(own)
    strict = overloads_with("takes")
    return {op: of_floats(how, strict[op] == "floats alike") if op in strict else how for op, how in out.items()}
