"""Random state of the device: a generator is a seed and a count, from which each call gets its own seed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from flambeau.runtime.launch_plan import Run

from .copies import Copies

DRAWS: Counter[torch.device] = Counter()  # calls that drew random numbers, for tests that compare values


def host_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator for one call, seeded from the seed and offset of the device's generator."""
    DRAWS[generator.device] += 1
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # offsets of CUDA's generators, which programs save, are multiples of 4
    mixed = (generator.initial_seed() + (offset // 4 + 1) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor % 2**64
    return torch.Generator(device="cpu").manual_seed((mixed ^ mixed >> 31) % 2**63)


class _Chosen(threading.local):
    generator: torch.Generator | None = None


_CHOSEN = _Chosen()


def with_generator(run: Run, args: list[Any], generator: torch.Generator) -> list[Any]:
    """Run a program with its seeds drawn from the given generator."""
    _CHOSEN.generator = generator
    try:
        return run(args)
    finally:
        _CHOSEN.generator = None


class Seeds:
    """Draws the seeds of programs: from the generator of the call, or else from the device's default generator."""

    def __init__(self, copies: Copies, default: Callable[[int], torch.Generator]) -> None:
        self._copies, self._default = copies, default

    def __call__(self, count: int, device: torch.device) -> torch.Tensor:
        chosen = _CHOSEN.generator or self._default(device.index or 0)
        host = torch.empty((count, 2), dtype=torch.int64, device="cpu").random_(
            generator=host_generator(chosen) if chosen.device.type == self._copies.kind else chosen)
        made = torch.empty((count, 2), dtype=torch.int64, device=device)
        self._copies.write(made.device.index, made.data_ptr(), host, wait=False)
        return made
