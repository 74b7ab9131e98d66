"""Runs of the fuzzer in a results file, and the page that shows them.

    python -m fuzz --target cpu --count 1000 --results results/fuzz.json      # adds a run
    python -m fuzz.results results/fuzz.json other.json ...                   # adds the runs of other files
    python -m fuzz.results results/fuzz.json > docs/results/fuzzing.md
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from flambeau.results_file import machine, origin, read_results, write_results

from .run import TARGETS, Report

HEAD = """# Fuzzing

The fuzzer (`make fuzz`) draws random programs and compares each with eager. A *finding* is a bug in Flambeau: a
wrong value, missing or extra aliasing, other strides than eager's, another error, a crash or a hang. *Torch's own*
counts programs that `backend="aot_eager"` runs in the same way, or cannot run. Every run drew a new seed. `make docs`
writes this page from `results/fuzz.json`.

Up to commit `40212b223f` the float64 reference drew other random numbers than the program where an input had 16
elements or more, so those runs say little of rounded values; of exact values, bits, layout, aliasing, mutation and
errors they say what later ones do.
"""


def row(report: Report) -> dict[str, Any]:
    """The row of a results file for a run."""
    said = report.json()
    at = machine()
    return {**origin(), "date": at["date"], "version": at["torch"],
            **{k: said[k] for k in ("target", "seed", "programs", "torch")}, "seconds": round(report.seconds),
            "findings": {name: len(rows) for name, rows in said["groups"].items()}}


def add(report: Report, path: Path) -> None:
    rows = [*(read_results(path)["rows"] if path.exists() else ()), row(report)]
    write_results(path, "fuzz", rows, {t: programs(rows, t) for t in TARGETS})


def join(path: Path, others: list[Path]) -> None:
    """Adds the runs of other results files, such as those of another machine, to this one."""
    rows = [*read_results(path)["rows"], *(r for other in others for r in read_results(other)["rows"])]
    write_results(path, "fuzz", rows, {t: programs(rows, t) for t in TARGETS})


def programs(rows: list[dict[str, Any]], target: str) -> int:
    return sum(r["programs"] for r in rows if r["target"] == target)


def page(found: dict[str, Any]) -> str:
    lines = [HEAD, "| target | programs | runs | findings | torch's own | torch | commits |",
             "|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        rows = [r for r in found["rows"] if r["target"] == target]
        theirs = sum((Counter(r["torch"]) for r in rows), Counter[str]())
        commits = ", ".join(dict.fromkeys(f"`{r['commit']}`" for r in rows))
        ours = sum(sum(r["findings"].values()) for r in rows)
        versions = ", ".join(sorted({r["version"] for r in rows}))
        cells = (target, f"{programs(rows, target):,}", len(rows), ours, theirs.total(), versions, commits)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    kinds = sum((Counter(r["torch"]) for r in found["rows"]), Counter[str]())
    lines += ["", "| torch's own | programs |", "|---|---|", *(f"| {kind} | {n} |" for kind, n in kinds.most_common())]
    if any(r["findings"] for r in found["rows"]):
        lines += ["", "| finding | target | seed of the run |", "|---|---|---|"]
        lines += [f"| {name} | {r['target']} | {r['seed']} |" for r in found["rows"] for name in r["findings"]]
    return "\n".join(lines)


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    if len(given) > 1:
        join(given[0], given[1:])
    else:
        print(page(read_results(given[0])))
