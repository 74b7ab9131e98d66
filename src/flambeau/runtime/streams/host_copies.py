"""Tensors that wait in memory of the host until a backward needs them: sent there, and fetched again.

The memory is pinned, so that copies run beside kernels; torch's allocator of it keeps it for the next step. What sends
and fetches (schedule/streams/offload.py) is on one stream of the program's own, in the order in which it was put there.
"""

from __future__ import annotations

import time

import torch

from flambeau.targets.base import Target

NOTES = "flambeau_notes"  # in the meta of a graph: for `flambeau explain`


def send(x: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, laid out as the tensor is. It is there once the current stream has come so far."""
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True)
    return there.copy_(x, non_blocking=True)


def fetch(there: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor again, where a program does so in the order of one stream."""
    made = torch.empty_strided(there.shape, there.stride(), dtype=there.dtype, device=device)
    return made.copy_(there, non_blocking=True)


# ---- the link --------------------------------------------------------------------------------------------------


def link_rate(target: Target, device: torch.device) -> float:
    """Bytes a nanosecond from the device to pinned memory of the host: measured once for a machine."""
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
