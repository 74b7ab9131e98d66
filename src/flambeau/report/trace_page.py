"""The web page of a trace: where the time of a step went, graphs, kernels ranked by lost time, memory, sources.

All numbers are for one step. The number of steps in the trace is the greatest common divisor of the programs' calls. If
nothing was traced, numbers are those of the session's clocks, for the whole run.
"""

from __future__ import annotations

import json
import math
import platform
import re
from pathlib import Path
from typing import Any

import torch

import flambeau
from flambeau.compare.first_difference import source
from flambeau.debug.profile import Profile
from flambeau.debug.session import Session
from flambeau.ir.program import Call, Launch
from flambeau.pipeline import Compiled
from flambeau.report.session import GraphReport, Row, lines, overview_of, ranked
from flambeau.runtime.launch_plan import LaunchPlan

CALLS = 600  # at most so many calls of programs are drawn
OTHERS = 16  # rows in the table of other operators
RUNS = re.compile(r"\b(plan\d+|call\d+|f\d+)\((?!x)")


def page(session: Session, profile: Profile) -> str:
    o = overview_of(session, profile.times)
    traced = profile.wall > 0
    steps = traced and math.gcd(*(g.calls for g in o.graphs)) or 1
    wall = profile.wall if traced else sum(g.seconds for g in o.graphs)
    rows = ranked(o.rows)
    texts = {r.title: r.text for r in rows if r.text}
    data = {
        "version": flambeau.__version__, "torch": torch.__version__, "machine": machine(o.graphs),
        "traced": traced, "steps": steps, "wall": wall / steps, "busy": profile.busy / steps,
        "overview": list(lines(o, None)), "speed": o.speed,
        "calls": [[n, (start - profile.calls[0][1]) / 1e3, s * 1e3] for n, start, s in
                  profile.calls[:min(CALLS, len(profile.calls) // steps)]],
        "graphs": [graph_data(g, steps) for g in o.graphs],
        "rows": [row_data(r, steps) for r in rows], "texts": texts,
        "others": others_data(profile, steps),
        "memory": profile.memory,
    }
    template = Path(__file__).with_name("trace_page.html").read_text()
    return template.replace("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"), 1)


def others_data(profile: Profile, steps: int) -> list[list[Any]]:
    """The operators outside of compiled graphs: name, count and seconds per step. The fastest ones share a row."""
    found = sorted(((name, n, s) for name, (n, s) in profile.others.items()), key=lambda x: -x[2])
    shown, more = found[:OTHERS], found[OTHERS:]
    if more:
        shown.append((f"{len(more)} more", sum(n for _, n, _ in more), sum(s for *_, s in more)))
    return [[name, n / steps, s / steps] for name, n, s in shown]


def machine(graphs: list[GraphReport]) -> str:
    devices = dict.fromkeys(str(g.times.plan.device) for g in graphs if g.times is not None)
    names = [torch.cuda.get_device_name(d) if d.startswith("cuda") else d for d in devices]
    return ", ".join([*names, platform.machine(), f"Python {platform.python_version()}"])


def row_data(r: Row, steps: int) -> dict[str, Any]:
    return {"graph": r.graph, "name": r.name, "kind": r.kind, "title": r.title, "count": r.count,
            "ms": r.seconds * 1e3 / steps, "bytes": r.bytes / steps, "limit": r.limit * 1e3 / steps or None,
            "lost": None if r.lost is None else r.lost * 1e3 / steps}


def graph_data(g: GraphReport, steps: int) -> dict[str, Any]:
    assert g.times is not None
    out: dict[str, Any] = {"number": g.number, "what": g.what, "target": g.target, "calls": g.calls / steps,
                           "ms": g.seconds * 1e3 / steps, "nodes": [], "lines": {}}
    times = in_order(g.times.plan)
    if g.summary is None or g.made is None:  # loaded from disk: its operators are not known
        for where in times:
            if (p := g.times.parts.get(where)) is not None:
                kernel = p.part.step is not None
                out["nodes"].append({"kind": "kernel" if kernel else "call", "name": p.part.title,
                                     "title": p.part.title, "ms": p.seconds * 1e3 / steps, "bytes": p.bytes / steps})
        return out
    places = iter(times)
    for step, made in zip(g.summary.steps, g.made.program.steps, strict=True):
        found = g.times.parts.get(next(places, "")) if isinstance(made, (Launch, Call)) else None
        out["nodes"].append({
            "kind": step.kind, "name": step.name, "title": step.title, "operators": step.operators,
            "loops": [step.outer, step.inner, step.vector], "reads": step.reads, "writes": step.writes,
            "stream": step.stream,
            "ms": found.seconds * 1e3 / steps if found else 0.0, "bytes": found.bytes / steps if found else 0})
    out["lines"] = operator_lines(g.made, g.summary.operators)
    out["memory"] = [[m.buffer, m.type, m.place, m.bytes, m.why] for m in g.summary.memory]
    return out


def in_order(plan: LaunchPlan) -> list[str]:
    """The place of each step in the source of a program, in order."""
    out: list[str] = []
    for name in RUNS.findall(plan.source):
        out += [f"{name} {k}" for k in range(len(plan.plans[name]))] if name in plan.plans else [name]
    return out


def operator_lines(made: Compiled, operators: list[str]) -> dict[str, list[str]]:
    """For each operator, its line in the captured graph and the line of the user's program it comes from."""
    calls = {n.name: n for n in made.gm.graph.nodes if n.op == "call_function"}
    out = {}
    for text in operators:
        name = text.partition(":")[0]
        file, line, code = source(calls[name])
        out[name] = [text, f"{Path(file).name}:{line}  {code}" if file else ""]
    return out
