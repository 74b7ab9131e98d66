"""PyTorch's operator database through Metal kernels: run by the emulator, looked through by the checker.

    PYTHONPATH=tests python -m targets.metal_sweep --json results/opinfo-metal.json

Beside each entry stand what OpenCL leaves to ATen of the same graphs, and what the worst of its kernels costs by the
static model. What the file has of this commit is kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flambeau import pipeline
from flambeau.codegen.simt.cost import program_costs
from flambeau.codegen.simt.metal import SHAPE, Metal
from flambeau.config import config
from flambeau.results_file import origin, write_results
from flambeau.targets.metal.checker import check
from flambeau.testing.opinfo import check_opinfo
from opencl_forms import POINTS
from test_opinfo import taken

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def entry(name: str, dtype: torch.dtype, limit: int, checked: dict[str, list[str]]) -> dict[str, Any]:
    """One row: what was run, what ATen computed of it, what is wrong."""
    graphs: list[pipeline.Compiled] = []
    pipeline.OBSERVERS.append(graphs.append)
    start = time.perf_counter()
    try:
        with config.override(target="metal-emulator"):
            report = check_opinfo(name, dtype, limit=limit)
    finally:
        pipeline.OBSERVERS.remove(graphs.append)
    texts = dict.fromkeys(t.text for g in graphs for t in g.texts)
    refused = []
    for text in texts:
        if text not in checked:
            checked[text] = check(text)
        refused += checked[text]
    cost = [cost for g in graphs for _, cost in program_costs(g.program, Metal, SHAPE)]
    opencl = sorted({k for g in graphs for k in pipeline.lowered(g.gm, pipeline.Options(target=POINTS))[2].externs})
    return {"op": name, "dtype": str(dtype)[6:], "samples": report.samples, "gradients": report.gradients,
            "externs": sorted(report.externs), "opencl_externs": opencl, "texts": len(texts), "refused": refused,
            "kernels": len(cost), "ratio": round(max((c.ratio for c in cost), default=1.0), 3),
            "serial": max((c.alone for c in cost), default=0),
            "failures": report.failures[:2], "seconds": round(time.perf_counter() - start, 1)}


def summary(rows: list[dict[str, Any]], checked: int) -> dict[str, Any]:
    out: dict[str, Any] = {"texts": checked, "refused": sum(bool(r["refused"]) for r in rows),
                           "kernels": sum(r["kernels"] for r in rows), "ratio": max(r["ratio"] for r in rows),
                           "serial": max(r["serial"] for r in rows)}
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        those = [r for r in rows if r["dtype"] == dtype and r["samples"]]
        out[dtype] = {"entries": len(those), "agree": sum(not r["failures"] for r in those),
                      "without_aten": sum(not r["externs"] for r in those),
                      "without_aten_on_opencl": sum(not r["opencl_externs"] for r in those),
                      "samples": sum(r["samples"] for r in those), "gradients": sum(r["gradients"] for r in those)}
    return out


def kept(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an earlier run at this commit."""
    if path.exists() and (found := json.loads(path.read_text()))["commit"] == origin()["commit"]:
        yield from found["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of entries; none: all")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=2, help="samples of an entry")
    args = parser.parse_args()
    rows = list(kept(args.json))
    done, checked = {(r["op"], r["dtype"]) for r in rows}, {}
    for name, dtype in taken(DTYPES):
        if (name, str(dtype)[6:]) in done or (args.names and name not in args.names):
            continue
        rows.append(row := entry(name, dtype, args.limit, checked))
        good = not row["failures"] and not row["refused"]
        print("ok  " if good else "FAIL", name, row["dtype"], row["externs"] or "-", row["seconds"],
              *row["failures"], *row["refused"], flush=True)
        if not good or len(rows) % 20 == 0:
            write_results(args.json, "opinfo", rows, summary(rows, len(checked)))
    write_results(args.json, "opinfo", rows, summary(rows, len(checked)))
    print(json.dumps(summary(rows, len(checked)), indent=1))


if __name__ == "__main__":
    main()
