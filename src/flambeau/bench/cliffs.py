"""Measures random cases against eager and Inductor, and lists the worst with their limiting factors.

    flambeau bench cliffs --target cuda --cases 1000 --seed 17 --json results/cliffs-cuda.json

Processes share the cases and compile in parallel; each then measures alone, its backends alternating. On a GPU times
are the device's, with the second-level cache flushed before each call. On a CPU the cases come in waves, each compiled
and measured before the next, so that an interrupted run has results; with one thread, times are that thread's CPU time.
A case whose fastest backend takes less than 20 microseconds says nothing about kernels: it is left out and counted. So
is a case without a time, with the reason.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.bench.cliff_cases import Case, draw
from flambeau.bench.floors import copy_bandwidth, cuda_times
from flambeau.bench.harness import alternate, geometric_mean, message, own_code, wanted
from flambeau.bench.parts import Talk, absorb, run, threads

BACKENDS = ("eager", "inductor", "flambeau")
SHORTEST = 20e-6  # seconds
BATCH = {"cuda": 16, "cpu": 8}  # the most cases of a process
ROUNDS, SECONDS = (5, 25), 0.05  # of a backend on a GPU: a thousand cases have to fit into minutes
PREPARE = 0.7  # the share of the time in which compilers run
WITHIN = (1.05, 1.1, 1.5, 2.0)  # multiples of the fastest peer's time
WORST = 20
PROFILED = 1.2  # times the fastest peer's time, from which on the kernels of a case are profiled
TOLERANCE = 0.1  # relative to the largest value


@dataclass
class CliffRow:
    """A measured case. `kernels`: our kernels, and, if it is slow on a GPU, those of each backend with registers,
    occupancy and so on."""

    name: str
    family: str
    seed: int
    bytes: int = 0
    launches: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self) -> float | None:
        """Our time over that of the fastest peer."""
        peers = [t for name, t in self.seconds.items() if name != "flambeau"]
        return self.seconds["flambeau"] / min(peers) if peers and "flambeau" in self.seconds else None

    def short(self) -> bool:
        return bool(self.seconds) and min(self.seconds.values()) < SHORTEST


# ---- one process -------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """A case that is compiled, and waits to be measured."""

    case: Case
    steps: dict[str, Callable[..., Any]] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)


def release(ready: Sequence[Ready], device: str) -> None:
    """Gives memory back: all processes that wait share a GPU's."""
    for case in ready:
        case.gradients.clear()
    if device == "cuda":
        torch.cuda.empty_cache()


def step(case: Case, backend: str, gradients: list[Tensor]) -> Callable[..., list[Tensor]]:
    """Returns a function that computes results, and the gradients of all floating inputs if the case has them.
    `gradients`: of the results, drawn by the first call that finds none."""
    function = case.function

    def call(*inputs: Tensor) -> Any:
        return function(*inputs)

    own_code(call, f"case_{case.seed}_{backend}")
    compiled = call if backend == "eager" else torch.compile(call, backend=backend, dynamic=case.dynamic or None)

    def forward(*inputs: Tensor) -> list[Tensor]:
        out = compiled(*inputs)
        return [out] if isinstance(out, Tensor) else list(out)

    def both(*inputs: Tensor) -> list[Tensor]:
        out = [t for t in forward(*inputs) if t.requires_grad]
        if not gradients:  # not ones: the gradient of the sum of a softmax or a norm is nothing but rounding
            draw = torch.Generator(out[0].device).manual_seed(case.seed)
            gradients.extend(torch.empty_like(t).normal_(generator=draw) for t in out)
        leaves = [t for t in inputs if t.requires_grad]
        return out + list(torch.autograd.grad(out, leaves, gradients, allow_unused=True))

    return both if case.gradient else forward


def largest(values: Tensor) -> Tensor:
    """Returns the largest absolute value; overwrites the others, as many processes share a GPU's memory."""
    return values.nan_to_num_(0, 0, 0).abs_().max()


@torch.no_grad()
def wrong(got: Sequence[Tensor], eager: Sequence[Tensor]) -> str:
    """Checks values roughly, so that no wrong kernel is timed; the tests are the strict ones.

    Where all values are mere rounding, such as the gradient of a softmax's sum, any value is right.
    """
    for mine, theirs in zip(got, eager, strict=True):
        if mine is None or theirs is None:
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{mine.dtype}{list(mine.shape)} where eager has {theirs.dtype}{list(theirs.shape)}"
        if mine.is_floating_point():
            scale = largest(theirs.to(torch.float64, copy=True)).clamp_min(64 * torch.finfo(mine.dtype).eps)
            off = (largest(theirs.to(torch.float64, copy=True).sub_(mine)) / scale).item()
            if off > TOLERANCE:
                return f"off by {off:.1e} of the largest value"
    return ""


def prepare(case: Case, backends: Sequence[str], device: str, talk: Talk,
            ready: list[Ready]) -> None:
    """Compiles a case for every backend, and compares.

    Inductor compiles last, as it takes longest: on a GPU, a case that another backend runs in too short a time is
    dropped before. Other processes compile at the same time, which makes times longer and never shorter.
    """
    import flambeau.debug

    inputs, now = case.tensors(device), Ready(case)
    eager = step(case, "eager", now.gradients)(*inputs)
    moved = sum(t.numel() * t.element_size() for t in (*inputs, *eager) if t is not None)
    talk.tell(rows={case.seed: {"bytes": moved}})
    for backend in sorted(backends, key="inductor".__eq__):
        start, run_step = time.perf_counter(), step(case, backend, now.gradients)
        try:
            with flambeau.debug.collect() as graphs:
                got = run_step(*inputs)
        except Exception as error:  # a failing backend is a result to report, not the end of the run
            talk.tell(rows={case.seed: {"errors": {backend: message(error)}}})
            continue
        told: dict[str, Any] = {"first_s": {backend: time.perf_counter() - start}}
        if backend == "flambeau":
            told["launches"] = sum(len(graph.texts) for graph in graphs)
        if fault := wrong(got, eager):
            told["errors"] = {backend: f"wrong: {fault}"}
        if device == "cuda" and (at_most := min(cuda_times(partial(run_step, *inputs), (3, 3)))) < SHORTEST:
            talk.tell(rows={case.seed: {**told, "seconds": {backend: at_most}}})
            return
        talk.tell(rows={case.seed: told})
        now.steps[backend] = run_step
    ready.append(now)


def times(calls: dict[str, Callable[[], Any]], device: str, seconds: float) -> dict[str, float]:
    if device == "cuda":
        return {name: statistics.median(cuda_times(call, ROUNDS, SECONDS)) for name, call in calls.items()}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter  # others' work is not in the first
    return {name: statistics.median(t) for name, t in alternate(calls, seconds, (5, 50), clock=clock).items()}


def profiled(calls: dict[str, Callable[[], Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the kernels of each call on a GPU, as torch's profiler reports them."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, call in calls.items():
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                call()
                torch.cuda.synchronize()
            seen.export_chrome_trace(path := f"{folder}/{name}.json")
            events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("cat") == "kernel"]
            found[name] = [{"name": e["name"][:80], "us": e["dur"], "grid": e["args"].get("grid"),
                            "registers": e["args"].get("registers per thread"),
                            "shared": e["args"].get("shared memory"),
                            "occupancy": e["args"].get("est. achieved occupancy %")} for e in events]
    return found


def part(talk: Talk, seeds: Sequence[int], size: str, device: str, backends: Sequence[str], seconds: float) -> None:
    """Measures some cases, in a process of its own."""
    from flambeau.torch_compat.dynamo import allow_recompiles

    allow_recompiles(64)
    # initialisation that all compilers share should not count for one of them
    torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1))
    ready: list[Ready] = []
    for seed in seeds:
        talk.attempt(f"case {seed}", partial(prepare, draw(seed, size), backends, device, talk, ready))
        release(ready, device)
    if device == "cuda":
        profiled({"": lambda: torch.zeros(1, device=device)})  # the first profile takes seconds
    talk.turn()
    for now in ready:
        case, inputs = now.case, now.case.tensors(device)
        calls: dict[str, Callable[[], Any]] = {name: partial(call, *inputs) for name, call in now.steps.items()}
        found = times(calls, device, seconds)
        told: dict[str, Any] = {"seconds": found}
        ours, peers = found.get("flambeau", 0.0), [t for name, t in found.items() if name != "flambeau"]
        if device == "cuda" and peers and ours > PROFILED * min(peers):
            told["kernels"] = profiled(calls)
        talk.tell(rows={case.seed: told})
        del inputs, calls
        release([now], device)


# ---- all of them -------------------------------------------------------------------------------------------------


def measure(device: str, size: str, only: str | None, count: int, seed: int, backends: Sequence[str], jobs: int,
            limit: float) -> Iterator[tuple[list[CliffRow], dict[str, Any]]]:
    """Yields rows and summary, again whenever there is more in them. `limit`: seconds for all of it."""
    cases: list[Case] = []
    for number in range(seed, seed + 100 * count):
        if len(cases) < count and wanted(f"{(case := draw(number, size)).family} {case.what}", only):
            cases.append(case)
    bandwidth = copy_bandwidth(torch.device(device))
    turn = limit * (1 - PREPARE) / max(count, 1)
    batch = max(1, min(BATCH[device], -(-count // jobs)))  # no process is without any
    end, rows = time.time() + limit, list[CliffRow]()
    wave = jobs * batch if device == "cpu" else max(count, 1)
    for at in range(0, len(cases), wave):
        if (left := end - time.time()) <= turn:
            break
        now = {case.seed: CliffRow(str(case), case.family, case.seed) for case in cases[at:at + wave]}
        rows += now.values()
        seeds = list(now)
        parts: dict[str, dict[str, Any]] = {
            f"cases {k}": {"seeds": seeds[k:k + batch], "size": size, "device": device, "backends": list(backends),
                           "seconds": turn / 2} for k in range(0, len(seeds), batch)}
        prepare = left * PREPARE if device == "cuda" else left - turn * len(seeds)
        for name, told in run("flambeau.bench.cliffs", parts, jobs, left, prepare, threads(jobs)):
            for number, more in told.get("rows", {}).items():
                absorb(now[int(number)], more)
            for what, why in told.get("errors", {}).items():  # of a case, or of the process: then of what it left
                for number in parts[name]["seeds"]:
                    if what == f"case {number}" or not (what.startswith("case ") or now[number].seconds):
                        now[number].errors.setdefault("part", why)
            yield rows, summarise(rows, bandwidth)


def summarise(rows: Sequence[CliffRow], bandwidth: float) -> dict[str, Any]:
    """Returns the distribution of our time over the fastest peer's, for the cases that are long enough."""
    ratios = [r for row in rows if not row.short() and (r := row.ratio()) is not None]
    first = [(row.first_s["flambeau"], row.first_s["inductor"]) for row in rows
             if {"flambeau", "inductor"} <= row.first_s.keys()]
    short = sum(row.short() for row in rows)
    return {"cases": len(ratios), "short": short, "without a time": len(rows) - short - len(ratios),
            "bandwidth": bandwidth, "mean": geometric_mean(ratios), "worst": max(ratios, default=0.0),
            "within": {str(k): sum(r <= k for r in ratios) / max(len(ratios), 1) for k in WITHIN},
            "compile over inductor": sum(a for a, _ in first) / max(sum(b for _, b in first), 1e-9)}


def limits(row: CliffRow, bandwidth: float) -> str:
    """Describes briefly what limits a slow case."""
    ours = row.seconds["flambeau"]
    words = [f"{ours * bandwidth / max(row.bytes, 1):.1f} × its bytes", f"{row.launches} kernels"]
    for kernel in row.kernels.get("flambeau", [])[:2]:
        words.append(f"{kernel['us']:.0f} µs {kernel['registers']} registers {kernel['occupancy']}% occupied")
    return "; ".join(words)


def cliff_chart(rows: Sequence[CliffRow], title: str) -> str:
    """Draws our time over the fastest peer's, at percentiles of the distribution and for the worst cases."""
    from flambeau.report.chart import Series, ratio_chart

    ratios = sorted((r, row.name) for row in rows if not row.short() and (r := row.ratio()) is not None)
    lines = [(f"{p}% of the cases at most", {"ours": ratios[min(len(ratios) - 1, len(ratios) * p // 100)][0]})
             for p in (10, 25, 50, 75, 90, 95, 97, 99)]
    lines += [(name[:44], {"ours": r}) for r, name in ratios[: -WORST - 1: -1]]
    ours = Series("ours", "Flambeau over the faster of eager and Inductor", "#d1570b", "bar")
    return ratio_chart(title, lines, [ours])
