"""How often programs run, and how long their steps take: clocks around the first calls of each program.

Of a program's calls all are counted and the first few are timed, its very first only until there are others: it may
wait for a compiler, and touches memory for the first time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.runtime.watchers import Part

TIMED = 8  # calls of a program, after its first
COPIED, COPIES = 64 << 20, 6  # bytes and times, of the copy that is the limit


@dataclass
class PartTime:
    """One launch or call of a program, over all of the program's calls."""

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
    """Bytes: as the plan knows them of a launch, and of a call those of its tensors."""
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
        self.noted: dict[Part, list[tuple[int, Any, Any, int]]] = {}  # which call of the program, start, end, bytes
        self.on: set[int] = set()  # programs that run now, and are timed

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
        """Programs that ran, as if all of their calls took as long as the median of those that were timed."""
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
    """Seconds of the host where it waits for kernels; an event of the device where it does not."""
    if device.type == "cpu":
        return time.perf_counter

    def now() -> Any:
        made = torch.Event(device, enable_timing=True)
        made.record()
        return made

    return now


def copy_speed(device: torch.device) -> float | None:
    """Bytes that a copy on the device reads and writes in a second: what no kernel that moves memory exceeds. None
    where there is no room to measure it."""
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
    except RuntimeError:  # out of memory, or a device that failed before
        return None


def between(start: Any, end: Any) -> float:
    """Seconds."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
