"""Measures how far operators are from the memory limit, against eager, Inductor and FlagGems, in one run.

The floor of a case is the time that its bytes take at the bandwidth of a device copy, measured first. On a GPU times
come from CUDA events, with the second-level cache flushed before every call. Small calls are timed many in a row,
including the host's work for each. Results are compared with eager's, both against float64, except for random
operators.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flambeau.bench.floor_cases import SIZES, Case, Draw, Tensors
from flambeau.bench.harness import alternate, clock_of, compiled, deadline, geometric_mean, message
from flambeau.eager.accelerate import accelerate

FLAGGEMS = "flaggems"
PEERS = ("eager", "inductor", FLAGGEMS)
ACCELERATE = "accelerate"  # eager calls, executed by our kernels
SETTLED = 40  # calls after which a gate has timed its kernel against torch's and chosen
OURS = ("flambeau", ACCELERATE)
REFERENCE = 4.3e12  # bytes per second of an H200's device copy, for comparing runs with one another
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
# Written before each call: several times the second-level cache, and long enough for the host to run ahead, so that the
# events measure the kernels and not the host's work.
FLUSH_BYTES = 1 << 29
MEMORY_SPEED = 5e12  # bytes per second, about that of the fastest GPUs
MOST_FLUSHES = 20
WARMUP, ROUNDS, SECONDS = 3, (5, 100), 0.3
IN_A_ROW = 100
# Against float64, relative to the largest value. If eager itself is further off, four times its error is allowed.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EAGER_ERRORS = 4.0


@dataclass
class FloorRow:
    """A measured case. `errors` has the fault of a backend: of its results, or, if it has no time, of the whole run."""

    name: str
    group: str
    mode: str
    bytes: int = 0
    floor: float = 0.0  # seconds
    seconds: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)  # largest error relative to the largest value
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, backend: str) -> float | None:
        return self.seconds[backend] / self.floor if backend in self.seconds else None


# ---- time ------------------------------------------------------------------------------------------------------


def cuda_times(call: Callable[[], Any], rounds: tuple[int, int] = ROUNDS, limit: float = SECONDS) -> list[float]:
    """Returns times of the device alone: it is kept busy before each call for as long as the host takes to launch
    it."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    flushes = 1

    def once() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            flush.zero_()
        start.record()
        call()
        end.record()
        return start, end

    def seconds(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    first = min(seconds([once() for _ in range(WARMUP)]))
    begin = time.perf_counter()
    call()
    host = time.perf_counter() - begin  # an upper bound: a full queue makes the host wait
    torch.cuda.synchronize()
    flushes += min(MOST_FLUSHES, int(2 * host / (FLUSH_BYTES / MEMORY_SPEED)))
    return seconds([once() for _ in range(max(rounds[0], min(rounds[1], int(limit / max(first, 1e-9)))))])


TIMES: dict[str, Callable[[Callable[[], Any]], list[float]]] = {
    "cuda": cuda_times, "cpu": lambda call: alternate({"": call}, SECONDS, ROUNDS, WARMUP)[""],
    # Back-to-back calls, without synchronisation in between.
    "small": lambda call: alternate({"": call}, 0.0, ROUNDS, IN_A_ROW, clock_of("cuda"), IN_A_ROW)[""]}


def copy_bandwidth(device: torch.device) -> float:
    """Returns bytes per second, read and written."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(TIMES[device.type](lambda: target.copy_(source)))


# ---- backends ----------------------------------------------------------------------------------------------------


def available(backends: Sequence[str]) -> list[str]:
    """Returns the backends, without FlagGems if it is not installed."""
    return [b for b in backends if b != FLAGGEMS or importlib.util.find_spec("flag_gems") is not None]


@contextlib.contextmanager
def backend_of(backend: str, case: Case, device: str) -> Iterator[Callable[..., Any] | None]:
    """Yields the operator by a backend, or None if the backend would only pass the call on to eager."""
    if backend == ACCELERATE:
        with accelerate(device, wait=True):
            yield case.run
        return
    if backend != FLAGGEMS:
        yield compiled(case.run, backend)
        return
    gems = importlib.import_module("flag_gems")
    with gems.use_gems():
        yield case.run if case.operator in gems.all_registered_keys() else None


# ---- results -----------------------------------------------------------------------------------------------------


def flat(result: Any) -> Tensors:
    return (result,) if isinstance(result, Tensor) else tuple(t for t in result if isinstance(t, Tensor))


def computed(run: Callable[..., Any], case: Case, inputs: Tensors) -> Tensors:
    """Returns the results; the inputs stay unchanged."""
    return flat(run(*(inputs[0].clone(), *inputs[1:]) if case.in_place else inputs))


def widened(inputs: Tensors) -> Tensors:
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def error(got: Tensors, exact: Tensors) -> float:
    """Returns the largest error of the results, relative to the largest value of each; a NaN stays a NaN."""
    worst = torch.zeros((), dtype=torch.float64)
    for value, wanted in zip(got, exact):
        if value.is_floating_point():
            # Where both hold the same infinity, or NaN, there is no error.
            same = (value.double() == wanted) | (value.isnan() & wanted.isnan())
            off = torch.where(same, 0.0, (value.double() - wanted).abs()).max()
            scale = wanted.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(torch.finfo(value.dtype).tiny)
            worst = torch.maximum(worst, (off / scale).cpu())
    return worst.item()


def fault(got: Tensors, eager: Tensors, found: float | None, of_eager: float) -> str | None:
    """Returns what is wrong with results whose error is `found` (None: random ones), or None."""
    for a, b in zip(got, eager):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype}{list(a.shape)} where eager gives {b.dtype}{list(b.shape)}"
        if found is not None and not a.is_floating_point() and not torch.equal(a, b):
            return f"{(a != b).double().mean().item():.1e} of the indices differ from eager's"
    if len(got) != len(eager):
        return f"{len(got)} results where eager gives {len(eager)}"
    if found is not None and not found <= max(EAGER_ERRORS * of_eager, TOLERANCES[eager[0].dtype]):
        return f"off by {found:.1e} of the largest value, eager by {of_eager:.1e}"
    return None


# ---- one case ----------------------------------------------------------------------------------------------------


def measure_case(case: Case, draw: Draw, backends: Sequence[str], bandwidth: float, limit: float = 120.0) -> FloorRow:
    """Times and checks one case; each backend has `limit` seconds for it, including compilation."""
    row, late = FloorRow(case.name, case.group, case.direction), TimeoutError(f"took longer than {limit:g} seconds")
    try:
        with deadline(limit, late):
            torch.manual_seed(0)
            inputs = case.make(draw)
            eager = computed(case.run, case, inputs)
            exact = () if case.random else computed(case.run, case, widened(inputs))
            of_eager = error(eager, exact)
        row.bytes = case.moved(inputs, eager)
        row.floor = row.bytes / bandwidth
        for backend in backends:
            try:
                with deadline(limit, late), backend_of(backend, case, draw.device.type) as run:
                    if run is not None:
                        measure_backend(row, backend, run, case, inputs, eager, exact, of_eager, draw.clock)
            except Exception as failure:  # a failing backend is a result to report, not the end of the run
                row.errors[backend] = message(failure)
    except Exception as failure:  # as above: without inputs or a reference there is nothing to time
        row.errors["eager"] = message(failure)
    return row


def measure_backend(row: FloorRow, backend: str, run: Callable[..., Any], case: Case, inputs: Tensors, eager: Tensors,
                    exact: Tensors, of_eager: float, clock: str) -> None:
    got = computed(run, case, inputs)
    found = None if case.random else error(got, exact)
    if found is not None:
        row.accuracy[backend] = found
    if (wrong := fault(got, eager, found, of_eager)) is not None:
        row.errors[backend] = f"wrong results: {wrong}"
    del got
    own = (inputs[0].clone(), *inputs[1:]) if case.in_place else inputs
    for _ in range(SETTLED if backend == ACCELERATE else 0):
        run(*own)
    row.seconds[backend] = statistics.median(TIMES[clock](lambda: run(*own)))


def measure(cases: Sequence[Case], draw: Draw, backends: Sequence[str], bandwidth: float,
            limit: float) -> Iterator[FloorRow]:
    for case in cases:
        yield measure_case(case, draw, backends, bandwidth, limit)
        torch.compiler.reset()
        gc.collect()
        if draw.device.type == "cuda":
            torch.cuda.empty_cache()


def drawer(size: str, dtype: str, target: str, strided: bool = False) -> Draw:
    clock = "small" if (size, target) == ("small", "cuda") else target
    return Draw(SIZES[size], getattr(torch, dtype), torch.device(target), strided, clock)


# ---- reports -----------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[FloorRow], backends: Sequence[str], bandwidth: float) -> dict[str, Any]:
    """Returns geometric means of the ratios to the floor, over each backend's cases, and the same without grid
    sampling."""
    def mean(backend: str, kept: Callable[[FloorRow], bool]) -> float | None:
        ratios = [r for row in rows if kept(row) and (r := row.ratio(backend)) is not None]
        return geometric_mean(ratios) if ratios else None

    return {"bandwidth": bandwidth,
            "mean": {b: mean(b, lambda row: True) for b in backends},
            "mean without sampling": {b: mean(b, lambda row: row.group != "sampling") for b in backends}}


def mark(row: FloorRow, backend: str) -> str:
    return "" if backend not in row.errors else "!" if backend in row.seconds else "failed"


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def line(row: FloorRow, backends: Sequence[str]) -> str:
    """Returns the text of a row, printed before the others are finished."""
    parts = [f"{b} {mark(row, b)}{times(row.ratio(b))}" for b in backends if b in row.seconds or b in row.errors]
    return f"{row.name} {row.mode}: floor {row.floor * 1e3:.3f} ms; {', '.join(parts)}"
