"""Chooses which operators torch decomposes: its core decompositions, except operators with a lowering, and those with
the fact `decomposed`.

In exact numerics, only decompositions that move values are used: eager runs a single kernel where it has one, which
rounds at other points than its decomposition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from flambeau.ops import LOWERINGS
from flambeau.ops.facts import described, facts, name_of, overloads_with
from flambeau.torch_compat.decomp import core_aten_decompositions, decomposition_table
from flambeau.torch_compat.ops import OpOverload

from .eager_dtypes import taken_apart

aten = torch.ops.aten


@cache
def table(exact: bool, /) -> dict[Any, Callable[..., Any]]:
    own = {op: how for op, how in overloads_with("decomposed").items() if callable(how)}
    named = {name for name, _ in described("decomposed") if isinstance(name, str)}
    more = {op: how for op, how in decomposition_table.items() if isinstance(op, OpOverload)
            and name_of(op) in named and (facts(op).exact or not exact)}
    if exact:
        return {**more, **own}
    out = {**core_aten_decompositions(), **more}
    # Operators with a lowering stay whole, and so do those that are one library call.
    for op in (*LOWERINGS, *overloads_with("library")):
        out.pop(op, None)
    out.update(own)
    # Some decompositions make a constant (torch.tensor), which is detached in place. torch's trace cannot express that.
    out[aten.detach_.default] = lambda constant: constant
    # Calls that eager rejects stay whole, so that ATen raises its error.
    return {op: taken_apart(op, fn, lambda *args, **kwargs: NotImplemented) for op, fn in out.items()}
