"""Draws the streams of a program as lanes over modelled time: as text, and as trace events for Perfetto.

    print(drawn(program, tuning))
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flambeau.ir.program import Call, Copy, Launch, Program, Step
from flambeau.ir.tuning import Tuning
from flambeau.schedule.streams.overlap import Lane, timeline

WIDTH = 96  # columns of the longest lane


def title(s: Step) -> str:
    if isinstance(s, Launch):
        return ", ".join(s.origins) or "kernel"
    return (s.origin or str(s.target)) if isinstance(s, Call) else "copy"


def drawn(p: Program, tuning: Tuning) -> str:
    """One line per stream with its steps as numbered boxes, followed by the title and the times of each number."""
    lanes = timeline(p, tuning)
    end = max((lane.end for lane in lanes.values()), default=1.0)
    rows: dict[int, list[str]] = {}
    names = []
    for number, (k, lane) in enumerate(lanes.items()):
        row = rows.setdefault(lane.stream, [" "] * (WIDTH + 1))
        first, last = (int(t / end * WIDTH) for t in (lane.start, lane.end))
        text = f"[{number}".ljust(max(last - first, 1), "=")[:max(last - first, 1)]
        row[first:first + len(text)] = text
        names.append(f"  {number:3} stream {lane.stream} {lane.start / 1e3:8.1f} to {lane.end / 1e3:8.1f} us  "
                     f"{title(p.steps[k])}")
    lines = [f"stream {s}: {''.join(row).rstrip()}" for s, row in sorted(rows.items())]
    return "\n".join([*lines, f"{'':10}0 to {end / 1e3:.1f} us, as modelled", *names])


def events(p: Program, tuning: Tuning, name: str, pid: int, at: float) -> list[dict[str, Any]]:
    """The timeline as events of a trace in Chrome's format, starting at microsecond `at`."""
    made: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"plan: {name}"}}]
    lanes: dict[int, Lane] = timeline(p, tuning)
    for stream in sorted({lane.stream for lane in lanes.values()}):
        made.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": stream, "args": {"name": f"stream {stream}"}})
    for k, lane in lanes.items():
        made.append({"ph": "X", "cat": "plan", "name": title(p.steps[k]), "pid": pid, "tid": lane.stream,
                     "ts": at + lane.start / 1e3, "dur": (lane.end - lane.start) / 1e3,
                     "args": {"step": k, "kind": {Launch: "kernel", Copy: "copy"}.get(type(p.steps[k]), "call")}})
    return made


def add_plans(file: Path, programs: Sequence[tuple[str, Program, Tuning]]) -> None:
    """Adds the modelled timelines of programs with several streams to the file of torch's profiler."""
    found = [(name, p, tuning) for name, p, tuning in programs if p.streams]
    if not found:
        return
    with gzip.open(file, "rt") as f:
        trace = json.load(f)
    ran = [e["ts"] for e in trace["traceEvents"] if e.get("ph") == "X" and "ts" in e]
    begin = min(ran, default=0.0)
    for k, (name, p, tuning) in enumerate(found):
        trace["traceEvents"] += events(p, tuning, name, 1_000_000 + k, begin)
    with gzip.open(file, "wt") as f:
        json.dump(trace, f)
