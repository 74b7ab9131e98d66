"""Clocks for FLAMBEAU_DEBUG: count the calls of each program, and time the steps of the first few.

The very first call is only used if there is no other: it may wait for a compiler, and it touches new memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.runtime.watchers import Part

TIMED = 8  # timed calls of a program, after the first one
COPIED, COPIES = 64 << 20, 6  # size of the copy that measures the memory limit, in bytes, and number of repetitions


@dataclass
class PartTime:
    """Total time and bytes of one launch or call in a program, over all calls of the program."""

    part: Part
    count: int = 0
    seconds: float = 0.0
    bytes: float = 0.0


@dataclass
class ProgramTime:
    plan: LaunchPlan
    calls: int = 0
    seconds: float = 0.0
    parts: dict[str, PartTime] = field(default_factory=dict)  # by Part.where


def moved(part: Part, args: Any, result: Any) -> int:
    """Bytes that a step reads and writes: for a launch, what the plan says; for a call, the size of its tensors."""
    if part.step is None:
        return sum(x.numel() * x.element_size() for x in flat([args, result]))
    sizes = args[1]
    names = {f"n{k}": sizes[slot] for k, slot in enumerate(part.step.sizes)}
    return int(eval(part.step.moved, {"min": min, "max": max}, names)) if part.step.moved else 0


def flat(x: Any) -> list[torch.Tensor]:
    if isinstance(x, (list, tuple)):
        return [z for y in x for z in flat(y)]
    return [x] if isinstance(x, torch.Tensor) and x.layout is torch.strided else []


class Clocks:
    """A watcher (runtime/watchers.py)."""

    def __init__(self) -> None:
        self.programs: dict[int, ProgramTime] = {}  # in the order in which they were bound
        self.noted: dict[Part, list[tuple[int, Any, Any, int]]] = {}  # number of the call, start, end, bytes
        self.on: set[int] = set()  # programs that are running and being timed

    def __call__(self, part: Part, call: Callable[..., Any]) -> Callable[..., Any]:
        key = id(part.plan)
        now, program = clock_of(part.plan.device), self.programs.setdefault(key, ProgramTime(part.plan))
        noted = self.noted.setdefault(part, [])

        def run(args: list[Any]) -> Any:
            program.calls += 1
            if program.calls > TIMED + 1:
                return call(args)
            self.on.add(key)
            start = now()
            try:
                return call(args)
            finally:
                noted.append((program.calls, start, now(), 0))
                self.on.discard(key)

        def step(*args: Any, **given: Any) -> Any:
            if key not in self.on:
                return call(*args, **given)
            start = now()
            result = call(*args, **given)
            noted.append((program.calls, start, now(), moved(part, args, result)))
            return result

        return step if part.where else run

    def read(self) -> list[ProgramTime]:
        """The programs that ran. Total times assume that each call took as long as the median of the timed calls."""
        for part, noted in self.noted.items():
            program = self.programs[id(part.plan)]
            later = [n for n in noted if n[0] > 1] or noted
            if not later:
                continue
            seconds = statistics.median(between(start, end) for _, start, end, _ in later) * program.calls
            if part.where:
                moved = statistics.median(n[3] for n in later) * program.calls
                program.parts[part.where] = PartTime(part, program.calls, seconds, moved)
            else:
                program.seconds = seconds
        return [p for p in self.programs.values() if p.calls]


def clock_of(device: torch.device) -> Callable[[], Any]:
    """The host's clock if kernels are synchronous, events of the device if not."""
    if device.type == "cpu":
        return time.perf_counter

    def now() -> Any:
        made = torch.Event(device, enable_timing=True)
        made.record()
        return made

    return now


@cache  # so that all reports of a process have one limit
def copy_speed(device: torch.device) -> float | None:
    """Bytes per second that a copy on the device reads and writes: the limit for kernels that only move memory. None
    if there is not enough memory to measure it."""
    now = clock_of(device)
    try:
        source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        noted = []
        for _ in range(COPIES):
            start = now()
            target.copy_(source)
            noted.append((start, now()))
        return 2 * COPIED / min(between(*pair) for pair in noted)
    except RuntimeError:  # out of memory, or the device has failed before
        return None


def between(start: Any, end: Any) -> float:
    """Seconds between two readings of a clock."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
