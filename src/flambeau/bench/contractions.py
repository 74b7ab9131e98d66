"""Measures matrix products, fused operators, FP8, attention and experts against the library, eager and Inductor.

    flambeau bench contractions --target cuda --only products,tails,FP8,experts,search --json results/contractions.json

The seed of the shapes is random unless it is given; the summary has it, with the numbers that decide (`bars`). Calls
are recorded in CUDA graphs, so that times are the device's; backends alternate, and times are medians. `own` uses only
our kernels, `flambeau` the choice between those and the library; `autotuned` is Inductor's max-autotune. Attention is
measured as flex_attention too, under Inductor (`flex`) and under Flambeau (`flambeau flex`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flambeau.bench import contraction_search
from flambeau.bench.contraction_cases import GROUPED, Case, cases
from flambeau.bench.contraction_search import SearchRow
from flambeau.bench.harness import geometric_mean, message, own_code, wanted

BACKENDS: dict[str, dict[str, Any]] = {
    "eager": {}, "inductor": {"backend": "inductor"},
    "autotuned": {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"},
    "flambeau": {"backend": "flambeau"},
    "flex": {"backend": "inductor"}, "flambeau flex": {"backend": "flambeau"},
    "own": {"backend": "flambeau", "options": {"contractions": "own", "search": True}}}
OURS = ("flambeau", "own", "flambeau flex")
FLEX = ("flex", "flambeau flex")
AIM = 2e-3  # seconds of one recording
ROUNDS = 9


@dataclass
class ContractionRow:
    name: str
    group: str
    operations: float
    aligned: bool
    seconds: dict[str, float] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)  # until the first call has finished
    error: dict[str, float] = field(default_factory=dict)  # of the results, relative to those of the first backend
    choices: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, name: str = "flambeau") -> float | None:
        """The fastest peer's time over ours."""
        peers = [t for b, t in self.seconds.items() if b not in OURS]
        return min(peers) / self.seconds[name] if peers and name in self.seconds else None


def step(case: Case, backend: str, device: str) -> Callable[..., list[Tensor]]:
    function = case.function if backend not in FLEX or case.flex is None else case.flex(device=device)

    def call(*inputs: Tensor) -> Any:
        return function(*inputs)

    how = BACKENDS[backend]
    own_code(call, f"{case.group}_{backend}".replace(" ", "_"))
    run = torch.compile(call, dynamic=case.dynamic or None, **how) if how else call
    grads: list[Tensor] = []

    def forward(*inputs: Tensor) -> list[Tensor]:
        out = run(*inputs)
        made = [out] if isinstance(out, Tensor) else list(out)
        if not case.gradient:
            return made
        grads.extend(torch.randn_like(t) for t in made if not grads)
        leaves = [t for t in inputs if t.requires_grad]
        return [*made, *torch.autograd.grad(made, leaves, grads)]

    return forward


def recorded(call: Callable[[], Any], device: str) -> tuple[Callable[[], Any], int]:
    """Returns a replay of several calls, and their number; the call itself if it cannot be recorded."""
    if device != "cuda":
        return call, 1
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    call()
    end.record()
    end.synchronize()
    count = max(1, min(50, int(AIM / max(start.elapsed_time(end) / 1e3, 1e-6))))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(count):
                call()
    except Exception:  # it waits for the device, or needs the host
        torch.cuda.synchronize()
        return call, 1

    def replay() -> Callable[[], Any]:
        graph.replay()
        return call  # kept, since the recording reads the tensors in it, such as a block mask

    return replay, count


def error(made: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the largest |made - exact| / |exact| of all results, in norms."""
    return max((float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
                for a, b in zip(made, exact, strict=True) if a.is_floating_point()), default=0.0)


def measure_case(case: Case, backends: Sequence[str], device: str) -> ContractionRow:
    import flambeau.debug

    row = ContractionRow(case.name, case.group, case.operations, case.aligned)
    inputs = case.tensors(device)
    calls: dict[str, tuple[Callable[[], Any], int]] = {}
    want: list[Tensor] | None = None
    draws = "dropout" in case.name
    for backend in backends:
        if (case.peers and backend not in case.peers) or (case.flex is None and backend in FLEX):
            continue
        begin = time.perf_counter()
        try:
            torch.manual_seed(1)
            run = step(case, backend, device)
            with flambeau.debug.collect() as graphs:
                made = [t.detach() for t in run(*inputs)]
            if device == "cuda":
                torch.cuda.synchronize()
            row.first_s[backend] = time.perf_counter() - begin
            want = made if want is None else want
            row.error[backend] = float("nan") if draws else error(made, want)
            if backend == "flambeau":
                row.choices = [c for g in graphs for c in g.captured.choices]
            if not draws and not row.error[backend] < 0.1:
                raise ValueError(f"off by {row.error[backend]:.1e}")
            calls[backend] = recorded(partial(run, *inputs), device)
        except Exception as e:
            row.errors[backend] = message(e)
    if device != "cuda":
        return row
    times: dict[str, list[float]] = {b: [] for b in calls}
    for turn in range(ROUNDS):
        for backend in [*calls][:: 1 if turn % 2 == 0 else -1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # while it runs, the host launches the measured calls, so that host time is not measured
            calls[backend][0]()
            start.record()
            calls[backend][0]()
            end.record()
            end.synchronize()
            times[backend].append(start.elapsed_time(end) / 1e3 / calls[backend][1])
    row.seconds = {b: statistics.median(t) for b, t in times.items()}
    return row


def measure(target: str, only: str | None, seed: int, scale: int, counts: tuple[int, int], backends: Sequence[str],
            limit: float, colds: int = 10) -> Iterator[ContractionRow | SearchRow]:
    end = time.perf_counter() + limit
    for case in cases(seed, scale, *counts):
        if wanted(f"{case.group} {case.name}", only) and time.perf_counter() < end:
            yield measure_case(case, backends, target)
            torch.compiler.reset()
            if target == "cuda":
                torch.cuda.empty_cache()
    if wanted("search", only) and time.perf_counter() < end:
        draw = random.Random(seed)
        sizes = [max(16, round(2 ** draw.uniform(9, 12) / scale / 8) * 8) for _ in range(3)]
        yield contraction_search.measure(target, sizes, colds, end)


def summarise(rows: Sequence[ContractionRow | SearchRow], seed: int | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {} if seed is None else {"seed": seed}
    timed = [r for r in rows if isinstance(r, ContractionRow)]
    for group in dict.fromkeys(r.group for r in timed):
        mine = [r for r in timed if r.group == group]
        ratios = [x for r in mine if (x := r.ratio()) is not None]
        out[group] = {"cases": len(mine), "mean over the best peer": geometric_mean(ratios) if ratios else None,
                      "least over the best peer": min(ratios, default=None)}
    return out | {name: value for name, value in bars(rows).items() if value is not None}


def bars(rows: Sequence[ContractionRow | SearchRow]) -> dict[str, Any]:
    """Returns the deciding numbers in addition to those of each group; None for what was not measured."""
    timed = [r for r in rows if isinstance(r, ContractionRow)]
    own = [x for r in timed if r.group == "products" and r.aligned and depth_of(r) >= 512
           and (x := r.ratio("own")) is not None]
    ours = {(r.group, r.name.partition(f", {size_text(r)}")[0]): r.seconds["flambeau"] for r in timed
            if "flambeau" in r.seconds and r.group in ("FP8", GROUPED)}
    out: dict[str, Any] = {"own kernels over the library, aligned, depth 512 and more":
                           geometric_mean(own) if own else None}
    for how in ("fast", "precise"):
        whole = ours.get(("FP8", f"per tensor, {how}"))
        out[f"FP8, {how}: ms"] = None if whole is None else 1e3 * whole
        for kind in ("per row", "block scales"):
            other = ours.get(("FP8", f"{kind}, {how}"))
            out[f"FP8, {how}: {kind} over per tensor"] = None if whole is None or other is None else other / whole
    dense = ours.get((GROUPED, "one"))
    for count in (8, 64):
        each = ours.get((GROUPED, str(count)))
        out[f"{count} experts, rate over one product's"] = None if dense is None or each is None else dense / each
    for row in (r for r in rows if isinstance(r, SearchRow)):
        out |= {"first call of a new shape, s": max(row.cold_s, default=None), "in a second process, s": row.second_s,
                "cold compiles": len(row.cold_s), "choices are equal": row.equal if row.choices else None}
    return out


def size_text(row: ContractionRow) -> str:
    return row.name.rpartition(", ")[2]


def depth_of(row: ContractionRow) -> int:
    return int(row.name.rpartition(" ")[2])


def line(row: ContractionRow | SearchRow) -> str:
    if isinstance(row, SearchRow):
        return contraction_search.line(row)
    times = "  ".join(f"{b} {1e6 * t:.1f}" for b, t in row.seconds.items())
    bad = "  ".join(f"{b}: {e}" for b, e in row.errors.items())
    ratio = row.ratio()
    return f"{row.group:10} {row.name:42} {'' if ratio is None else f'{ratio:.2f}':>5}  us: {times}  {bad}".rstrip()
