"""docs/performance.md and its chart, written from the files that `flambeau bench ... --json` left in results/.

    python -m flambeau.report.performance results docs
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flambeau.report.chart import Series, ratio_chart
from flambeau.results_file import read_results

PAGE, CHART, COMPILE_CHART = "performance.md", "performance-cuda.svg", "compile-time.svg"
HEAD = """# Performance

Every figure below was measured beside its peers in one run, the backends taking turns, and is a median. Ratios are
our time over the peer's: below 1 we are faster. This page is written by `make docs` from the files in `results/`;
`flambeau bench models --json FILE` (also `ops`, `compile`, `compiled`, `numerics`) makes such a file on your machine.
"""
FLOORS = """Times as multiples of the floor: the time that the bytes of a case take at the bandwidth of a device copy,
each input read once and each output written once. Medians by CUDA events, the second-level cache flushed before each
call; the fastest of a row is bold. FlagGems has a figure where it has the operator and was installed."""
SMALL = """Of calls of less than 64K elements, a hundred in a row, the host's work included: what a gate costs that lets
them pass. As multiples of the floor."""
SAMPLES = """every sample of every entry in `op_db`, forward and gradient, at torch's own
tolerances; where the two differ in rounding alone, float64 is the judge."""
SERIES = (Series("eager", "eager", "#8c959f", "circle"), Series("inductor", "Inductor", "#0969da", "square"),
          Series("flaggems", "FlagGems", "#1a7f37", "diamond"), Series("flambeau", "Flambeau", "#f08c2e", "bar"),
          Series("accelerate", "eager, accelerated", "#bf3989", "bar"))


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values if v > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def cell(x: float | None, form: str = "{:.2f}") -> str:
    return "" if x is None else form.format(x)


def over(times: dict[str, float], peer: str, ours: str = "flambeau") -> float | None:
    """Our time over the peer's."""
    return times[ours] / times[peer] if ours in times and peer in times else None


def machine_line(m: dict[str, Any]) -> str:
    gpu = f"{m['gpu']}, CUDA {m['cuda']}, Triton {m['triton']}; " if "gpu" in m else ""
    return (f"{gpu}{m['cpu']}, {m['cores']} cores, {m['threads']} threads, {m['isa']}; torch {m['torch']}, "
            f"Python {m['python']}; {m['date'][:10]}.")


def origin_line(report: dict[str, Any]) -> str:
    return f"`{report['command']}` at {report['commit']}."


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


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Each backend's time over the floor; those with wrong results are left out, as are those without a time."""
    return {b: s / row["floor"] for b, s in row["seconds"].items() if b not in row["errors"]}


def floors(report: dict[str, Any]) -> str:
    """Multiples of the floor, then their means over the cases that a backend has."""
    summary = report["summary"]
    series = series_of(report)
    keys = [s.key for s in series]
    layout = ", inputs transposed or channels last" if summary.get("strided") else ""
    copy = f"device copy {summary['bandwidth'] / 1e12:.2f} TB/s"
    lines = [f"{summary['dtype']}, {summary['sizes']} sizes{layout}; {copy}.", ""]
    if has_chart(report):
        lines += [f"![Times over the memory floor]({CHART})", ""]
    head = ["case", "floor ms", *(s.label for s in series)]
    lines += [SMALL if summary["sizes"] == "small" else FLOORS, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in report["rows"]:
        found = ratios(row)
        best = min(found.values(), default=None)
        cells = [f"**{found[k]:.2f}**" if k in found and found[k] == best else cell(found.get(k)) for k in keys]
        lines.append(f"| {case_name(row)} | {row['floor'] * 1e3:.3f} | {' | '.join(cells)} |")
    for label, kept in (("all", report["rows"]),
                        ("without grid_sampler", [r for r in report["rows"] if r["group"] != "sampling"])):
        means = [cell(geometric_mean(found[k] for r in kept if k in (found := ratios(r)))) for k in keys]
        lines.append(f"| **geometric mean, {label}** | | {' | '.join(means)} |")
    return "\n".join(lines)


def series_of(report: dict[str, Any]) -> list[Series]:
    return [s for s in SERIES if any(s.key in ratios(row) for row in report["rows"])]


def case_name(row: dict[str, Any]) -> str:
    return row["name"] if row["mode"] == "forward" else f"{row['name']}, {row['mode']}"


def has_chart(report: dict[str, Any]) -> bool:
    """Of the variants of the table one has a chart."""
    summary = report["summary"]
    return (report.get("kind") == "floors" and "gpu" in report["machine"] and summary["dtype"] == "float32"
            and summary["sizes"] == "full" and not summary.get("strided") and any(map(ratios, report["rows"])))


def chart(reports: Iterable[dict[str, Any]]) -> str | None:
    for report in filter(has_chart, reports):
        lines = [(case_name(row), found) for row in report["rows"] if (found := ratios(row))]
        return ratio_chart(f"Time over the memory floor, {report['machine']['gpu']}", lines, series_of(report))
    return None


def compile_chart(reports: Iterable[dict[str, Any]]) -> str | None:
    """Seconds to the first training step from empty caches, beside Inductor, on a GPU."""
    for report in reports:
        if report.get("kind") == "compile" and "gpu" in report["machine"]:
            lines = [(r["name"], {b: t["cold"] for b, t in r["seconds"].items() if "cold" in t})
                     for r in report["rows"]]
            shown = [s for s in SERIES if s.key in ("inductor", "flambeau")]
            return ratio_chart(f"Seconds to the first training step, {report['machine']['gpu']}",
                               sorted(lines), shown, unit=" s")
    return None


def optimizer_steps(report: dict[str, Any]) -> str:
    names = ("foreach", "fused", "flambeau", "accelerate")
    lines = ["| optimizer | floor ms | foreach ms | fused ms | Flambeau ms | accelerated ms | over floor | host ms | "
             "first call s |", "|---" * 9 + "|"]
    for r in report["rows"]:
        t = r["seconds"]
        cells = [cell(t[b] * 1e3 if b in t else None, "{:.3f}") for b in names]
        host, first = (r[k].get("flambeau") for k in ("host", "first"))
        lines.append(f"| {r['name']} | {r['floor'] * 1e3:.3f} | {' | '.join(cells)} | "
                     f"{cell(t['flambeau'] / r['floor'] if 'flambeau' in t else None)} | "
                     f"{cell(host and host * 1e3)} | {cell(first)} |")
    return "\n".join(lines)


def device_streams(report: dict[str, Any]) -> str:
    """Share of a copy's bandwidth; beside PyTorch's CPU device where the device is one."""
    beside = any("cpu" in r["seconds"] for r in report["rows"])
    head = f"| operator | GB/s | of a copy |{' over the CPU device |' if beside else ''}"
    summary = report["summary"]
    lines = [f"{summary['device']}, through OpenCL; matrices of {summary['side']} by {summary['side']}.", "",
             head, "|---" * (3 + beside) + "|"]
    for r in report["rows"]:
        ours = r["seconds"].get("flambeau")
        if ours is not None:
            peer = f" {cell(ours / r['seconds']['cpu'])} |" if beside else ""
            lines.append(f"| {r['name']} | {r['bytes'] / ours / 1e9:.0f} | {r['floor'] / ours:.0%} |{peer}")
    return "\n".join(lines)


def device_steps(report: dict[str, Any]) -> str:
    """Training steps and a product on the device, beside PyTorch's CPU device."""
    summary = report["summary"]
    what = f"{summary['device']}, through OpenCL, in eager mode; {summary['size']} models: forward, backward, AdamW."
    lines = [what, "", "| case | CPU device ms | device ms | ratio |", "|---|---|---|---|"]
    for r in report["rows"]:
        t = r["seconds"]
        ms = [cell(t[b] * 1e3 if b in t else None) for b in ("cpu", "flambeau")]
        lines.append(f"| {r['name']} {r['mode']} | {' | '.join(ms)} | {cell(over(t, 'cpu'))} |")
    return "\n".join(lines)


def compiled_steps(report: dict[str, Any]) -> str:
    """Whole models: time and memory, with and without repeated regions, and recorded; and tensors with other bits."""
    kinds = {"eager": "eager", "inductor": "Inductor", "ours": "Flambeau", "whole": "without regions",
             "reduce": "Inductor, recorded", "graphs": "Flambeau, recorded"}
    peaks = {k: kinds[k] for k in ("eager", "inductor", "ours")}
    heads = ["model", "step", *(f"{v} ms" for v in kinds.values()), *(f"{v} MiB" for v in peaks.values()),
             "unequal without regions", "unequal from run to run"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in report["rows"]:
        cells = [*(cell(r["ms"].get(k)) for k in kinds), *(cell(r["peak_mib"].get(k), "{:.0f}") for k in peaks),
                 *(cell(r[f"unequal_{k}"], "{}") for k in ("with_regions", "from_run_to_run"))]
        lines.append(f"| {r['name']} | {r['mode']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bits(report: dict[str, Any]) -> str:
    """`numerics="eager"` beside eager, value by value; and how long it takes."""
    lines = ["| what | cases | values | unequal |", "|---|---|---|---|"]
    for r in (r for r in report["rows"] if r["cases"]):
        note = f" ({n} where eager does not repeat itself)" if (n := r.get("unsteady")) else ""
        lines.append(f"| {r['name']}{note} | {r['cases']} | {r['values']:,} | {r['unequal']:,} |")
    if not report["summary"]["ms"]:
        return "\n".join(lines)
    modes = {"exact": "eager's bits", "fast": "fast", "exact graphs": "eager's bits, recorded",
             "fast graphs": "fast, recorded"}
    lines += ["", f"| training step, over eager's | {' | '.join(modes.values())} | error of fast over eager's |",
              "|---" * (len(modes) + 2) + "|"]
    for name, t in report["summary"]["ms"].items():
        error = cell(report["summary"]["error"].get(name), "{:.3f}")
        lines.append(f"| {name} | {' | '.join(cell(over(t, 'eager', k)) for k in modes)} | {error} |")
    return "\n".join(lines)


def database(report: dict[str, Any]) -> str:
    """Entries of `op_db` by dtype: how many agree, and on the device how many of these without the CPU's help."""
    device = report["machine"].get("device")
    what = (f"{device}, through OpenCL, in eager mode, beside the results and errors of PyTorch's CPU device" if device
            else "Compiled, where AOTAutograd takes the sample, beside eager")
    heads = ["dtype", "entries", "agree", *(["without fallback"] if device else []), "samples", "gradients"]
    lines = [f"{what}: {SAMPLES}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for dtype, n in report["summary"].items():
        native = f" {n['native']} |" if device else ""
        lines.append(f"| {dtype} | {n['entries']} | {n['passed']} |{native} {n['samples']:,} | {n['gradients']:,} |")
    lines += ["", "Not counted as agreeing:", ""] if report["rows"] else []
    lines += [f"- `{r['name']}`, {r['dtype']}: {r['reason']}" for r in report["rows"]]
    return "\n".join(lines)


SECTIONS = {
    "models": ("Steps of the model suite", steps),
    "compiled": ("Whole models, in pieces and recorded", compiled_steps),
    "compile": ("Compile time, first training step", compile_seconds),
    "ops": ("Operators", steps),
    "floors": ("Operators beside the memory limit", floors),
    "optimizers": ("Steps of optimizers", optimizer_steps),
    "numerics": ("Eager's bits", bits),
    "opinfo": ("PyTorch's operator database", database),
    "device": ("The device", device_streams),
    "device-steps": ("Steps on the device", device_steps),
}


def read(folder: Path) -> list[dict[str, Any]]:
    return [read_results(f) for f in sorted(folder.glob("*.json"))]


def page(reports: list[dict[str, Any]]) -> str:
    out = [HEAD]
    for kind, (title, table) in SECTIONS.items():
        for report in (r for r in reports if r.get("kind") == kind):
            where = " (CUDA)" if "gpu" in report["machine"] else ""
            origin = f"{machine_line(report['machine'])} {origin_line(report)}"
            out.append(f"## {title}{where}\n\n{origin}\n\n{table(report)}\n")
    return "\n".join(out)


def write(results: Path, docs: Path) -> None:
    reports = read(results)
    (docs / PAGE).write_text(page(reports))
    if (picture := chart(reports)) is not None:
        (docs / CHART).write_text(picture)
    if (picture := compile_chart(reports)) is not None:
        (docs / COMPILE_CHART).write_text(picture)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
