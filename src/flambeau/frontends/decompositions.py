"""Which operators torch takes apart before we see them: all of its core decompositions but those we lower.

In exact numerics none: eager does not take apart what has a kernel, and its kernel rounds in its own places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.contraction import CONTRACTIONS

aten = torch.ops.aten

# Beyond torch's core set: operators whose decomposition ends in operators that we lower.
EXTRA = (
    aten.addmv, aten.baddbmm, aten.native_batch_norm, aten.rrelu_with_noise, aten.special_entr, aten.trace,
    aten.index_add, aten.index_copy, aten.nansum, aten.logaddexp2, aten.take, aten.mvlgamma, aten.special_log_ndtr,
)


def shrink_backward(grad: torch.Tensor, x: torch.Tensor, lambd: float) -> Any:
    if all(isinstance(n, int) for n in x.shape):
        return NotImplemented  # then the operator stays whole
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


# Ours, for operators whose metadata torch cannot compute with symbolic sizes.
OWN: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (aten.hardshrink_backward.default, aten.softshrink_backward.default), shrink_backward)


@lru_cache(maxsize=2)
def table(exact: bool = False) -> dict[Any, Callable[..., Any]]:
    if exact:
        return dict(OWN)
    ops_loaded()
    out = dict(core_aten_decompositions())
    for packet in EXTRA:
        for name in packet.overloads():
            op = getattr(packet, name)
            if op in decomposition_table:
                out[op] = decomposition_table[op]
    # What we lower stays whole, and so does what is one library call.
    for op in (*LOWERINGS, *CONTRACTIONS):
        out.pop(op, None)
    out.update(OWN)
    return out
