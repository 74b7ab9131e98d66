"""Which operators torch takes apart before we see them: all of its core decompositions but those we lower.

In exact numerics only those that move values: eager does not take apart what has a kernel, and its kernel rounds in its
own places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import overloads_with
from flambeau.torch_compat.decomp import core_aten_decompositions, decomposition_table, suggest_memory_format

aten = torch.ops.aten

# They round nothing.
MOVES = (
    aten.block_diag, aten.diag_embed, aten.diagonal_backward, aten.eye,
    aten.nan_to_num, aten.pixel_shuffle, aten.pixel_unshuffle, aten.rot90,
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


def channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Eager's kernel makes new memory, where torch's decomposition may end in a view; what is empty stays as it is."""
    if x.numel() == 0:
        return aten.alias(x)
    n, channels, *rest = x.shape
    mixed = x.reshape(n, groups, channels // groups, *rest).transpose(1, 2).reshape(x.shape)
    return mixed.clone(memory_format=suggest_memory_format(x))


# Ours, for operators whose metadata torch cannot compute with symbolic sizes, or whose memory it does not know.
OWN: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.hardshrink_backward.default, aten.softshrink_backward.default), shrink_backward),
    **dict.fromkeys((aten.channel_shuffle.default, aten.native_channel_shuffle.default), channel_shuffle)}


# Losses whose kernels take floats, and whether of several dtypes; taken apart, they would compute with anything.
STRICT = {aten.binary_cross_entropy.default: False, aten.huber_loss.default: False,
          aten.multi_margin_loss.default: False, aten.smooth_l1_loss.default: True}


def of_floats(decomposition: Callable[..., Any], several: bool) -> Callable[..., Any]:
    """What eager does not take stays whole: then ATen raises its error."""

    def taken_apart(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else x
        mixed = other.is_floating_point() and other.dtype is not x.dtype
        if not x.is_floating_point() or (mixed and not several):
            return NotImplemented
        return decomposition(x, *args, **kwargs)

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
    for op in (*LOWERINGS, *overloads_with("library")):
        out.pop(op, None)
    out.update(OWN)
    return {op: of_floats(fn, STRICT[op]) if op in STRICT else fn for op, fn in out.items()}
