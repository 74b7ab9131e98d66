"""Summary of the repeated regions of a graph: instances, why their neighbours differ, compile time by phase."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flambeau.compile.regions.cut import Piece, Pieces, difference
from flambeau.compile.regions.nodes import name_of
from flambeau.pipeline import Compiled
from flambeau.report.sheet import html_page

# Distinguishable for colour-blind readers, on white and on black.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
# Names of torch's clocks: all of Dynamo, the backend inside it, and AOTAutograd inside the backend.
CLOCKS = ("_compile.compile_inner", "OutputGraph.call_user_compiler", "create_aot_dispatcher_function")


@dataclass
class Stretch:
    """Consecutive pieces that call the same compiled function."""

    letter: str  # the name of the function: A, B, ...
    calls: int
    operators: int  # in each
    first: str
    last: str
    repeated: bool
    seconds: float  # for tracing and lowering, at the first call
    why: str = ""  # why it differs from the piece before it
    nodes: list[str] = field(default_factory=list)  # name and operator of each node in the first call


@dataclass
class Regions:
    """One captured graph."""

    nodes: int
    compiled: int  # distinct pieces
    called: int
    why: str  # why there are no regions
    search: float
    stretches: list[Stretch] = field(default_factory=list)

    def headline(self) -> str:
        if self.why:
            return f"{self.nodes} nodes, compiled as a whole: {self.why}"
        return f"{self.nodes} nodes in {self.called} pieces, of which {self.compiled} are compiled"


def letters(count: int) -> str:
    return chr(ord("A") + count) if count < 26 else f"A{count}"


def summarise(found: Pieces) -> Regions:
    keys = list(dict.fromkeys(p.key for p in found.pieces))
    out = Regions(len(found.gm.graph.nodes), len(keys), len(found.pieces), found.why, found.search)
    if found.why:
        return out
    before: Piece | None = None
    for p in found.pieces:
        if before is not None and p.key == before.key:
            out.stretches[-1].calls += 1
            continue
        why = difference(before, p) if before is not None else ""
        out.stretches.append(Stretch(
            letters(keys.index(p.key)), 1, len(p.nodes), p.nodes[0].name, p.nodes[-1].name, p.region is not None,
            found.seconds.get(p.key, 0.0), why, [f"{n.name} = {name_of(n)}" for n in p.nodes]))
        before = p
    return out


def phases(metrics: Mapping[str, Sequence[float]], found: Sequence[Pieces],
           graphs: Sequence[Compiled]) -> dict[str, float]:
    """Compile time by phase, from torch's clocks and ours."""
    dynamo, backend, aot = (sum(metrics.get(name, ())) for name in CLOCKS)
    own = {phase: sum(g.seconds.get(phase, 0.0) for g in graphs)
           for phase in ("lower", "schedule", "codegen", "wait for compiler")}
    # Some backwards are lowered at their first run, after AOTAutograd has finished.
    inside = sum(g.seconds.get(p, 0.0) for g in graphs for p in ("lower", "schedule", "codegen"))
    return {"Dynamo": max(dynamo - backend, 0.0), "search for regions": sum(f.search for f in found),
            "AOTAutograd": max(aot - inside, 0.0), **own}


# ---- HTML ----------------------------------------------------------------------------------------------------

STYLE = """.strip { display: flex; height: 2.2rem; border-radius: 4px; overflow: hidden; gap: 1px }
.strip span { flex: 1 1 0; min-width: 2px; color: #fff; text-align: center; line-height: 2.2rem; overflow: hidden }
.box { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem }
summary { cursor: pointer } pre { margin: .3rem 0 .3rem 1.2rem }
"""


def colour(s: Stretch, order: Sequence[str]) -> str:
    return COLOURS[order.index(s.letter) % len(COLOURS)] if s.repeated else "#888888"


def page(graphs: Sequence[Regions], seconds: Mapping[str, float]) -> str:
    body = [part for number, g in enumerate(graphs, 1) for part in section(number, g)]
    rows = "".join(f"<tr><td>{html.escape(phase)}</td><td class=n>{s:.2f}</td></tr>" for phase, s in seconds.items())
    body.append(f"<h2>Seconds</h2><table id=seconds>{rows}</table>")
    return html_page("Repeated regions", STYLE, body)


def section(number: int, g: Regions) -> Iterator[str]:
    yield f"<h2>Graph {number}</h2><p>{html.escape(g.headline())}</p>"
    if not g.stretches:
        return
    order = list(dict.fromkeys(s.letter for s in g.stretches if s.repeated))
    cells = [f'<span style="flex-grow:{s.operators};background:{colour(s, order)}" title="{html.escape(s.first)} to '
             f'{html.escape(s.last)}">{s.letter}</span>' for s in g.stretches for _ in range(s.calls)]
    yield f"<div class=strip>{''.join(cells)}</div>"
    yield ("<table><tr><th>piece</th><th>calls</th><th>operators</th><th>seconds</th><th>nodes</th>"
           "<th>why it differs from the piece before</th></tr>")
    for s in g.stretches:
        nodes = html.escape("\n".join(s.nodes))
        yield (f'<tr><td><span class=box style="background:{colour(s, order)}"></span>{s.letter}</td>'
               f"<td class=n>{s.calls}</td><td class=n>{s.operators}</td><td class=n>{s.seconds:.2f}</td>"
               f"<td><details><summary>{html.escape(s.first)} … {html.escape(s.last)}</summary><pre>{nodes}</pre>"
               f"</details></td><td>{html.escape(s.why)}</td></tr>")
    yield "</table>"
