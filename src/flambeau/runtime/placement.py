"""Chooses where a graph runs: on the device of its tensors, with that device's target.

A graph may use several devices. It is compiled for one of them; operators on other devices are called directly, and CPU
scalars, which PyTorch allows as arguments everywhere, are moved to the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from flambeau.targets.base import Target, get_target, target_for

CPU = torch.device("cpu")


def common_device(tensors: Iterable[Any]) -> torch.device:
    """The device of most tensors; the CPU only if no tensor is elsewhere."""
    count = Counter(t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type not in ("cpu", "meta"))
    return count.most_common(1)[0][0] if count else CPU


def graph_device(gm: fx.GraphModule) -> torch.device:
    """The device that a captured graph is compiled for."""
    return common_device(t for n in gm.graph.nodes for t in flat(n.meta.get("val")))


def target_of(device: torch.device, wanted: str | None) -> Target | None:
    """The target called `wanted`, unless it cannot read the device's memory; else the device's own target, if any."""
    own = target_for(device)
    if own is not None and get_target(own).opaque:
        return get_target(own)
    name = wanted or own
    return get_target(name) if name is not None else None


def has_streams(device: torch.device) -> bool:
    """Whether work on this device runs on streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def movable(t: torch.Tensor) -> bool:
    """Whether PyTorch allows the tensor to be mixed with tensors of any device: a scalar on the CPU."""
    return t.device.type == "cpu" and t.dim() == 0


def flat(x: Any) -> list[Any]:
    return [z for y in x for z in flat(y)] if isinstance(x, (list, tuple)) else [x]
