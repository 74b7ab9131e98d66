"""Which operators torch takes apart before we see them: all of its core decompositions but those we lower.

In exact numerics only those that move values: eager does not take apart what has a kernel, and its kernel rounds in its
own places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.contraction import CONTRACTIONS
from flambeau.ops.refused import ALIKE, REFUSED, is_refused

aten = torch.ops.aten

# They round nothing.
MOVES = (
    aten.block_diag, aten.channel_shuffle, aten.diag_embed, aten.diagonal_backward, aten.eye,
    aten.nan_to_num, aten.native_channel_shuffle, aten.pixel_shuffle, aten.pixel_unshuffle, aten.rot90,
    aten.select_backward, aten.slice_backward, aten.stack,
)
# Beyond torch's core set: operators whose decomposition ends in operators that we lower.
EXTRA = (
    aten.addmv, aten.baddbmm, aten.dist, aten.index_add, aten.index_copy, aten.ldexp, aten.logaddexp2, aten.mvlgamma,
    aten.nansum, aten.native_batch_norm, aten.rrelu_with_noise, aten.rrelu_with_noise_backward, aten.special_entr,
    aten.special_log_ndtr, aten.take, aten.trace, aten.tril_indices, aten.triu_indices,
)


def shrink_backward(grad: torch.Tensor, x: torch.Tensor, lambd: float) -> Any:
    if all(isinstance(n, int) for n in x.shape):
        return NotImplemented  # then the operator stays whole
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


# Ours, for operators whose metadata torch cannot compute with symbolic sizes.
OWN: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (aten.hardshrink_backward.default, aten.softshrink_backward.default), shrink_backward)


def unless_refused(op: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """What eager does not take stays whole: then ATen raises its error."""

    def taken_apart(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if all(t.device.type != "cuda" for t in tensors) and is_refused(op, [t.dtype for t in tensors]):
            return NotImplemented
        return decomposition(*args, **kwargs)

    return taken_apart


@lru_cache(maxsize=2)
def table(exact: bool = False) -> dict[Any, Callable[..., Any]]:
    packets = MOVES if exact else (*MOVES, *EXTRA)
    overloads = (getattr(packet, name) for packet in packets for name in packet.overloads())
    more = {op: decomposition_table[op] for op in overloads if op in decomposition_table}
    if exact:
        return {**more, **OWN}
    ops_loaded()
    out = {**core_aten_decompositions(), **more}
    # What we lower stays whole, and so does what is one library call.
    for op in (*LOWERINGS, *CONTRACTIONS):
        out.pop(op, None)
    out.update(OWN)
    refusing = REFUSED.keys() | ALIKE
    return {op: unless_refused(op, fn) if isinstance(op, torch._ops.OpOverload)
            and op._schema.name.removeprefix("aten::") in refusing else fn for op, fn in out.items()}
