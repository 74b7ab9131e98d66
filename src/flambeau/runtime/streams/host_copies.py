"""Copies tensors to host memory until a backward needs them, and copies them back.

The host memory is pinned, so that copies run in parallel with kernels; torch's allocator caches it for the next step.
All copies (schedule/streams/offload.py) run on one stream of the program's own, in the order in which they were issued.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from flambeau.targets.base import Target

deterministic: Any = torch.utils.deterministic  # its stubs lack its settings

NOTES = "flambeau_notes"  # key in the meta of a graph: lines for `flambeau explain`


def send(x: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, with the same strides. It is complete once the current stream reaches this point."""
    filled = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False  # with deterministic algorithms, the host would write it first
    try:
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True)
    finally:
        deterministic.fill_uninitialized_memory = filled
    return there.copy_(x, non_blocking=True)


def fetch(there: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the tensor back to the device, in the order of the current stream."""
    made = torch.empty_strided(there.shape, there.stride(), dtype=there.dtype, device=device)
    return made.copy_(there, non_blocking=True)


# ---- the link --------------------------------------------------------------------------------------------------


def link_rate(target: Target, device: torch.device) -> float:
    """Bytes per nanosecond from the device to pinned host memory: measured once per machine, and kept on disk."""
    from flambeau.targets.identity import identity
    from flambeau.targets.search import kept

    chip = target.chip() if target.times else device.type
    return float(kept(["link", *identity(target), chip], lambda: str(measured_rate(device))))


def measured_rate(device: torch.device) -> float:
    there = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
    best = float("inf")
    for _ in range(4):
        torch.accelerator.synchronize(device)
        start = time.perf_counter_ns()
        here.copy_(there, non_blocking=True)
        torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter_ns() - start)
    return there.numel() / best


def device_memory(device: torch.device) -> int:
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device))
    return 1 << 62
