"""Measures compile time: the first training step of a model, in a new process with its own cache folders.

Each state of the caches is a process of its own:

    cold    empty folders: what a new machine pays, with one-time work such as probes and precompiled headers
    primed  the folders have seen one trivial function of the same backend: what a new model pays
    warm    the folders have seen this model: what a restart pays

Compile time is the first step less the median of the steady ones. Imports are counted apart: each backend's
modules are loaded before the clock starts, as Inductor's alone would cost it seconds.
"""

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton",
          "FLAMBEAU_CACHE_DIR": "flambeau"}
IMPORTS = {"flambeau": tuple(f"flambeau.{m}" for m in ("compile.backend", "capture.decompositions", "compile.partition",
                                                      "pipeline", "capture.kept_whole"))}
STATES = ("cold", "primed", "warm")
TRIVIAL = "trivial"


@dataclass
class CompileRow:
    name: str
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def child(name: str, size: str, backend: str, device: str) -> dict[str, float]:
    """Runs in the fresh process: import, first step, steady steps."""
    start = time.perf_counter()
    from flambeau.torch_compat import COMPILERS

    name_of = backend.partition(":")[0]
    for module in (COMPILERS["dynamo"], *IMPORTS.get(name_of, (COMPILERS[name_of],) if name_of in COMPILERS else ())):
        importlib.import_module(module)
    import torch
    import torch.nn.functional as F

    from flambeau.bench.harness import clock_of, training_step
    from flambeau.bench.models import SUITE, Built

    imported = time.perf_counter()
    if name == TRIVIAL:
        built = Built(torch.nn.Linear(8, 8, device=device),
                      lambda: (torch.ones(8, 8, device=device), torch.zeros(8, 8, device=device)), F.mse_loss)
    else:
        built = SUITE[name].build(size, device=device)
    step, clock = training_step(built, built.make_inputs(), backend), clock_of(device)
    times = []
    for _ in range(6):
        begin = clock()
        step()
        times.append(clock() - begin)
    steady = statistics.median(times[1:])
    return {"compile": times[0] - steady, "first": times[0], "steady": steady, "imports": imported - start}


def in_process(name: str, size: str, backend: str, device: str, caches: Path, limit: float) -> dict[str, float]:
    env = os.environ | {variable: str(caches / folder) for variable, folder in CACHES.items()}
    command = [sys.executable, "-m", "flambeau.bench.compile_time", name, size, backend, device]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_compile(name: str, size: str, backends: Sequence[str], primed: Path, limit: float = 600.0,
                    device: str = "cpu", states: Sequence[str] = STATES) -> CompileRow:
    """Returns seconds per state for one model; `primed` is a folder that keeps the trivial function's caches."""
    row = CompileRow(name)
    for backend in backends:
        seconds = row.seconds[backend] = {}
        with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as folder:
            own, copy = Path(folder) / "own", Path(folder) / "primed"
            try:
                seconds["cold"] = in_process(name, size, backend, device, own, limit)["compile"]
                if "warm" in states:
                    seconds["warm"] = in_process(name, size, backend, device, own, limit)["compile"]
                if "primed" not in states:
                    continue
                if not (primed / backend).exists():
                    in_process(TRIVIAL, size, backend, device, primed / backend, limit)
                shutil.copytree(primed / backend, copy)
                seconds["primed"] = in_process(name, size, backend, device, copy, limit)["compile"]
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                row.errors[backend] = str(error)[:200]
    return row


def total_seconds(rows: Sequence[CompileRow], backends: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns sums over the models, left out where a model failed: a sum of fewer models would look like a gain."""
    return {backend: {state: sum(row.seconds[backend][state] for row in rows) for state in STATES
                      if all(state in row.seconds[backend] for row in rows)} for backend in backends}


if __name__ == "__main__":
    print(json.dumps(child(*sys.argv[1:5])))
