"""Measuring: the backends alternate in one process, so that changes of the machine affect all of them.

A backend is "eager", or a `torch.compile` backend with options after a colon:
"inductor:freezing=True+max_autotune=False".
"""

import ast
import copy
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track as rich_track
from torch import Tensor, nn

from flambeau.bench.models import SUITE, Built, without_dropout

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Results = dict[str, Tensor]
DRAWS = (1, 2, 3)  # seeds of the inputs on which results are compared
NOISY = 0.25  # a spread from which on a time is marked


@dataclass
class Row:
    """One measured case. `errors` holds the message of a backend that failed; it then has no time.

    `seconds` are medians and `best` minima; if `spread` is large the machine was busy with something else.
    """

    name: str
    group: str
    mode: str
    seconds: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, backend: str, base: str) -> float | None:
        """Returns how many times faster than `base` it is, or None if one of them has no time."""
        if backend in self.seconds and base in self.seconds:
            return self.seconds[base] / self.seconds[backend]
        return None


# ---- statistics ------------------------------------------------------------------------------------------


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def spread(times: Sequence[float]) -> float:
    """Returns the interquartile range relative to the median: how far to trust the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def alternate(calls: Mapping[str, Callable[[], Any]], limit: float = 3.0, rounds: tuple[int, int] = (5, 200),
              warmup: int = 2, clock: Callable[[], float] = time.perf_counter, count: int = 1, burst: float = 0.0,
              wait: Callable[[], Any] = lambda: None) -> dict[str, list[float]]:
    """Returns seconds of each callable: every round times each once, in rotated order, until `limit` seconds are gone.

    At least `rounds[0]` rounds are run and at most `rounds[1]`. A time is the mean of `count` consecutive calls, or of
    as many as take `burst` seconds; `wait` is called before them, while no clock runs.
    """
    def seconds(call: Callable[[], Any], count: int) -> float:
        wait()
        start = clock()
        for _ in range(count):
            call()
        return (clock() - start) / count

    if not calls:
        return {}
    for _ in range(warmup):
        for call in calls.values():
            call()
    counts = {name: max(1, min(1000, int(burst / seconds(call, 2)))) if burst else count
              for name, call in calls.items()}
    names, (least, most) = list(calls), rounds
    times: dict[str, list[float]] = {name: [] for name in names}
    end = clock() + limit
    for turn in range(most):
        if turn >= least and clock() >= end:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(seconds(calls[name], counts[name]))
    return times


def group_ratios(rows: Iterable[Row], backend: str, base: str) -> dict[str, float]:
    """Returns the geometric mean of the speed-ups in each group of rows, and over "all"."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratio = row.ratio(backend, base)
        if ratio is not None:
            ratios.setdefault(row.group, []).append(ratio)
            ratios.setdefault("all", []).append(ratio)
    return {group: geometric_mean(values) for group, values in ratios.items()}


# ---- what is measured ------------------------------------------------------------------------------------


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    if backend == "eager":
        return function
    name, _, text = backend.partition(":")
    options = {key: literal(value) for key, _, value in (item.partition("=") for item in text.split("+"))}
    return torch.compile(function, backend=name, options=options if text else None)


def literal(text: str) -> Any:
    """Parses a number, True, False or None; returns any other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def training_step(built: Built, inputs: tuple[Tensor, ...], backend: str) -> Callable[[], Tensor]:
    """Returns a step of forward, loss and backward. It drops the gradients at its start and leaves the weights
    unchanged."""
    module = built.module.train()

    def loss(*inputs: Tensor) -> Tensor:
        return built.loss(module(*inputs[:-1]), inputs[-1])

    run = compiled(loss, backend)

    def step() -> Tensor:
        module.zero_grad(set_to_none=True)
        value = run(*inputs)
        value.backward()
        return value

    return step


def inference(built: Built, inputs: tuple[Tensor, ...], backend: str) -> Callable[[], Tensor]:
    run = compiled(built.module.eval(), backend)

    def step() -> Tensor:
        with torch.no_grad():
            return run(*inputs[:-1])

    return step


STEPS = {"train": training_step, "infer": inference}


def results(built: Built, inputs: tuple[Tensor, ...], mode: str, backend: str) -> Results:
    """Returns the output of one step (the loss when training) and every gradient, by name."""
    found = {"output": STEPS[mode](built, inputs, backend)().detach()}
    if mode == "train":
        found |= {name: p.grad for name, p in built.module.named_parameters() if p.grad is not None}
    return found


def differences(got: Results, eager: Results, exact: Results) -> dict[str, float]:
    """Returns the error of the worst tensor: absolute, relative to its largest value, and as a multiple of eager's
    error.

    Eager's error against float64 counts as one rounding at least, since a tensor that eager gets exactly right says
    nothing about what an error of one rounding means.
    """
    if missing := eager.keys() ^ got.keys():
        raise ValueError(f"outputs or gradients differ in presence: {sorted(missing)}")

    def error(value: Tensor, reference: Tensor) -> float:
        return (value.double() - reference.double()).abs().max().item()

    worst = {"abs": 0.0, "rel": 0.0, "eager_errors": 0.0}
    for name, value in got.items():
        scale = eager[name].double().abs().max().item()
        rounding = torch.finfo(value.dtype).eps * scale
        absolute = error(value, eager[name])
        floor = max(error(eager[name], exact[name]), rounding)
        found = {"abs": absolute, "rel": absolute / scale if scale else absolute,
                 "eager_errors": error(value, exact[name]) / floor if floor else absolute}
        # A NaN must win, and max() drops it when it comes second.
        worst = {key: math.nan if math.isnan(found[key]) else max(worst[key], found[key]) for key in worst}
    return worst


def in_double(built: Built, inputs: tuple[Tensor, ...]) -> tuple[Built, tuple[Tensor, ...]]:
    def widen(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    return copied(built, dtype=torch.float64), tuple(map(widen, inputs))


def copied(built: Built, dtype: torch.dtype | None = None) -> Built:
    module: nn.Module = copy.deepcopy(built.module)
    return Built(module if dtype is None else module.to(dtype), built.make_inputs, built.loss)


def wanted(label: str, only: str | None) -> bool:
    """Whether the label contains one of the texts that commas separate."""
    return not only or any(text in label for text in only.split(","))


def message(error: Exception) -> str:
    error = getattr(error, "inner_exception", error)  # what a backend raised, without Dynamo's text around it
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def clock_of(device: str) -> Callable[[], float]:
    """Returns a clock that synchronises the device before it reads the time."""
    if device == "cpu":
        return time.perf_counter
    wait = torch.get_device_module(device).synchronize

    def synchronised() -> float:
        wait()
        return time.perf_counter()

    return synchronised


@contextmanager
def deadline(seconds: float, error: BaseException) -> Iterator[None]:
    """Raises the error if the block takes longer. Only the main thread receives signals; others run without a limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


UNSTEADY = "eager does not repeat itself"  # it adds in any order, or reads uninitialised memory


def measure_model(name: str, size: str, mode: str, backends: Sequence[str], limit: float = 3.0,
                  accuracy: bool = True, device: str = "cpu") -> Row:
    """Measures steady step times of one model, and how far each backend's results are from eager's."""
    built = SUITE[name].build(size, device=device)
    inputs, row = built.make_inputs(), Row(name, mode, mode)
    if accuracy:
        compare(row, built, mode, [b for b in backends if b != "eager"])
    torch.compiler.reset()
    steps = {b: STEPS[mode](copied(built), inputs, b) for b in backends if b not in row.errors}
    return timed(row, steps, limit, clock_of(device))


def compare(row: Row, built: Built, mode: str, backends: Sequence[str]) -> None:
    """Fills in the row's accuracy, for several draws of the inputs.

    More than one draw, since any rounding may move a value over the kink of a ReLU, which shows in the gradients as a
    difference of percents, in eager as well. It happens on few draws; a wrong kernel shows on all.
    """
    torch.compiler.reset()
    plain = copied(built)
    without_dropout(plain.module)
    draws = [plain.make_inputs(seed=seed) for seed in DRAWS]
    eager = [results(copied(plain), inputs, mode, "eager") for inputs in draws]
    exact = [results(*in_double(plain, inputs), mode, "eager") for inputs in draws]
    for backend in backends:
        candidate = copied(plain)
        try:
            row.accuracy[backend] = [differences(results(candidate, inputs, mode, backend), *wanted)
                                     for inputs, *wanted in zip(draws, eager, exact)]
        except Exception as error:  # a failing peer is a result to report, not the end of the run
            row.errors[backend] = message(error)


def timed(row: Row, steps: dict[str, Callable[[], Any]], limit: float,
          clock: Callable[[], float] = time.perf_counter) -> Row:
    """Fills in the row's times; a backend that fails in its first call is noted and left out."""
    working = {}
    for backend, step in steps.items():
        try:
            step()
            working[backend] = step
        except Exception as error:  # as in compare
            row.errors[backend] = message(error)
    for backend, times in alternate(working, limit, clock=clock).items():
        row.seconds[backend], row.best[backend] = statistics.median(times), min(times)
        row.spread[backend] = spread(times)
    return row


def own_code(function: F, name: str) -> F:
    """Gives a function a code object of its own: otherwise Dynamo takes each case for a recompilation of the ones
    before, and checks their guards."""
    function.__code__ = function.__code__.replace(co_name=name)
    return function


# ---- reports ---------------------------------------------------------------------------------------------


def comparisons(backends: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs to compare: each backend with eager, and ours with each peer."""
    compilers = [b for b in backends if b != "eager"]
    pairs = [(b, "eager") for b in compilers if "eager" in backends]
    ours = [b for b in compilers if b.startswith("flambeau")]
    return pairs + [(b, peer) for b in ours for peer in compilers if peer not in ours]


def summarise(rows: Sequence[Row], backends: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns how many times faster each backend is, as means of groups."""
    return {f"{backend} over {base}": group_ratios(rows, backend, base)
            for backend, base in comparisons(backends)}


def progress(items: Sequence[T], label: str, console: Console) -> Iterator[T]:
    """Yields the items with a progress bar, which is silent if the output is not a terminal."""
    yield from rich_track(items, description=label, console=console, disable=not console.is_terminal,
                          transient=True)
