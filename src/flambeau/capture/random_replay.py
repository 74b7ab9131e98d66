"""Random operators that backward runs again (activation checkpointing): called as they are, with the state they had.

The partitioner wraps them: forward returns the generator's state beside the result, backward takes it. Forward and
backward are compiled apart, and one of them may have been left to ATen; so the state is always torch's own, and the
operator ATen's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from flambeau.torch_compat.fake import detect_fake_mode

RUN_AND_SAVE = torch.ops.higher_order.run_and_save_rng_state
RUN_WITH = torch.ops.higher_order.run_with_rng_state


def state(device: torch.device) -> torch.Tensor:
    """Of the device's generator; the tensor itself is on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_state(new: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(new)
    else:
        torch.get_device_module(device).set_rng_state(new, device)


def run_and_save(device: torch.device, op: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """(the state, then the results)."""
    before = state(device)
    return (before, *_several(op(*args, **kwargs)))


def run_with(device: torch.device, before: torch.Tensor, op: Any, *args: Any,
             **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The results under that state; the generator goes on as if nothing had been drawn."""
    now = state(device)
    set_state(before, device)
    try:
        return _several(op(*args, **kwargs))
    finally:
        set_state(now, device)


def results(n: fx.Node) -> Any:
    """What torch says of the wrapped operator's results: a fake tensor, or several. The wrapper's node does not say."""
    start = 1 if n.target is RUN_AND_SAVE else 2
    op: Any = n.args[start - 1]
    args: Any
    kwargs: Any
    args, kwargs = (fx.node.map_arg(x, lambda a: a.meta["val"]) for x in (n.args[start:], n.kwargs))
    mode = detect_fake_mode([m.meta["val"] for m in n.graph.nodes if "val" in m.meta])
    assert mode is not None
    with mode:
        return op(*args, **kwargs)


def _several(x: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x) if isinstance(x, Sequence) else (x,)
