"""Chooses where a graph runs: on the device of its tensors, with that device's target.

A graph may name several devices. It is compiled for one of them; operators on the others are called as they are, and
scalars on the CPU, which PyTorch lets take part everywhere, are brought over.
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
    """The device of most of the tensors, the CPU only if there is no other."""
    count = Counter(t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type not in ("cpu", "meta"))
    return count.most_common(1)[0][0] if count else CPU


def graph_device(gm: fx.GraphModule) -> torch.device:
    """The device that a captured graph is compiled for."""
    return common_device(t for n in gm.graph.nodes for t in flat(n.meta.get("val")))


def target_of(device: torch.device, wanted: str | None) -> Target | None:
    """The target called `wanted`, if it can read the device's memory; else that of the device, if there is one."""
    own = target_for(device)
    if own is not None and get_target(own).opaque:
        return get_target(own)
    name = wanted or own
    return get_target(name) if name is not None else None


def has_streams(device: torch.device) -> bool:
    """Whether what is put there runs on streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def movable(t: torch.Tensor) -> bool:
    """Whether PyTorch lets it meet tensors of any device."""
    return t.device.type == "cpu" and t.dim() == 0


def flat(x: Any) -> list[Any]:
    return [z for y in x for z in flat(y)] if isinstance(x, (list, tuple)) else [x]
