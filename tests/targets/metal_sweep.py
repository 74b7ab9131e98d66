"""PyTorch's operator database and the models of the benchmarks through Metal kernels: run by the emulator, inspected by
the checker.

    PYTHONPATH=tests python -m targets.metal_sweep --json results/metal-operators.json

Each entry also has the operators that OpenCL leaves to ATen in the same graphs, and the cost of its worst kernel by the
static model. The file's rows of this commit are kept, and with --keep those of other commits with the same kernels;
failed ones are run again. After the models and the named operators, entries come in random order, so that an
interrupted sweep is a random sample.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flambeau import pipeline
from flambeau.bench.models import SUITE
from flambeau.codegen.simt.metal import SHAPE, Metal
from flambeau.config import config
from flambeau.results_file import origin, write_results
from flambeau.targets.metal.checker import check
from flambeau.testing.opinfo import check_opinfo
from metal_on_a_mac import losses
from opencl_forms import POINTS
from targets.kernel_costs import program_costs
from test_opinfo import taken
from test_opinfo_metal import DTYPES, NAMED


@contextmanager
def observed(row: dict[str, Any], checked: dict[str, list[str]]) -> Iterator[list[pipeline.Compiled]]:
    """Collects the graphs that are compiled inside the block. At its end, adds their check results, costs and time to
    the row."""
    graphs: list[pipeline.Compiled] = []
    pipeline.OBSERVERS.append(graphs.append)
    start = time.perf_counter()
    try:
        with config.override(target="metal-emulator", graph_cache=False):
            yield graphs
    finally:
        pipeline.OBSERVERS.remove(graphs.append)
    texts = dict.fromkeys(t.text for g in graphs for t in g.texts)
    checked.update({text: check(text) for text in texts if text not in checked})
    cost = [cost for g in graphs for _, cost in program_costs(g.program, Metal, SHAPE)]
    row.update({"texts": len(texts), "refused": [problem for text in texts for problem in checked[text]],
                "kernels": len(cost), "ratio": round(max((c.ratio for c in cost), default=1.0), 3),
                "serial": max((c.alone for c in cost), default=0), "seconds": round(time.perf_counter() - start, 1)})


def entry(name: str, dtype: torch.dtype, limit: int, checked: dict[str, list[str]]) -> dict[str, Any]:
    """The row of an operator: the samples that were run, the operators left to ATen, and the failures."""
    row: dict[str, Any] = {"op": name, "dtype": str(dtype)[6:]}
    with observed(row, checked) as graphs:
        report = check_opinfo(name, dtype, limit=limit)
    opencl = {k for g in graphs for k in pipeline.lowered(g.gm, pipeline.Options(target=POINTS))[2].externs}
    return {**row, "samples": report.samples, "gradients": report.gradients, "externs": sorted(report.externs),
            "opencl_externs": sorted(opencl), "failures": report.failures[:2]}


def model(name: str, checked: dict[str, list[str]]) -> dict[str, Any]:
    """The row of a model: the losses of three training steps, with eager's."""
    row: dict[str, Any] = {"model": name, "eager": losses(name, "cpu", False)}
    with observed(row, checked):
        row["losses"] = losses(name, "cpu", True, target="metal-emulator")
    row["off"] = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], row["eager"], strict=True))
    return {**row, "failures": [] if row["off"] < 1e-4 else [f"{row['losses']} for {row['eager']}"]}


def summary(rows: list[dict[str, Any]], entries: Sequence[tuple[str, torch.dtype]]) -> dict[str, Any]:
    out: dict[str, Any] = {"texts": sum(r["texts"] for r in rows), "refused": sum(bool(r["refused"]) for r in rows),
                           "kernels": sum(r["kernels"] for r in rows), "ratio": max(r["ratio"] for r in rows),
                           "serial": max(r["serial"] for r in rows), "commits": Counter(r["commit"] for r in rows)}
    models = [r for r in rows if "model" in r]
    out["models"] = {"trained": len(models), "agree": sum(not r["failures"] for r in models),
                     "off": max((r["off"] for r in models), default=0.0)}
    for dtype in dict.fromkeys(r["dtype"] for r in rows if "op" in r):
        those = [r for r in rows if r.get("dtype") == dtype and r["samples"]]
        out[dtype] = {"of": sum(str(d)[6:] == dtype for _, d in entries), "entries": len(those),
                      "agree": sum(not r["failures"] for r in those),
                      "without_aten": sum(not r["externs"] for r in those),
                      "without_aten_on_opencl": sum(not r["opencl_externs"] for r in those),
                      "samples": sum(r["samples"] for r in those), "gradients": sum(r["gradients"] for r in those)}
    return out


def kept(path: Path, commits: Collection[str]) -> list[dict[str, Any]]:
    """The rows of earlier runs at these commits that did not fail."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [r for r in rows if r["commit"] in commits and not r["failures"] and not r["refused"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of entries; none: all")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=2, help="samples of an entry")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--keep", nargs="*", default=(), help="commits whose rows stay")
    args = parser.parse_args()
    commit = origin()["commit"]
    rows = kept(args.json, {commit, *args.keep})
    done, checked = {(r.get("model", r.get("op")), r.get("dtype")) for r in rows}, {}
    entries = list(taken(DTYPES))
    random.Random(args.seed).shuffle(entries)
    entries.sort(key=lambda e: e[0] not in NAMED)
    todo: list[tuple[str, torch.dtype | None]] = [*((name, None) for name in SUITE), *entries]
    for name, dtype in todo:
        if (name, dtype and str(dtype)[6:]) in done or (args.names and name not in args.names):
            continue
        rows.append(row := model(name, checked) if dtype is None else entry(name, dtype, args.limit, checked))
        row["commit"] = commit
        good = not row["failures"] and not row["refused"]
        print("ok  " if good else "FAIL", name, row.get("dtype", "model"), row.get("externs") or "-", row["ratio"],
              row["serial"], row["seconds"], *row["failures"], *row["refused"], flush=True)
        if not good or len(rows) % 20 == 0:
            write_results(args.json, "metal operators", rows, summary(rows, entries))
    write_results(args.json, "metal operators", rows, summary(rows, entries))
    print(json.dumps(summary(rows, entries), indent=1))


if __name__ == "__main__":
    main()
