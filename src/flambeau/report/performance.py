"""docs/performance.md, written from the results files that `flambeau bench ... --json` left in results/.

python -m flambeau.report.performance results > docs/performance.md
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# Performance

Every figure below was measured beside its peers in one run, the backends taking turns, and is a median. Ratios are
our time over the peer's: below 1 we are faster. This page is written by `make docs` from the files in `results/`;
`flambeau bench models --json FILE` (also `ops`, `compile`) makes such a file on your machine.
"""


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values if v > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def cell(x: float | None, form: str = "{:.2f}") -> str:
    return "" if x is None else form.format(x)


def over(times: dict[str, float], peer: str) -> float | None:
    """Our time over the peer's."""
    return times["flambeau"] / times[peer] if "flambeau" in times and peer in times else None


def machine_line(m: dict[str, Any]) -> str:
    return (f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, {m['isa']}; torch {m['torch']}, "
            f"Python {m['python']}; {m['date'][:10]}.")


def steps(report: dict[str, Any]) -> str:
    """Models or operators: milliseconds and ratios, then the means of each group."""
    rows = report["rows"]
    lines = ["| case | eager ms | Inductor ms | Flambeau ms | over eager | over Inductor |",
             "|---|---|---|---|---|---|"]
    groups: dict[str, list[dict[str, float]]] = {}
    for r in rows:
        t = r["seconds"]
        groups.setdefault(r["group"], []).append(t)
        ms = [cell(t[b] * 1e3 if b in t else None) for b in ("eager", "inductor", "flambeau")]
        lines.append(f"| {r['name']} {r['mode']} | {' | '.join(ms)} | {cell(over(t, 'eager'))} | "
                     f"{cell(over(t, 'inductor'))} |")
    for name, times in {**groups, "all": [t for g in groups.values() for t in g]}.items():
        means = [cell(geometric_mean(r for t in times if (r := over(t, peer)) is not None))
                 for peer in ("eager", "inductor")]
        bold = [f"**{m}**" if m else "" for m in means]
        lines.append(f"| **geometric mean, {name}** | | | | {bold[0]} | {bold[1]} |")
    return "\n".join(lines)


def compile_seconds(report: dict[str, Any]) -> str:
    lines = ["| model | state | Inductor s | Flambeau s | ratio |", "|---|---|---|---|---|"]
    ratios: dict[str, list[float]] = {}
    for r in report["rows"]:
        states = dict.fromkeys(s for b in r["seconds"].values() for s in b)
        for state in states:
            t = {b: s[state] for b, s in r["seconds"].items() if state in s}
            ratio = over(t, "inductor")
            if ratio is not None:
                ratios.setdefault(state, []).append(ratio)
            lines.append(f"| {r['name']} | {state} | {cell(t.get('inductor'))} | {cell(t.get('flambeau'))} | "
                         f"{cell(ratio)} |")
    lines += [f"| **geometric mean** | {state} | | | **{cell(geometric_mean(r))}** |" for state, r in ratios.items()]
    return "\n".join(lines)


SECTIONS = {
    "models": ("Steps of the model suite", steps),
    "compile": ("Compile time, first training step", compile_seconds),
    "ops": ("Operators", steps),
}


def page(folder: Path) -> str:
    out = [HEAD]
    reports = [json.loads(f.read_text()) for f in sorted(folder.glob("*.json"))]
    for kind, (title, table) in SECTIONS.items():
        for report in (r for r in reports if r["kind"] == kind):
            out.append(f"## {title}\n\n{machine_line(report['machine'])}\n\n{table(report)}\n")
    return "\n".join(out)


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
