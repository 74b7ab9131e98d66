"""The repeated regions of a captured graph: how many instances, why others are not joined, where the seconds went."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flambeau.compile.regions.cut import Piece, Pieces, difference
from flambeau.compile.regions.nodes import name_of
from flambeau.pipeline import Compiled

# Distinguishable with colour blindness, on white and on black.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
# Of torch's own clocks: Dynamo's whole work, the backend within it, AOTAutograd within that.
CLOCKS = ("_compile.compile_inner", "OutputGraph.call_user_compiler", "create_aot_dispatcher_function")


@dataclass
class Stretch:
    """Neighbouring pieces that are calls of one compiled function."""

    letter: str  # of the function: A, B, ...
    calls: int
    operators: int  # in each
    first: str
    last: str
    repeated: bool
    seconds: float  # of tracing and lowering, in the first of all calls
    why: str = ""  # why it is not what comes before it
    nodes: list[str] = field(default_factory=list)  # of the first call: name and operator


@dataclass
class Regions:
    """One captured graph."""

    nodes: int
    compiled: int  # distinct pieces
    called: int
    why: str  # there are none
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
    """Seconds by phase, from torch's clocks and ours."""
    dynamo, backend, aot = (sum(metrics.get(name, ())) for name in CLOCKS)
    own = {phase: sum(g.seconds.get(phase, 0.0) for g in graphs)
           for phase in ("lower", "schedule", "codegen", "wait for compiler")}
    # Some backwards are lowered at their first run, after AOTAutograd has finished.
    inside = sum(g.seconds.get(p, 0.0) for g in graphs for p in ("lower", "schedule", "codegen"))
    return {"Dynamo": max(dynamo - backend, 0.0), "search for regions": sum(f.search for f in found),
            "AOTAutograd": max(aot - inside, 0.0), **own}


# ---- HTML ----------------------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Repeated regions</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }}
:root {{ color-scheme: light dark }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ padding: .25rem .8rem; text-align: left }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums }} tr + tr td {{ border-top: 1px solid #8884 }}
.strip {{ display: flex; height: 2.2rem; border-radius: 4px; overflow: hidden; gap: 1px }}
.strip span {{ flex: 1 1 0; min-width: 2px; color: #fff; text-align: center; line-height: 2.2rem; overflow: hidden }}
.box {{ display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem }}
summary {{ cursor: pointer }} pre {{ margin: .3rem 0 .3rem 1.2rem }}
</style></head><body><h1>Repeated regions</h1>
{body}
</body></html>
"""


def colour(s: Stretch, order: Sequence[str]) -> str:
    return COLOURS[order.index(s.letter) % len(COLOURS)] if s.repeated else "#888888"


def page(graphs: Sequence[Regions], seconds: Mapping[str, float]) -> str:
    """A page that needs nothing but itself."""
    body = [part for number, g in enumerate(graphs, 1) for part in section(number, g)]
    rows = "".join(f"<tr><td>{html.escape(phase)}</td><td class=n>{s:.2f}</td></tr>" for phase, s in seconds.items())
    body.append(f"<h2>Seconds</h2><table id=seconds>{rows}</table>")
    return PAGE.format(body="\n".join(body))


def section(number: int, g: Regions) -> Iterator[str]:
    yield f"<h2>Graph {number}</h2><p>{html.escape(g.headline())}</p>"
    if not g.stretches:
        return
    order = list(dict.fromkeys(s.letter for s in g.stretches if s.repeated))
    cells = [f'<span style="flex-grow:{s.operators};background:{colour(s, order)}" title="{html.escape(s.first)} to '
             f'{html.escape(s.last)}">{s.letter}</span>' for s in g.stretches for _ in range(s.calls)]
    yield f"<div class=strip>{''.join(cells)}</div>"
    yield ("<table><tr><th>piece</th><th>calls</th><th>operators</th><th>seconds</th><th>nodes</th>"
           "<th>why it is not joined with what is before it</th></tr>")
    for s in g.stretches:
        nodes = html.escape("\n".join(s.nodes))
        yield (f'<tr><td><span class=box style="background:{colour(s, order)}"></span>{s.letter}</td>'
               f"<td class=n>{s.calls}</td><td class=n>{s.operators}</td><td class=n>{s.seconds:.2f}</td>"
               f"<td><details><summary>{html.escape(s.first)} … {html.escape(s.last)}</summary><pre>{nodes}</pre>"
               f"</details></td><td>{html.escape(s.why)}</td></tr>")
    yield "</table>"
