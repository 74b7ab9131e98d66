"""Read a trace of torch's profiler: times of steps, kernels that are not ours, memory over time.

Each launch and each call of our programs is a named range in the trace. A GPU kernel belongs to the range in which the
host launched it, so library kernels are counted for the call that started them. On a CPU, the range itself is the time.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.runtime.watchers import Part
from flambeau.torch_compat.profiler import record_range

from .clocks import PartTime, ProgramTime, moved

NAME = re.compile(r".* \[(\d+)(?: (.+))?\]")  # title [program where]
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "privateuse1_runtime", "privateuse1_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation")
REST = "rest"  # time of a program outside its launches and calls: on a GPU copies and fills, on a CPU host work
ENGINE = "autograd::engine::evaluate_function: "
POINTS = 1500  # of a curve of memory over time


class Ranges:
    """A watcher (runtime/watchers.py) that puts profiler ranges around programs and their steps."""

    def __init__(self) -> None:
        self.on = True
        self.plans: list[LaunchPlan] = []
        self.parts: dict[tuple[int, str], PartTime] = {}  # by the number of the program, from 1 on

    def __call__(self, part: Part, call: Callable[..., Any]) -> Callable[..., Any]:
        if not any(part.plan is p for p in self.plans):
            self.plans.append(part.plan)
        number = next(k for k, p in enumerate(self.plans, 1) if p is part.plan)
        name = f"{part.title} [{number}{' ' if part.where else ''}{part.where}]"
        time = self.parts.setdefault((number, part.where), PartTime(part))

        def ranged(*args: Any, **given: Any) -> Any:
            if not self.on:
                return call(*args, **given)
            with record_range(name):
                result = call(*args, **given)
            time.count += 1
            time.bytes += moved(part, args, result) if part.where else 0
            return result

        return ranged


@dataclass
class Span:
    name: str
    start: float  # microseconds, as torch has them
    seconds: float
    thread: tuple[Any, Any]
    inner: float = 0.0  # seconds of the spans directly inside this one
    step: tuple[int, str] | None = None  # if it is one of our ranges: number of the program, and place in it

    @property
    def end(self) -> float:
        return self.start + self.seconds * 1e6


@dataclass
class Profile:
    times: list[ProgramTime]  # programs that ran, in the order of their first calls
    calls: list[tuple[int, float, float]] = field(default_factory=list)  # program (from 1), start, seconds
    others: dict[str, tuple[int, float]] = field(default_factory=dict)  # outside of our programs: count, seconds
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # by device: second, bytes
    wall: float = 0.0
    busy: float = 0.0  # seconds in which the GPU was busy; 0 without a GPU


class Lookup:
    """Finds the innermost of our ranges at a given time of a thread."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.by: dict[tuple[Any, bool], list[Span]] = defaultdict(list)
        for s in spans:
            assert s.step is not None
            self.by[s.thread, bool(s.step[1])].append(s)
        for found in self.by.values():
            found.sort(key=attrgetter("start"))

    def at(self, thread: Any, time: float) -> Span | None:
        for kind in (True, False):  # prefer a step to a program
            spans = self.by.get((thread, kind), [])
            k = bisect_right(spans, time, key=attrgetter("start"))
            if k and spans[k - 1].end >= time:
                return spans[k - 1]
        return None


def read(path: Path, ranges: Ranges, wall: float) -> Profile:
    """Read the file that the profiler has written."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    host: list[Span] = []
    device: list[tuple[Span, Any]] = []
    launches: dict[Any, Span] = {}
    for e in events:
        if e.get("ph") != "X":
            continue
        cat, span = e.get("cat"), Span(e["name"], e["ts"], e["dur"] / 1e6, (e["pid"], e["tid"]))
        if cat in ON_DEVICE:
            device.append((span, e["args"].get("correlation")))
        elif cat in LAUNCHES:
            launches[e["args"].get("correlation")] = span
        elif cat in ON_HOST:
            found = NAME.fullmatch(span.name)
            if found and (step := (int(found[1]), found[2] or "")) in ranges.parts:
                span.step = step
            host.append(span)
    ours = [s for s in host if s.step is not None]
    lookup, seconds, others = Lookup(ours), defaultdict[Any, float](float), defaultdict[str, list[float]](list)
    if device:
        for span, correlation in device:
            by = launches.get(correlation)
            holder = lookup.at(by.thread, by.start) if by is not None else None
            if holder is None:
                others[span.name].append(span.seconds)
            else:
                seconds[holder.step] += span.seconds
    else:
        nested(host)
        for s in host:
            if s.step is not None:
                seconds[s.step] += s.seconds
            elif lookup.at(s.thread, s.start) is None:
                others[s.name.removeprefix(ENGINE)].append(max(s.seconds - s.inner, 0.0))
    calls = sorted((s.start, s.step[0], s.seconds) for s in ours if s.step and not s.step[1])
    order = {old: new for new, old in enumerate(dict.fromkeys(number for _, number, _ in calls), 1)}
    return Profile([program_time(number, ranges, seconds, bool(device)) for number in order],
                   [(order[number], start, s) for start, number, s in calls],
                   {name: (len(found), sum(found)) for name, found in others.items()}, curves(events), wall,
                   covered((s.start, s.end) for s, _ in device) / 1e6)


def program_time(number: int, ranges: Ranges, seconds: dict[Any, float], device: bool) -> ProgramTime:
    whole, plan = ranges.parts[number, ""], ranges.plans[number - 1]
    made = ProgramTime(plan, whole.count, seconds[number, ""])
    for (n, where), part in ranges.parts.items():
        if n == number and where and part.count:
            part.seconds = seconds[number, where]
            made.parts[where] = part
    steps = sum(p.seconds for p in made.parts.values())
    # On a GPU this is what the program launched outside of its steps. On a CPU its range covers its steps as well.
    rest = made.seconds if device else max(made.seconds - steps, 0.0)
    if rest:
        made.parts[REST] = PartTime(Part(plan, REST, REST), whole.count, rest)
    made.seconds = steps + rest
    return made


def nested(spans: Sequence[Span]) -> None:
    """Set `inner` of each span: the time spent in the spans directly inside it."""
    open_: dict[Any, list[Span]] = defaultdict(list)
    for s in sorted(spans, key=lambda s: (s.start, -s.seconds)):
        stack = open_[s.thread]
        while stack and stack[-1].end < s.end:
            stack.pop()
        if stack:
            stack[-1].inner += s.seconds
        stack.append(s)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The total length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def curves(events: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, int]]]:
    """Allocated bytes over time, by device. If there are many points, keep the highest of each stretch."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for e in events:
        if e.get("name") == "[memory]" and "Total Allocated" in (args := e["args"]):
            device = "CPU" if args.get("Device Type") == 0 else f"GPU {args.get('Device Id', 0)}"
            found[device].append((e["ts"], int(args["Total Allocated"])))
    first = min((points[0][0] for points in found.values()), default=0.0)
    out = {}
    for device, points in found.items():
        points.sort()
        width = max(1, len(points) // POINTS)
        highest = (max(points[k:k + width], key=lambda p: p[1]) for k in range(0, len(points), width))
        out[device] = [((t - first) / 1e6, n) for t, n in highest]
    return out
