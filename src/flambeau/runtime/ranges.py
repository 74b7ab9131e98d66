"""NVTX ranges for NVIDIA profilers, with FLAMBEAU_NVTX=1: one around each call of a program, and around each launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flambeau.config import config
from flambeau.targets.base import Plan


def wanted(device: torch.device) -> bool:
    """Asked once, where a program is bound: without, nothing is left of it in a call."""
    return config.nvtx and device.type == "cuda"


def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*args: Any) -> Any:
        torch.cuda.nvtx.range_push(name)
        try:
            return call(*args)
        finally:
            torch.cuda.nvtx.range_pop()

    return ranged


def title(names: Sequence[str]) -> str:
    """Of a program with these kernels."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more if names else "flambeau, no kernel"


def one_by_one(plans: Sequence[Plan], names: Sequence[str]) -> Plan:
    """Plans of one launch each, where otherwise one native call makes them all."""
    parts = [around(name, plan) for name, plan in zip(names, plans, strict=True)]

    def run(pointers: Any, sizes: Any) -> Any:
        for at, part in enumerate(parts):
            if (bad := part(pointers, sizes)) is not None:
                where, code = bad
                return (where + at if where >= 0 else where), code
        return None

    return run
