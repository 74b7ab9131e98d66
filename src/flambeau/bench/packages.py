"""Measures packages against eager, torch.compile, AOTInductor and ONNX Runtime: steps, load times, single calls.

    measure(["gpt", "call", "load"], "small", list(PEERS), limit=3.0)       # rows of `flambeau bench packages`
    served("model.flam", "forward", 0.5, (1, 2))            # rows of `flambeau bench model.flam`

With one thread (OMP_NUM_THREADS=1) times are CPU times of the thread, and for loads of the process,
so that they mean something even on a busy machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flambeau.bench import harness
from flambeau.bench.harness import Row
from flambeau.bench.models import SUITE
from flambeau.bench.package_bits import side_by_side
from flambeau.package.arguments import array_dtype
from flambeau.package.export import export
from flambeau.package.module import Module, load
from flambeau.package.trace import Wrapped
from flambeau.torch_compat.inductor import aoti_load, aoti_package

Step = Callable[[], Any]
NAMES = (*SUITE, "call", "load")
SEED = 1
LOAD_BYTES = 1 << 30
LOADS = 5


def eager_step(model: nn.Module, args: tuple[Any, ...], folder: Path) -> Step:
    return lambda: model(*args)


def jit_step(model: nn.Module, args: tuple[Any, ...], folder: Path) -> Step:
    compiled = torch.compile(model, backend="flambeau")
    return lambda: compiled(*args)


def package_step(model: nn.Module, args: tuple[Any, ...], folder: Path) -> Step:
    export(model, args, folder / "model.flam", debug=False)
    method = load(folder / "model.flam").load_method("forward")
    arrays = [x.numpy() for x in args]
    return lambda: method(*arrays)


def aoti_step(model: nn.Module, args: tuple[Any, ...], folder: Path) -> Step:
    found = aoti_load(aoti_package(torch.export.export(model, args), str(folder / "model.pt2")))
    return lambda: found(*args)


def onnx_step(model: nn.Module, args: tuple[Any, ...], folder: Path) -> Step:
    import onnxruntime

    torch.onnx.export(model, args, str(folder / "model.onnx"), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), args)}
    return lambda: session.run(None, feeds)


PEERS: dict[str, Callable[[nn.Module, tuple[Any, ...], Path], Step]] = {
    "eager": eager_step, "flambeau": jit_step, "aotinductor": aoti_step, "onnxruntime": onnx_step,
    "package": package_step}


def available(peers: Sequence[str]) -> list[str]:
    return [p for p in peers if p != "onnxruntime" or (find_spec("onnxruntime") and find_spec("onnxscript"))]


def steps_of(model: nn.Module, args: tuple[Any, ...], peers: Sequence[str], folder: Path, row: Row) -> dict[str, Step]:
    """Returns the step of each peer; a peer that fails is noted in the row."""
    made = {}
    for peer in available(peers):
        inside = folder / peer
        inside.mkdir()
        try:
            made[peer] = PEERS[peer](model, args, inside)
        except Exception as error:  # a failing peer is a result to report, not the end of the run
            row.errors[peer] = harness.message(error)
    return made


def clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def measure(names: Sequence[str], size: str, peers: Sequence[str], limit: float, jobs: int = 1) -> Iterator[Row]:
    """Yields rows for NAMES: steps of models, a call that has nothing to do, and a load."""
    yield from side_by_side(partial(measured, size=size, peers=peers, limit=limit), names, jobs)


def measured(name: str, size: str, peers: Sequence[str], limit: float) -> Row:
    if name not in SUITE:
        return measure_call(peers) if name == "call" else measure_load()
    built = SUITE[name].build(size)
    model, row = built.module.eval(), Row(name, "step", "infer")
    args = tuple(built.make_inputs(seed=SEED)[:-1])
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as folder, torch.no_grad():
        return harness.timed(row, steps_of(model, args, peers, Path(folder), row), limit, clock())


def measure_call(peers: Sequence[str] = tuple(PEERS), limit: float = 2.0) -> Row:
    """Measures the cost of a call whose kernel has next to nothing to do."""
    row, args = Row("a call of relu on 16 numbers", "call", "infer"), (torch.ones(16),)
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as folder, torch.no_grad():
        steps = steps_of(nn.ReLU().eval(), args, peers, Path(folder), row)
        for name, times in harness.alternate(steps, limit, clock=clock(), burst=0.01).items():
            row.seconds[name], row.best[name] = statistics.median(times), min(times)
            row.spread[name] = harness.spread(times)
    return row


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Returns times of packages over those of each peer, as means of groups: below one the package is faster."""
    peers = dict.fromkeys(p for row in rows for p in row.seconds if p != "package")
    return {f"package over {p}": harness.group_ratios(rows, p, "package") for p in peers}


# ---- from the file to the first result -------------------------------------------------------------------------------


class Large(nn.Module):
    """A model with so many bytes of weights, each read once."""

    def __init__(self, nbytes: int, parts: int = 16) -> None:
        super().__init__()
        rows = nbytes // 4 // parts // 1024
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(rows, 1024)) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.parts:
            x = x + p.sum(0) * 1e-6
        return x


LOADERS = {
    "package": "import numpy, flambeau\nx = numpy.ones(1024, 'float32')\nstart = clock()\nflambeau.load({!r})(x)",
    "aotinductor": "import torch\nfrom flambeau.torch_compat.inductor import aoti_load\nx = torch.ones(1024)\n"
                   "start = clock()\naoti_load({!r})(x)",
}


def measure_load(nbytes: int = LOAD_BYTES) -> Row:
    """Measures seconds from a file of so many bytes in the page cache to the first result, alternating, in separate
    processes that have imported what they need."""
    threads = torch.get_num_threads()
    row, times = Row(f"load {nbytes >> 20} MiB, threads: {threads}", "load", "load"), dict[str, list[float]]()
    env, which = {**os.environ, "OMP_NUM_THREADS": str(threads)}, "process_time" if threads == 1 else "perf_counter"
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as folder, torch.no_grad():
        model, x = Large(nbytes).eval(), (torch.ones(1024),)
        files = {"package": f"{folder}/model.flam", "aotinductor": f"{folder}/model.pt2"}
        export(model, x, files["package"], debug=False)
        aoti_package(torch.export.export(model, x), files["aotinductor"])
        for turn in range(LOADS + 1):
            for name, text in LOADERS.items():
                script = f"from time import {which} as clock\n{text.format(files[name])}\nprint(clock() - start)"
                done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False,
                                      env=env)
                if done.returncode:
                    row.errors[name] = done.stderr.strip().splitlines()[-1][:200]
                elif turn:  # the first turn brings files into the page cache
                    times.setdefault(name, []).append(float(done.stdout))
    for name, found in times.items():
        row.seconds[name], row.best[name] = statistics.median(found), min(found)
        row.spread[name] = harness.spread(found)
    return row


# ---- one package -----------------------------------------------------------------------------------------------------


def drawn_inputs(module: Module, method: str, size: int) -> list[Any]:
    """Returns arrays that a method takes: run-time sizes are about `size`, indices small."""
    rng, out = np.random.default_rng(0), []
    for port in module.load_method(method).entry.inputs:
        shape = [min(max(size, lo), hi) for lo, hi in port.ranges]
        dtype = array_dtype(port.dtype)
        floats = port.dtype.startswith(("float", "bfloat"))
        out.append((rng.standard_normal(shape) if floats else rng.integers(0, 2, shape)).astype(dtype))
    return out


def latencies(step: Step, seconds: float) -> list[float]:
    """Returns the seconds of consecutive calls."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    step()
    while not found or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return found


def throughput(step: Step, threads: int, seconds: float) -> float:
    """Returns the calls per second of so many threads that call at the same time."""
    counts, stop = [0] * threads, time.perf_counter() + seconds

    def work(k: int) -> None:
        while time.perf_counter() < stop:
            step()
            counts[k] += 1

    workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    start = time.perf_counter()
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return sum(counts) / (time.perf_counter() - start)


@dataclass
class Served:
    """Seconds of consecutive calls, by percentile, and calls per second of several threads that call at the same
    time."""

    name: str
    latency: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def served(path: str, method: str, seconds: float, threads: Sequence[int], subject: tuple[Any, ...] | None = None,
           size: int = 8) -> Iterator[Served]:
    """Yields results of the package, and of its peers if the model and its arguments are given. Run-time sizes are
    `size`."""
    module = load(path)
    model, args = subject or (None, ())
    given = [x.detach().numpy() for x in args] or drawn_inputs(module, method, size)
    one, failed = module.load_method(method), Row("", "", "")
    steps: dict[str, Step] = {"package": lambda: one.run(given)}
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as folder, torch.no_grad():
        if model is not None:
            wrapped = model if isinstance(model, nn.Module) else Wrapped(model).eval()
            steps |= steps_of(wrapped, args, ("eager", "aotinductor", "onnxruntime"), Path(folder), failed)
        for name, step in steps.items():
            try:
                times = np.percentile(latencies(step, seconds), (50, 90, 99))
                yield Served(name, dict(zip(("p50", "p90", "p99"), times.tolist())),
                             {str(k): throughput(step, k, seconds) for k in threads})
            except Exception as error:  # as in steps_of
                failed.errors[name] = harness.message(error)
        yield from (Served(name, errors={name: text}) for name, text in failed.errors.items())
