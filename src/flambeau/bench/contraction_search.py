"""Measures what the choice between product kernels costs, and whether every process makes the same choice.

    python -m flambeau.bench.contraction_search cuda 1000 512 768

prints the seconds of a first call and whose kernel each product uses. `measure` runs that several times with empty
caches, and once more with the caches that the first run left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE = 300  # seconds for one process


@dataclass
class SearchRow:
    """The seconds of the first call of a compiled product, without caches and with them."""

    name: str
    group: str = "search"
    cold_s: list[float] = field(default_factory=list)
    second_s: float | None = None
    choices: list[list[str]] = field(default_factory=list)  # whose kernels, for each process
    errors: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return len({tuple(c) for c in self.choices}) <= 1


def first_call(device: str, rows: int, columns: int, depth: int) -> dict[str, object]:
    """Measures a first call, in a process of its own, with the caches of its environment."""
    import torch
    import torch.nn.functional as F

    import flambeau.debug

    x, w, b = (torch.randn(s, device=device).to(torch.bfloat16) for s in ((rows, depth), (columns, depth), (columns,)))
    F.gelu(F.linear(x, w, b))  # initializes libraries
    begin = time.perf_counter()
    with flambeau.debug.collect() as graphs:
        float(torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b)), backend="flambeau")(x, w, b).sum())
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "choices": [c.partition(":")[0] for g in graphs for c in g.captured.choices]}


def run(device: str, sizes: Sequence[int], cache: Path, row: SearchRow) -> float | None:
    command = [sys.executable, "-m", "flambeau.bench.contraction_search", device, *map(str, sizes)]
    env = os.environ | {"FLAMBEAU_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        row.errors.append((done.stderr.strip().splitlines() or ["no words"])[-1][:200])
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    row.choices.append(found["choices"])
    return float(found["seconds"])


def measure(device: str, sizes: Sequence[int], times: int, end: float) -> SearchRow:
    """Measures as often as there is time for, until `end` on the clock of time.perf_counter."""
    row = SearchRow(" x ".join(map(str, sizes)))
    for turn in range(times):
        if time.perf_counter() > end:
            break
        with tempfile.TemporaryDirectory(prefix="flambeau-search-") as cache:
            seconds = run(device, sizes, Path(cache), row)
            row.cold_s += [] if seconds is None else [seconds]
            row.second_s = run(device, sizes, Path(cache), row) if turn == 0 else row.second_s
    return row


def line(row: SearchRow) -> str:
    cold = "  ".join(f"{s:.2f}" for s in row.cold_s)
    second = "" if row.second_s is None else f"  again {row.second_s:.2f}"
    return f"{row.group:10} {row.name:42} s: {cold}{second}  {'equal' if row.equal else 'different'} choices " \
           f"{'  '.join(row.errors)}".rstrip()


if __name__ == "__main__":
    print(json.dumps(first_call(sys.argv[1], *map(int, sys.argv[2:5]))))
