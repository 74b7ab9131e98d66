"""The report of a session: FLAMBEAU_DEBUG=1 prints an overview, 2 also each kernel, 3 also its source.

    overview = overview_of(session)
    show(console, overview, level=2)
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import flambeau
from flambeau.debug.clocks import ProgramTime, copy_speed
from flambeau.debug.profile import REST
from flambeau.debug.session import Session
from flambeau.pipeline import Compiled
from flambeau.report import program
from flambeau.report.regions import phases
from flambeau.runtime.watchers import title
from flambeau.torch_compat.compilations import Compilation

FEW = 8  # lines of a list at level 1
FOUND = "found on disk"


@dataclass
class Row:
    """A kernel, or all calls of one operator, in one graph. Seconds and bytes are totals over the graph's calls."""

    graph: int
    name: str  # k0, aten.mm; if kernels have the same source, the first one
    kind: str  # kernel, library, ATen, call, or rest: what a program does between its steps
    title: str = ""  # name in profilers
    count: float = 0.0  # number of runs in one call of the graph
    seconds: float = 0.0
    bytes: float = 0.0
    limit: float = 0.0  # the memory limit: seconds that a copy of the bytes takes; 0: there is none
    operators: list[str] = field(default_factory=list)
    outer: str = ""
    inner: str = ""
    vector: str = ""
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    text: str = ""

    @property
    def lost(self) -> float | None:
        """Seconds beyond the memory limit; None if there is no limit."""
        return max(self.seconds - self.limit, 0.0) if self.limit else None


@dataclass
class GraphReport:
    number: int
    what: str  # forward of step (train.py:12)
    target: str
    calls: int = 0
    seconds: float = 0.0  # total of all calls
    operators: int = 0
    rows: list[Row] = field(default_factory=list)
    summary: program.Summary | None = None  # None: the graph was loaded from disk, or is one eager call
    times: ProgramTime | None = None
    made: Compiled | None = None

    def count(self, kind: str) -> int:
        return round(sum(r.count for r in self.rows if r.kind == kind))


@dataclass
class Overview:
    graphs: list[GraphReport]
    compiled: int
    found: int
    breaks: Counter[str]
    recompiled: Counter[str]
    phases: dict[str, float]
    cache: Counter[str]
    externs: Counter[str]  # operators without a lowering
    fallbacks: list[tuple[str, int, int]]
    speed: dict[str, float]  # bytes per second of a copy, by device

    @property
    def rows(self) -> list[Row]:
        return [r for g in self.graphs for r in g.rows]

    def moved(self) -> tuple[float, float, float]:
        """Total bytes and seconds of our kernels, and the seconds that copies of the same bytes would take."""
        ours = [r for r in self.rows if r.kind == "kernel" and r.bytes and r.seconds]
        return sum(r.bytes for r in ours), sum(r.seconds for r in ours), sum(r.limit for r in ours)


def overview_of(session: Session, times: Sequence[ProgramTime] | None = None) -> Overview:
    """Make an overview. `times`: from a profile, instead of the session's clocks."""
    ran = session.clocks.read() if times is None else times
    speed = {str(d): found for d in {t.plan.device for t in ran} if (found := copy_speed(d))}
    made, functions, done = {id(g.package): g for g in session.known()}, session.functions(), session.compilations()
    graphs = [graph_of(number, t, made.get(id(t.plan)), functions, speed.get(str(t.plan.device)))
              for number, t in enumerate(ran, 1) if t.calls]
    cache = session.cache()
    return Overview(
        graphs, len(session.graphs), cache["hit"],
        Counter(f"{b.why} ({place(b.function, b.file, b.line)})" for b in session.breaks()),
        Counter(f"{place(c.function, c.file, c.line)}: {c.why}" for c in done if c.why),
        phases(session.seconds(), session.regions, session.graphs), session.kernels(), session.externs(),
        session.fallbacks(), speed)


def place(function: str, file: str, line: int) -> str:
    if Path(file).name == "external_utils.py":  # torch's own wrapper around a module that is compiled as a whole
        return "the compiled module"
    whole = next((name for first, last, name in methods(file)
                  if first <= line <= last and name.endswith(f".{function}")), function)
    return f"{whole}, {Path(file).name}:{line}"


@cache
def methods(file: str) -> list[tuple[int, int, str]]:
    """The methods in a file: first and last line, and the name with that of the class. Dynamo only tells `forward`."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    return [(min(part.lineno for part in (f, *f.decorator_list)), f.end_lineno or f.lineno, f"{c.name}.{f.name}")
            for c in ast.walk(tree) if isinstance(c, ast.ClassDef)
            for f in c.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]


def graph_of(number: int, t: ProgramTime, made: Compiled | None, functions: Mapping[str, Compilation],
             speed: float | None) -> GraphReport:
    summary = program.summarise(made) if made is not None else None
    what = summary.direction if summary is not None else title([*map(t.plan.title, range(len(t.plan.kernels)))])
    if made is not None:
        whose = functions.get(str(made.function))
        what += f" of {place(whose.function, whose.file, whose.line)}" if whose else ""
    graph = GraphReport(number, what, t.plan.target, t.calls, t.seconds,
                  len(summary.operators) if summary is not None else 0, [], summary, t, made)
    rows: dict[str, Row] = {}
    for p in t.parts.values():
        called, step = p.part.title.removesuffix(".default").removesuffix(".out"), p.part.step
        name = t.plan.kernels[step.kernel].name if step is not None else called
        kind = "kernel" if step is not None else "rest" if p.part.where == REST else "call"
        row = rows.setdefault(called, Row(number, name, kind, called))
        row.count += p.count / max(t.calls, 1)
        row.seconds += p.seconds
        row.bytes += p.bytes
        row.text = t.plan.kernels[step.kernel].text if step is not None else ""
    for row in rows.values():
        row.limit = row.bytes / speed if speed and row.kind == "kernel" else 0.0
    for s in summary.steps if summary is not None else ():
        if (found := rows.get(s.title or s.name)) is None:
            continue
        found.kind = s.kind
        found.operators += s.operators
        if not found.reads:
            found.outer, found.inner, found.vector, found.reads, found.writes = \
                s.outer, s.inner, s.vector, s.reads, s.writes
    graph.rows = list(rows.values())
    return graph


# ---- on a terminal ---------------------------------------------------------------------------------------------


def plain(o: Overview) -> dict[str, Any]:
    """The overview as JSON data."""
    def graph(g: GraphReport) -> dict[str, Any]:
        own = replace(g, times=None, made=None)
        return dataclasses.asdict(own)

    return {f.name: getattr(o, f.name) for f in dataclasses.fields(o)} | {"graphs": [graph(g) for g in o.graphs]}


def show(console: Console, o: Overview, level: int, what: str = "") -> None:
    console.rule(f"[bold]flambeau {flambeau.__version__}[/], {what or f'FLAMBEAU_DEBUG={level}'}", align="left")
    table = Table(Column(no_wrap=True, style="bold"), Column(overflow="fold"), box=None, show_header=False)
    for name, text in lines(o, None if level > 1 else FEW):
        table.add_row(name, escape(text))
    console.print(table)
    if o.graphs:
        console.print(graphs_table(o.graphs))
    if level >= 2:
        console.print(rows_table(o.rows))
        for graph in o.graphs:
            show_kernels(console, graph, level)


def lines(o: Overview, limit: int | None) -> Iterator[tuple[str, str]]:
    """The lines of the overview: heading and text."""
    calls = sum(g.calls for g in o.graphs)
    yield "graphs", f"{o.compiled} compiled, {o.found} {FOUND}; {len(o.graphs)} ran, {calls:,} call{'s' * (calls != 1)}"
    for name, found in (("breaks", o.breaks), ("recompiled", o.recompiled)):
        listed = [f"{why}" + (f" ({n} times)" if n > 1 else "") for why, n in found.most_common(limit)]
        more = [f"... {len(found) - limit} more (FLAMBEAU_DEBUG=2)"] if limit and len(found) > limit else []
        yield name, "\n".join([f"{found.total()}" if found else "none", *listed, *more])
    kinds = Counter[str]()
    for r in o.rows:
        if r.kind != "rest":
            kinds[r.kind] += round(r.count)
    yield "steps", ", ".join(f"{n} {program.NAMES.get(kind, 'call(s)')}" for kind, n in kinds.items()) or "none"
    slow = [f"{op}{f' ({n} times)' * (n > 1)} is not compiled: ATen is called"
            for op, n in o.externs.most_common(limit)]
    slow += [f"{op} ran on the CPU: {n:,} calls, {size(moved)}" for op, n, moved in o.fallbacks[:limit]]
    yield "fallbacks", "\n".join(slow) or "none"
    spent = ", ".join(f"{phase} {s:.2f}" for phase, s in o.phases.items() if s >= 0.005)
    yield "compile", f"{sum(o.phases.values()):.2f} s" + (f": {spent}" if spent else "")
    yield "cache", f"{o.cache['read']} entries read, {o.cache['written']} written"
    moved, took, limit_s = o.moved()
    if took and limit_s:
        speeds = ", ".join(f"{device} {size(s)}/s" for device, s in o.speed.items())
        share = f"{min(limit_s / took, 1.0):.0%} of the limit{', data in cache' if limit_s > took else ''}"
        yield "memory", f"kernels moved {size(moved)} in {took * 1e3:,.2f} ms: {share} (speed of a copy: {speeds})"


def size(n: float) -> str:
    """A number of bytes as text, with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def graphs_table(graphs: Sequence[GraphReport]) -> Table:
    table = figures("graph", "what", "calls", "ms a call", "operators", "kernels", "library", "ATen", "other calls",
                    text=("graph", "what"))
    for g in graphs:
        each = ms(g.seconds / g.calls) if g.seconds else ""
        counts = (g.count(kind) for kind in ("kernel", "library", "ATen", "call"))
        table.add_row(str(g.number), escape(g.what), f"{g.calls:,}", each, str(g.operators or ""),
                      *(str(n or "") for n in counts))
    return table


def rows_table(rows: Sequence[Row]) -> Table:
    """Kernels by lost time, then calls by time."""
    table = figures("step", "ms", "share", "bytes", "of the limit", "ms lost", text=("step",))
    total = sum(r.seconds for r in rows) or 1.0
    for r in ranked(rows):
        called = f"{r.graph}.{r.name} " + (f"{r.title} " if r.kind == "kernel" else "")
        table.add_row(escape(called) + times(r), ms(r.seconds), f"{r.seconds / total:.1%}", size(r.bytes),
                      reached(r), "" if r.lost is None else ms(r.lost), style="cyan" if r.kind == "kernel" else None)
    return table


def ranked(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: (r.lost is None, -(r.lost or 0.0), -r.seconds))


def reached(r: Row) -> str:
    """The share of the limit that is reached. If a kernel is faster than the limit, its data was in a cache."""
    if not r.limit or not r.seconds:
        return ""
    return f"{r.limit / r.seconds:.0%}" if r.limit <= r.seconds else "in cache"


def times(r: Row) -> str:
    return f"x {r.count:.0f}" if r.count >= 1.5 else ""


def named(operators: Sequence[str]) -> str:
    """The operators with their counts: gelu, gelu_1 and gelu_2 become `gelu x 3`."""
    found = Counter(re.sub(r"_\d+$", "", o) for o in operators)
    return ", ".join(f"{o} x {n}" if n > 1 else o for o, n in found.items())


def figures(*columns: str, text: Sequence[str] = ()) -> Table:
    made = (Column(c, justify="left" if c in text else "right", overflow="fold") for c in columns)
    return Table(*made, box=box.SIMPLE_HEAD)


def show_kernels(console: Console, graph: GraphReport, level: int) -> None:
    console.print(f"[bold]graph {graph.number}[/], {escape(graph.what)}", soft_wrap=True)
    for r in graph.rows:
        if r.kind != "kernel":
            continue
        loops = ", ".join(f"{name} {found}" for name, found in
                          (("outer", r.outer), ("inner", r.inner), ("vector", r.vector)) if found)
        called = " ".join(filter(None, (r.title, times(r))))
        console.print(f"  [cyan]{r.name}[/] {escape(called)}: {escape(named(r.operators))}", soft_wrap=True)
        if loops:
            console.print(f"     loops {escape(loops)}; reads {' '.join(r.reads)}; writes {' '.join(r.writes)}",
                          soft_wrap=True)
        if level >= 3:
            console.print(r.text, markup=False, highlight=False, soft_wrap=True)
    console.print()
