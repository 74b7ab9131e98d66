"""Writes the pages and charts in docs/results, from the files of `flambeau bench ... --json` in results/.

    python -m flambeau.report.performance results docs/results
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flambeau.bench.cliffs import WORST, CliffRow, limits
from flambeau.bench.floors import OURS, PEERS, REFERENCE
from flambeau.bench.harness import NOISY, comparisons, geometric_mean
from flambeau.report.chart import Line, Series, ratio_chart
from flambeau.report.sheet import Parts, Sheet, markdown
from flambeau.results_file import read_results

CHARTS = ("performance-cuda.svg", "compile-time.svg", "models-cuda.svg")
# Pages: title, and the kinds of results on the page.
PAGES = {"performance.md": ("Performance", ("models", "compiled", "compile", "optimizers", "numerics", "overlap",
                                                   "offload", "device-steps")),
         "operators.md": ("Operators", ("floors", "cliffs", "contractions", "opinfo")),
         "operators-cpu.md": ("Operators on CPUs", ("ops", "device")),
         "packages.md": ("Packages", ("packages", "package-results", "package"))}
HEAD = """# {}

All times are medians. The backends of a table were measured in one run, taking turns. "A over B" is the time of A
divided by the time of B: below 1, A is faster. `~` marks a time that varied by more than a quarter, `!` a time with
wrong results.

`make docs` writes this page from the files in `results/`. Each section names the machine, the command and the commit.
To measure on your own machine, run the same command, for example `flambeau bench models --json FILE`.
"""
FLOORS = """Times are multiples of the floor: the time that the bytes of a case take at the bandwidth of a device copy,
if each input is read once and each output is written once. They were measured with CUDA events; the second-level cache
was flushed before each call. The fastest backend of a row is bold. FlagGems is shown where it has the operator and was
installed."""
SMALL = """Calls on less than 64K elements, a hundred in a row, including the work of the host. This shows what it costs
to check a call and leave it to PyTorch. Times are multiples of the floor."""
SAMPLES = """every sample of every entry in `op_db`, forward and
gradient, with torch's own tolerances. If two results differ only by rounding, they are compared with float64."""
SERIES = (Series("eager", "eager", "#8c959f", "circle"), Series("inductor", "Inductor", "#0969da", "square"),
          Series("flaggems", "FlagGems", "#1a7f37", "diamond"), Series("flambeau", "Flambeau", "#f08c2e", "bar"),
          Series("accelerate", "eager, accelerated", "#bf3989", "bar"))
LABELS = {s.key: s.label for s in SERIES}
PAIR = [s for s in SERIES if s.key in ("inductor", "flambeau")]
ERRORS = """Errors are against float64, as multiples of eager's error. The gradient of a ReLU jumps where its input is
zero: if rounding moves an input to the other side in one backend alone, the multiple is in the thousands, and says
nothing about precision."""


def cell(x: float | None, form: str = "{:.2f}") -> str:
    return "" if x is None or x != x else form.format(x)


def over(times: dict[str, float], peer: str, ours: str = "flambeau") -> float | None:
    """Our time divided by the peer's."""
    return times[ours] / times[peer] if ours in times and peer in times else None


def label(backend: str) -> str:
    return LABELS.get(backend, backend)


def machine_line(m: dict[str, Any]) -> str:
    gpu = f"{m['gpu']}, CUDA {m['cuda']}, Triton {m['triton']}; " if "gpu" in m else ""
    return (f"{gpu}{m['cpu']}, {m['cores']} cores, {m['threads']} threads, {m['isa']}; torch {m['torch']}, "
            f"Python {m['python']}; {m['date'][:10]}.")


def backends_of(report: dict[str, Any]) -> list[str]:
    """The backends that have a time in some row, or failed in all rows."""
    return list(dict.fromkeys(b for key in ("seconds", "errors") for r in report["rows"] for b in r.get(key, ())))


def milliseconds(row: dict[str, Any], backend: str, scale: float = 1e3) -> str:
    """`~` marks a time that varied: the machine was busy with something else."""
    if backend not in row["seconds"]:
        return "failed" if backend in row.get("errors", ()) else ""
    noisy = row.get("spread", {}).get(backend, 0.0) > NOISY
    return f"{'~' * noisy}{row['seconds'][backend] * scale:.2f}"


def steps(report: dict[str, Any]) -> Parts:
    """Models or operators: milliseconds and ratios, then the means of each group."""
    rows, backends = report["rows"], backends_of(report)
    pairs = comparisons(backends)
    checked = [b for b in backends if any(b in r.get("accuracy", ()) for r in rows)]
    sheet = Sheet(["case", *(f"{label(b)} ms" for b in backends), *(f"{label(a)} over {label(b)}" for a, b in pairs),
                   *(f"error of {label(b)}" for b in checked)])
    for r in rows:
        errors = [statistics.median(draw["eager_errors"] for draw in r["accuracy"][b]) if b in r.get("accuracy", ())
                  else None for b in checked]
        sheet.add(f"{r['name']} {r['mode']}", *(milliseconds(r, b) for b in backends),
                  *(cell(over(r["seconds"], base, b)) for b, base in pairs), *(cell(e, "{:.1f}") for e in errors))
    for name in (*dict.fromkeys(r["group"] for r in rows), "all"):
        times = [r["seconds"] for r in rows if name in (r["group"], "all")]
        means = [geometric_mean([x for t in times if (x := over(t, base, b)) is not None]) for b, base in pairs]
        sheet.mean(f"geometric mean, {name}", *("" for _ in backends), *map(cell, means))
    return [sheet, *([ERRORS] if checked else [])]


def compile_seconds(report: dict[str, Any]) -> Parts:
    rows, backends = report["rows"], backends_of(report)
    ours = [(b, peer) for b, peer in comparisons(backends) if peer != "eager"]
    sheet = Sheet(["model", "state", *(f"{label(b)} s" for b in backends),
                   *(f"{label(a)} over {label(b)}" for a, b in ours)])
    found: dict[str, list[dict[str, float]]] = {}
    for r in rows:
        for state in dict.fromkeys(s for b in r["seconds"].values() for s in b):
            t = {b: s[state] for b, s in r["seconds"].items() if state in s}
            found.setdefault(state, []).append(t)
            sheet.add(r["name"], state, *(cell(t[b]) if b in t else "failed" for b in backends),
                      *(cell(over(t, peer, b)) for b, peer in ours))
    for state, times in found.items():
        # No sum if a model failed: it would look faster.
        sums = [sum(t[b] for t in times) if all(b in t for t in times) else None for b in backends]
        means = [geometric_mean([x for t in times if (x := over(t, peer, b)) is not None]) for b, peer in ours]
        sheet.mean("sum, geometric mean", state, *map(cell, sums), *map(cell, means))
    return [sheet]


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Each backend's time divided by the floor, without backends that failed or gave wrong results."""
    return {b: s / row["floor"] for b, s in row["seconds"].items() if b not in row["errors"]}


def floors(report: dict[str, Any]) -> Parts:
    """Multiples of the floor, then their means over the cases that a backend ran."""
    summary, backends = report["summary"], backends_of(report)
    ours = [b for b in backends if b.startswith(OURS)]
    layout = ", inputs transposed or channels last" if summary.get("strided") else ""
    copy = f"device copy {summary['bandwidth'] / 1e12:.2f} TB/s"
    parts: Parts = [f"{summary['dtype']}, {summary['sizes']} sizes{layout}; {copy}."]
    sheet = Sheet(["case", "floor ms", *map(label, backends), *(f"{label(b)} over best peer" for b in ours),
                   *(f"{label(b)} at {REFERENCE / 1e12} TB/s" for b in ours)])
    for row in report["rows"]:
        found = ratios(row)
        best = min(found.values(), default=None)
        peers = [t for b, t in row["seconds"].items() if b in PEERS]
        cells = [f"**{found[b]:.2f}**" if b in found and found[b] == best
                 else f"!{row['seconds'][b] / row['floor']:.2f}" if b in row["seconds"] and b not in found
                 else "failed" if b in row["errors"] else cell(found.get(b)) for b in backends]
        sheet.add(case_name(row), f"{row['floor'] * 1e3:.3f}", *cells,
                  *(cell(row["seconds"][b] / min(peers) if b in row["seconds"] and peers else None) for b in ours),
                  *(cell(found[b] * REFERENCE / summary["bandwidth"] if b in found else None) for b in ours))
    for name, kept in (("all", report["rows"]),
                       ("without grid_sampler", [r for r in report["rows"] if r["group"] != "sampling"])):
        means = [geometric_mean([found[b] for r in kept if b in (found := ratios(r))]) for b in backends]
        sheet.mean(f"geometric mean, {name}", "", *map(cell, means))
    return [*parts, SMALL if summary["sizes"] == "small" else FLOORS, sheet]


def series_of(report: dict[str, Any]) -> list[Series]:
    return [s for s in SERIES if any(s.key in ratios(row) for row in report["rows"])]


def case_name(row: dict[str, Any]) -> str:
    return row["name"] if row["mode"] == "forward" else f"{row['name']}, {row['mode']}"


def chart(report: dict[str, Any]) -> tuple[str, str, str] | None:
    """File, title and SVG of the chart of a report, if it has one. Only measurements on a GPU have charts."""
    kind, machine, rows = report.get("kind"), report.get("machine", {}), report.get("rows", [])
    if "gpu" not in machine:
        return None
    lines: list[Line] = []
    if kind == "floors" and plain_floors(report["summary"]):
        file, title, unit, shown = CHARTS[0], "Time as a multiple of the memory floor", "×", series_of(report)
        lines = [(case_name(row), found) for row in rows if (found := ratios(row))]
    elif kind == "compile":
        file, title, unit, shown = CHARTS[1], "Seconds until the first training step", " s", PAIR
        lines = sorted((r["name"], {b: t["cold"] for b, t in r["seconds"].items() if "cold" in t}) for r in rows)
    elif kind == "models":
        file, title, unit, shown = CHARTS[2], "Step time as a multiple of eager's", "×", PAIR
        lines = [(case_name(r), {b: t / r["seconds"]["eager"] for b, t in r["seconds"].items() if b != "eager"})
                 for r in rows if "eager" in r["seconds"]]
    return (file, title, ratio_chart(f"{title}, {machine['gpu']}", lines, shown, unit)) if lines else None


def plain_floors(summary: dict[str, Any]) -> bool:
    return summary["dtype"] == "float32" and summary["sizes"] == "full" and not summary.get("strided")


def optimizer_steps(report: dict[str, Any]) -> Parts:
    backends = backends_of(report)
    sheet = Sheet(["optimizer", "floor ms", *(f"{label(b)} ms" for b in backends), "over floor", "host ms",
                   "first call s"])
    for r in report["rows"]:
        ours, host, first = (r[key].get("flambeau") for key in ("seconds", "host", "first"))
        times = (r["seconds"].get(b) for b in backends)
        sheet.add(r["name"], f"{r['floor'] * 1e3:.3f}", *(cell(t and t * 1e3, "{:.3f}") for t in times),
                  cell(ours and ours / r["floor"]), cell(host and host * 1e3), cell(first))
    return [sheet]


def device_streams(report: dict[str, Any]) -> Parts:
    """Share of a copy's bandwidth, and the ratio to PyTorch's CPU device if the device is a CPU."""
    summary = report["summary"]
    sheet = Sheet(["operator", "GB/s", "of a copy", "over the CPU device"])
    for r in report["rows"]:
        ours = r["seconds"].get("flambeau")
        share = [f"{r['bytes'] / ours / 1e9:.0f}", f"{r['floor'] / ours:.0%}"] if ours else ["failed", ""]
        sheet.add(r["name"], *share, cell(over(r["seconds"], "cpu")))
    return [f"{summary['device']}, through OpenCL; matrices of {summary['side']} by {summary['side']}.", sheet]


def device_steps(report: dict[str, Any]) -> Parts:
    """Training steps and a matrix product on the device, beside PyTorch's CPU device."""
    summary, sheet = report["summary"], Sheet(["case", "CPU device ms", "device ms", "ratio"])
    for r in report["rows"]:
        sheet.add(f"{r['name']} {r['mode']}", milliseconds(r, "cpu"), milliseconds(r, "flambeau"),
                  cell(over(r["seconds"], "cpu")))
    return [f"{summary['device']}, through OpenCL, in eager mode; {summary['size']} models: forward, backward, AdamW.",
            sheet]


def compiled_steps(report: dict[str, Any]) -> Parts:
    """Large models: time and memory with and without regions and CUDA graphs; number of tensors with other bits."""
    kinds = {"eager": "eager", "inductor": "Inductor", "ours": "Flambeau", "whole": "without regions",
             "reduce": "Inductor, CUDA graphs", "graphs": "Flambeau, CUDA graphs"}
    some = ("eager", "inductor", "ours")
    shown = {  # field of a row: (backend, backend to divide by or "")
        "ms": [*((k, "") for k in kinds), ("ours", "whole"), ("ours", "inductor"), ("graphs", "reduce")],
        "peak_mib": [*((k, "") for k in some), ("ours", "eager"), ("ours", "inductor")],
        "first_s": [("ours", ""), ("inductor", "")]}
    units = {"ms": ("ms", "{:.2f}"), "peak_mib": ("MiB", "{:.0f}"), "first_s": ("first s", "{:.2f}")}
    sheet = Sheet(["model", "step", *(f"{kinds[a]} over {kinds[b]}{', MiB' if key == 'peak_mib' else ''}" if b else
                                      f"{kinds[a]} {units[key][0]}" for key, pairs in shown.items() for a, b in pairs),
                   "unequal without regions", "unequal from run to run"])
    for r in report["rows"]:
        numbers = [cell(over(r[key], b, a), "{:.3f}") if b else cell(r[key].get(a), units[key][1])
                   for key, pairs in shown.items() for a, b in pairs]
        sheet.add(r["name"], r["mode"], *numbers,
                  *(cell(r[f"unequal_{k}"], "{}") for k in ("with_regions", "from_run_to_run")))
    return [sheet]


def bits(report: dict[str, Any]) -> Parts:
    """`numerics="eager"` compared with eager, value by value; and step times."""
    sheet = Sheet(["what", "cases", "values", "unequal", "not repeatable in eager", "errors"])
    for r in report["rows"]:
        sheet.add(r["name"], *(f"{n:,}" for n in (r["cases"], r["values"], r["unequal"])),
                  *(f"{n:,}" if n else "" for n in (r.get("unsteady"), len(r.get("errors", ())))))
    modes = {"exact": "numerics=eager", "fast": "fast", "exact graphs": "numerics=eager, CUDA graphs",
             "fast graphs": "fast, CUDA graphs"}
    times = Sheet(["training step, over eager's", *modes.values(), "error of fast over eager's"])
    for name, t in report["summary"]["ms"].items():
        times.add(name, *(cell(over(t, "eager", k)) for k in modes),
                  cell(report["summary"]["error"].get(name), "{:.3f}"))
    return [sheet, *(f"- {text}"[:160] for r in report["rows"] for text in r.get("differ", ())),
            *([times] if times.rows else [])]


LEFT_OUT = {"short": "that take less than 20 microseconds", "without a time": "without a time"}


def random_cases(report: dict[str, Any]) -> Parts:
    """The worst cases and what limits them, then the distribution."""
    summary, backends = report["summary"], backends_of(report)
    timed = sorted(((ratio, row) for row in (CliffRow(**r) for r in report["rows"])
                    if not row.short() and (ratio := row.ratio()) is not None), key=lambda found: -found[0])
    sheet = Sheet(["case", *(f"{label(b)} ms" for b in backends), "over the faster peer", "limits"])
    for ratio, row in timed[:WORST]:
        sheet.add(f"{row.seed} {row.name}",
                  *(f"{row.seconds[b] * 1e3:.3f}" if b in row.seconds else "failed" for b in backends),
                  cell(ratio), limits(row, summary["bandwidth"]))
    blank = [""] * len(backends)
    sheet.mean("geometric mean", *blank, cell(summary["mean"], "{:.3f}"))
    for bound, share in summary["within"].items():
        sheet.mean(f"within {bound} × the faster peer", *blank, f"{share:.1%}")
    left_out = "; ".join(f"{summary[key]} {what}" for key, what in LEFT_OUT.items() if summary.get(key))
    told = f" Not counted: {left_out}." if left_out else ""
    return [f"The worst {min(WORST, len(timed))} of {len(timed)}.{told}", sheet]


def database(report: dict[str, Any]) -> Parts:
    """Entries of `op_db` by dtype: how many agree and, on the device, how many of these do not need the CPU."""
    device = report["machine"].get("device")
    what = (f"{device}, through OpenCL, in eager mode, compared with PyTorch's CPU device" if device
            else "Compiled, if AOTAutograd can trace the sample, compared with eager")
    sheet = Sheet(["dtype", "entries", "agree", "without fallback", "samples", "gradients"])
    for dtype, n in report["summary"].items():
        sheet.add(dtype, str(n["entries"]), str(n["passed"]), str(n["native"]) if device else "", f"{n['samples']:,}",
                  f"{n['gradients']:,}")
    reasons = [f"- `{r['name']}`, {r['dtype']}: {r['reason']}" for r in report["rows"]]
    return [f"{what}: {SAMPLES}", sheet, *(["Not counted as agreeing:", "\n".join(reasons)] if reasons else [])]


def contractions(report: dict[str, Any]) -> Parts:
    timed = [row for row in report["rows"] if "seconds" in row]
    backends = list(dict.fromkeys(b for row in timed for b in row["seconds"]))
    sheet = Sheet(["case", *(f"{b}, us" for b in backends), "best peer over Flambeau"])
    for row in timed:
        took = row["seconds"]
        peers = [t for b, t in took.items() if b not in ("flambeau", "own")]
        ratio = f"{min(peers) / took['flambeau']:.2f}" if peers and "flambeau" in took else ""
        sheet.add(f"{row['group']}: {row['name']}", *(f"{1e6 * took[b]:.1f}" if b in took else "" for b in backends),
                  ratio)
    return [sheet, *(f"{name}: {text}" for name, text in report["summary"].items())]


def packages(report: dict[str, Any]) -> Parts:
    """Steps, calls and load times of packages, beside other ways to ship a model."""
    peers = [b for b in backends_of(report) if b != "package"]
    names = {"flambeau": "torch.compile", "aotinductor": "AOTInductor", "onnxruntime": "ONNX Runtime"}
    parts: Parts = []
    compared = Sheet(["results in a process without a compiler", "draws", "results", "with other bits",
                      "error over eager's", "load ms"])
    for r in (r for r in report["rows"] if r["group"] == "bits"):
        draws = r["accuracy"].get("package", [])
        total = {key: sum(d[key] for d in draws) for key in ("results", "unequal")}
        compared.add(r["name"], str(len(draws)), *(f"{n:,.0f}" for n in total.values()),
                     cell(max((d["eager_errors"] for d in draws), default=None)), milliseconds(r, "load"))
    parts += [compared] if compared.rows else []
    for group, unit, scale in (("step", "ms", 1e3), ("call", "µs", 1e6), ("load", "s", 1.0)):
        rows = [r for r in report["rows"] if r["group"] == group]
        sheet = Sheet(["case", f"package {unit}", *(f"{names.get(b, b)} {unit}" for b in peers),
                       *(f"package over {names.get(b, b)}" for b in peers)])
        for r in rows:
            sheet.add(r["name"], *(milliseconds(r, b, scale) for b in ("package", *peers)),
                      *(cell(over(r["seconds"], b, "package")) for b in peers))
        if len(rows) > 1:
            means = [geometric_mean([x for r in rows if (x := over(r["seconds"], b, "package"))]) for b in peers]
            sheet.mean("geometric mean", "", *("" for _ in peers), *map(cell, means))
        parts += [sheet] if rows else []
    return parts


def calls(report: dict[str, Any]) -> Parts:
    """A package under load: percentiles of a call, and calls per second."""
    rows = report["rows"]
    percentiles, threads = (list(dict.fromkeys(k for r in rows for k in r[key])) for key in ("latency", "calls"))
    sheet = Sheet(["", *(f"{p} ms" for p in percentiles), *(f"calls/s, {n} threads" for n in threads)])
    for r in rows:
        sheet.add(r["name"], *(cell(r["latency"][p] * 1e3, "{:.3f}") if p in r["latency"] else "failed"
                               for p in percentiles), *(cell(r["calls"].get(n), "{:,.0f}") for n in threads))
    return [sheet]


def overlap(report: dict[str, Any]) -> Parts:
    """Steps on one stream and on several."""
    sheet = Sheet(["model", "mode", "one stream ms", "several ms", "one over several", "by a clock", "bits"])
    for r in report["rows"]:
        bits = {None: "", True: "equal", False: "other" if r["steady"] else "differ from run to run"}[r["equal"]]
        sheet.add(r["name"], r["mode"], *(milliseconds(r, b, 1e3) for b in ("one", "auto")),
                  cell(over(r["seconds"], "auto", "one")), cell(over(r["wall"], "auto", "one")), bits)
    return [sheet, *(f"{name}: {text:.3f}" for name, text in report["summary"].items() if isinstance(text, float))]


def offload(report: dict[str, Any]) -> Parts:
    """Steps that keep less on the device."""
    sheet = Sheet(["offload", "peak MiB, all kept", "peak MiB", "less", "step ms, all kept", "step ms", "more", "bits"])
    for r in report["rows"]:
        less, more = (over(r[key], "keep", "less") for key in ("peak_mib", "ms"))
        sheet.add(r["name"], *(cell(r["peak_mib"].get(k), "{:.0f}") for k in ("keep", "less")),
                  cell(None if less is None else 1 - less, "{:.1%}"), *(cell(r["ms"].get(k)) for k in ("keep", "less")),
                  cell(None if more is None else more - 1, "{:.1%}"),
                  {None: "", True: "equal", False: f"differ by {cell(r['differ'], '{:.1e}')}"}[r["equal"]])
    return [sheet]


SECTIONS = {
    "overlap": ("Independent steps on several streams", overlap),
    "offload": ("Activation offloading, LM 24", offload),
    "packages": ("Packages beside other ways to ship a model", packages),
    "package-results": ("Packages in a process without a compiler", packages),
    "package": ("A package under load", calls),
    "contractions": ("Matrix products with fused operators, and attention", contractions),
    "models": ("Step times of the model suite", steps),
    "compiled": ("Large models: time and memory", compiled_steps),
    "compile": ("Compile time until the first training step", compile_seconds),
    "ops": ("Operators", steps),
    "floors": ("Operators beside the memory limit", floors),
    "cliffs": ("Random cases", random_cases),
    "optimizers": ("Optimizer steps", optimizer_steps),
    "numerics": ("Values that differ from eager's with numerics=eager", bits),
    "opinfo": ("PyTorch's operator database", database),
    "device": ("Operators on the device flambeau", device_streams),
    "device-steps": ("Training steps on the device flambeau", device_steps),
}


def read(folder: Path) -> list[dict[str, Any]]:
    return [read_results(f) for f in sorted(folder.glob("*.json"))]


def page(reports: list[dict[str, Any]], title: str, kinds: Iterable[str]) -> str:
    out = [HEAD.format(title)]
    for kind in kinds:
        title, table = SECTIONS[kind]
        for report in (r for r in reports if r.get("kind") == kind):
            where = " (CUDA)" if "gpu" in report["machine"] else ""
            origin = f"{machine_line(report['machine'])} `{report['command']}` at {report['commit']}."
            picture = f"![{found[1]}]({found[0]})\n\n" if (found := chart(report)) is not None else ""
            out.append(f"## {title}{where}\n\n{origin}\n\n{picture}{markdown(table(report))}\n")
    return "\n".join(out)


def write(results: Path, docs: Path) -> None:
    reports = read(results)
    for file, (title, kinds) in PAGES.items():
        (docs / file).write_text(page(reports, title, kinds))
    for file, _, picture in filter(None, map(chart, reports)):
        (docs / file).write_text(picture)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
