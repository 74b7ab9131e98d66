"""Tests that need a Mac: the operator database and small models on `mps`, compared with the CPU.

    make test-metal          # writes results/metal.json, which can be sent back
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import torch

from flambeau.bench.models import SUITE, without_dropout
from flambeau.config import config
from flambeau.results_file import write_results
from flambeau.testing.opinfo import OPS, check_opinfo

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def operators(limit: int) -> list[dict[str, Any]]:
    rows = []
    for name, op in OPS.items():
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            with config.override(target="mps"):
                report = check_opinfo(name, dtype, limit=limit, device="mps")
            rows.append({"op": name, "dtype": str(dtype), "samples": report.samples, "gradients": report.gradients,
                         "externs": report.externs, "failures": report.failures[:2]})
            print("ok  " if report.ok else "FAIL", name, dtype, *report.failures[:1], flush=True)
    return rows


def losses(name: str, device: str, compiled: bool, **options: Any) -> list[float]:
    """The losses of three training steps of a small model."""
    built = SUITE[name].build("tiny", device=device)
    module = without_dropout(built.module)
    run = torch.compile(module, backend="flambeau", options=options or None) if compiled else module
    steps = torch.optim.SGD(module.parameters(), lr=1e-2)
    *args, target = built.make_inputs(2)
    out = []
    for _ in range(3):
        steps.zero_grad()
        loss = built.loss(run(*args), target)
        loss.backward()
        steps.step()
        out.append(loss.item())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=2, help="samples of an operator")
    args = parser.parse_args()
    if not torch.backends.mps.is_available():
        parser.error("this is no Mac with a GPU that PyTorch can use")
    start = time.time()
    models = {name: {"cpu": losses(name, "cpu", False), "mps": losses(name, "mps", True)} for name in SUITE}
    rows = operators(args.limit)
    write_results(args.json, "metal", rows, {
        "system": f"{platform.machine()} {platform.mac_ver()[0]}", "torch": torch.__version__, "models": models,
        "failed": sum(bool(row["failures"]) for row in rows), "seconds": round(time.time() - start)}, "mps")


if __name__ == "__main__":
    main()
