"""The report of a network's training steps beside the steps as they are: does its table of kernels add up to a step?

    PYTHONPATH=tests python -m report.report_sums lm24 --size large --device cuda --out out --json report.json

Steps are measured without the profiler, before and after each of several traces: a machine may be busy with something
else, and only neighbours can be compared. The report that is kept is the last one.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import flambeau
from flambeau.bench.networks import DTYPES, NETWORKS
from flambeau.debug.trace import REPORT, TRACE, settle
from flambeau.results_file import write_results


def data_of(page: Path) -> dict[str, Any]:
    """The numbers in a report."""
    found = re.search(r"const D = (.*)\n", page.read_text())
    assert found
    return json.loads(found[1])


def measured(step: Callable[[], object], steps: int) -> float:
    """Seconds of a step among many: without waiting in between, as programs run."""
    settle()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    settle()
    return (time.perf_counter() - start) / steps


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--size", default="large")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=3, help="in a trace")
    parser.add_argument("--rounds", type=int, default=5, help="number of traces")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    dtype = DTYPES[args.network] if args.device == "cuda" else torch.float32
    built = NETWORKS[args.network].build(args.size, device=args.device, dtype=dtype)
    *inputs, target = built.make_inputs()
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-4)
    compiled = torch.compile(built.module, backend="flambeau", dynamic=False)

    def step() -> None:
        built.loss(compiled(*inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    start = time.perf_counter()
    measured(step, 3)
    first = time.perf_counter() - start
    page, sums = args.out / REPORT, []
    for _ in range(args.rounds):
        before = measured(step, args.steps)
        with flambeau.debug.trace(args.out):
            for _ in range(args.steps):
                step()
        alone = (before + measured(step, args.steps)) / 2 * 1e3
        data = data_of(page)
        inside, outside = sum(r["ms"] for r in data["rows"]), sum(s * 1e3 for *_, s in data["others"])
        sums.append((inside + outside) / alone)
    row = {"name": args.network, "size": args.size, "dtype": str(dtype)[6:], "first_steps_s": round(first, 2),
           "step_ms": round(alone, 3), "compiled_ms": round(inside, 3), "others_ms": round(outside, 3),
           "adds_up_to": round(median(sums), 4), "least": round(min(sums), 4), "most": round(max(sums), 4),
           "traced_ms": round(data["wall"] * 1e3, 3),
           "busy_ms": round(data["busy"] * 1e3, 3), "kernels": sum(r["kind"] == "kernel" for r in data["rows"]),
           "report_bytes": page.stat().st_size, "trace_bytes": (args.out / TRACE).stat().st_size}
    print(json.dumps(row, indent=1))
    write_results(args.json, "report", [row], {"adds_up_to": row["adds_up_to"], "report_bytes": row["report_bytes"]},
                  args.device)


if __name__ == "__main__":
    main()
