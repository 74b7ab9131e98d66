"""A run of the fuzzer: many seeds, findings shrunk and grouped, a summary."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .program import Program
from .shrink import shrink, signature
from .workers import Outcome, Worker, run_all

TARGETS = ("cpu", "interpreter", "opencl", "device")
# The longest program. If kernels are interpreted, or slow to compile, many short programs find more than a few long
# ones.
LENGTH = {"cpu": 8, "interpreter": 4, "opencl": 4, "device": 5}
GRACE = 30.0  # seconds after the end of a run of limited time in which findings are still shrunk


@dataclass
class Report:
    target: str
    first: int
    programs: int = 0
    seconds: float = 0.0
    spent: list[float] = field(default_factory=lambda: [0.0, 0.0])  # CPU seconds of programs, and of compilers
    torchs: Counter[str] = field(default_factory=Counter)  # kinds of findings that torch's own tracing has too
    groups: dict[str, list[Outcome]] = field(default_factory=dict)

    def text(self) -> str:
        lines = []
        for name, rows in sorted(self.groups.items(), key=lambda g: -len(g[1])):
            best = min(rows, key=lambda o: len((o.shrunk or o.program or EMPTY).steps))
            lines += ["", f"## {name}: {len(rows)}",
                      f"seeds {', '.join(str(o.seed) for o in rows[:8])}; {best.ours[0][1]}"]
            if (program := best.shrunk or best.program) is not None:
                lines += ["```python", program.text(self.target), "```"]
        count = sum(map(len, self.groups.values()))
        lines += ["", f"{self.target}: {self.programs} programs from seed {self.first} in {self.seconds:.0f} s; "
                  f"{count} with findings in {len(self.groups)} groups; "
                  f"torch's own: {dict(self.torchs)}; {self.spent[0]:.0f} s of processors and "
                  f"{self.spent[1]:.0f} s of compilers"]
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        groups = {name: [{"seed": o.seed, "findings": o.ours,
                          "program": p.text(self.target) if (p := o.shrunk or o.program) else None} for o in rows]
                  for name, rows in self.groups.items()}
        return {"target": self.target, "seed": self.first, "programs": self.programs, "seconds": self.seconds,
                "torch": dict(self.torchs), "groups": groups}


EMPTY = Program((), (), (), ())


def environment(folder: str) -> dict[str, str]:
    """The environment of worker processes. Each compiles one kernel at a time, because the jobs already use all
    cores."""
    return {"FLAMBEAU_VERIFY": "passes", "FLAMBEAU_JOBS": "1", "OMP_NUM_THREADS": "1",
            # The device's native core takes long to compile, so a cache folder set by the caller is reused.
            "FLAMBEAU_CACHE_DIR": os.environ.get("FLAMBEAU_CACHE_DIR", folder),
            "FLAMBEAU_PROGRESS": "0", "TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "POCL_CACHE_DIR": folder, "POCL_MAX_PTHREAD_COUNT": "1"}


def fuzz(target: str, first: int, count: int, jobs: int = 1, seconds: float | None = None, limit: float = 120.0,
         shrinks: int = 4, told: Callable[[str], None] = lambda text: None,
         skip: Collection[str] = ()) -> Report:
    """Runs `count` programs from seed `first` on, or as many as fit in `seconds`."""
    report = Report(target, first)
    start = time.monotonic()
    lock = threading.Lock()
    shrunk: Counter[str] = Counter()

    def seeds() -> Iterator[int]:
        for seed in range(first, first + count):
            if seconds is not None and time.monotonic() - start > seconds:
                return
            yield seed

    def take(worker: Worker, outcome: Outcome) -> None:
        with lock:
            report.programs += 1
            report.spent = [a + b for a, b in zip(report.spent, outcome.seconds, strict=True)]
            outcome.ours = [row for row in outcome.ours if row[0] not in skip]
            for kind, _ in outcome.torchs[:1]:
                report.torchs[kind] += 1
            if report.programs % 100 == 0:
                told(f"{report.programs} programs in {time.monotonic() - start:.0f} s, "
                     f"{sum(map(len, report.groups.values()))} findings")
            if not outcome.ours:
                return
            kind = outcome.ours[0][0]
            shrunk[kind] += 1
            wanted = shrunk[kind] <= shrinks and outcome.program is not None
        program = outcome.program
        if wanted and program is not None:
            found = kind + outcome.ours[0][1].split(":")[0] if kind == "raises" else kind

            def still(candidate: Program) -> bool:
                rows = worker.run(candidate).ours
                return any((k + d.split(":")[0] if k == "raises" else k) == found for k, d in rows)

            left = float("inf") if seconds is None else start + seconds + GRACE - time.monotonic()
            program = outcome.shrunk = shrink(program, still, min(120.0, left))
            outcome.ours = worker.run(program).ours or outcome.ours
        with lock:
            name = signature(kind, program) if program is not None and wanted else f"{kind}: not shrunk"
            report.groups.setdefault(name, []).append(outcome)
            told(f"seed {outcome.seed}: {name}: {outcome.ours[0][1][:160]}")
            if outcome.shrunk is not None:
                told(outcome.shrunk.text(target))

    folder = tempfile.mkdtemp(prefix="flambeau-fuzz-")
    before = dict(os.environ)
    os.environ.update(environment(folder))
    try:
        run_all(seeds(), target, jobs, limit, {"longest": LENGTH[target]}, take)
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
    report.seconds = time.monotonic() - start
    return report


def write(reports: list[Report], path: Path) -> None:
    path.write_text(json.dumps([r.json() for r in reports], indent=1))
