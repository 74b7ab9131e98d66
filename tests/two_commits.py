"""Compares the speed of two trees: for each case, calls of the one and of the other in turns, in one run.

    git worktree add build/before COMMIT
    python tests/two_commits.py build/before . --kind host,ops --target cpu --json build/two.json

Kinds: `host` (compiled calls, training calls and optimizer steps on small tensors), `accelerated` (eager ones),
`device` (calls on torch.device("flambeau")), `ops` and `models` (the cases of `flambeau bench`). Each tree has its
own processes, which prepare all cases in parallel. Then one case is measured at a time, and its two processes take
turns. On the CPU the clock is the thread's, which does not count waiting for a busy core; on a GPU, `host` and
`accelerated` exclude the GPU's time. A control that runs only torch shows how far two processes differ anyway.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import selectors
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

BURST = {"host": 0.001, "accelerated": 0.001, "device": 0.001, "ops": 0.02, "models": 0.06}  # seconds of calls in a row
WHOLE = ("ops", "models")  # kinds that include the device's time
LATE = 3.0  # seconds that a process gets to finish the case that it is preparing
QUEUE = 40  # calls that fit into a GPU's queue, so that the host does not wait
STEADY = 40  # calls before the first measurement, in which kernels are chosen


# ---- cases, in the process of one tree -----------------------------------------------------------------------------

Cases = dict[str, Callable[[], Callable[[], Any]]]  # name -> a function that prepares the case and returns its call


def host_cases(device: str, accelerated: bool = False) -> Cases:
    import torch
    import torch.nn.functional as F
    from torch import nn

    import flambeau

    compiled = partial(torch.compile, backend="flambeau")

    def small(x: Any, y: Any) -> Any:
        return (x * 2 + y).relu()

    def many(*xs: Any) -> list[Any]:
        return [x * 2 for x in xs]

    def control() -> Callable[[], Any]:
        x, y = torch.randn(2, 16, 16, device=device)
        return lambda: x + y

    def call() -> Callable[[], Any]:
        run = compiled(small)
        x, y = torch.randn(2, 16, 16, device=device)
        return lambda: run(x, y)

    def call_many() -> Callable[[], Any]:
        run = compiled(many)
        xs = list(torch.randn(20, 16, device=device))
        return lambda: run(*xs)

    def dynamic() -> Callable[[], Any]:
        run = compiled(lambda x, y: (x * 3 - y).relu(), dynamic=True)
        x, y = torch.randn(2, 16, 16, device=device)
        return lambda: run(x, y)

    def training() -> Callable[[], Any]:
        w = torch.randn(16, 16, device=device, requires_grad=True)
        x = torch.randn(16, 16, device=device)
        run = compiled(lambda x, w: (x * w).sigmoid().sum())
        return lambda: torch.autograd.grad(run(x, w), w)

    def network() -> Callable[[], Any]:
        model = nn.Sequential(nn.Linear(16, 32), nn.Hardswish(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)
        x = torch.randn(8, 16, device=device)
        run = compiled(model)
        weights = list(model.parameters())
        return lambda: torch.autograd.grad(run(x).sum(), weights)

    def parameters() -> list[Any]:
        made = [torch.randn(16, 16, device=device, requires_grad=True) for _ in range(100)]
        for p in made:
            p.grad = torch.randn_like(p)
        return made

    def compiled_step(kind: Any, **options: Any) -> Callable[[], Any]:
        return compiled(kind(parameters(), **options).step)

    def step(kind: Any, **options: Any) -> Callable[[], Any]:
        return kind(parameters(), **options).step

    def clipping() -> Callable[[], Any]:
        ps = parameters()
        return lambda: nn.utils.clip_grad_norm_(ps, 1.0)

    def softmax() -> Callable[[], Any]:
        x = torch.randn(256, 300, device=device)
        return lambda: F.softmax(torch.cumsum(x, 1), 1)

    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    if accelerated:
        flambeau.accelerate(device)
        return {"SGD": lambda: step(sgd, lr=1e-3, momentum=0.9), "AdamW": lambda: step(adam, lr=1e-3),
                "clipping": clipping, "cumsum, softmax": softmax}
    return {
        "control: torch's own": control, "call": call, "call, any size": dynamic, "training call": training,
        "call of 20 tensors": call_many, "training call of a network": network,
        "SGD": lambda: compiled_step(sgd, lr=1e-3, momentum=0.9), "AdamW": lambda: compiled_step(adam, lr=1e-3),
    }


def device_cases(_: str) -> Cases:
    import torch
    import torch.nn.functional as F

    def on(device: str, run: Callable[..., Any]) -> Callable[[], Any]:
        x, y = (torch.randn(64, 64).to(device) for _ in range(2))
        return lambda: run(x, y)

    calls: dict[str, Callable[..., Any]] = {
        "add": lambda x, y: x + y, "times a number": lambda x, y: x * 2.5, "add_": lambda x, y: x.add_(y),
        "relu": lambda x, y: x.relu(), "sum": lambda x, y: x.sum(1), "softmax": lambda x, y: x.softmax(1),
        "product": lambda x, y: x @ y, "layer norm": lambda x, y: F.layer_norm(x, (64,)), "view": lambda x, y: x.t()}
    return {"control: torch's CPU": partial(on, "cpu", calls["add"])} | {
        name: partial(on, "flambeau", run) for name, run in calls.items()}


def op_cases(device: str) -> Cases:
    import torch

    from flambeau.bench import floor_cases, floors, ops

    if device == "cpu":
        def on_cpu(case: Any, dtype: Any, direction: str) -> Callable[[], Any]:
            torch.manual_seed(0)
            return ops.operator_step(case, case.make(dtype), direction, "flambeau")

        return {f"{case.name} {str(dtype)[6:]} {direction}":
                partial(on_cpu, case, dtype, direction)
                for case, dtype, direction in ops.variants()}

    draw = floors.drawer("full", "float32", device)

    def on_gpu(case: Any) -> Callable[[], Any]:
        inputs, run = case.make(draw), torch.compile(case.run, backend="flambeau")
        return lambda: run(*inputs)

    return {f"{case.name} {case.direction}": partial(on_gpu, case) for case in floor_cases.CASES}


def model_cases(device: str) -> Cases:
    from flambeau.bench import harness
    from flambeau.bench.models import SUITE

    size = "small" if device == "cpu" else "large"

    def make(name: str, mode: str) -> Callable[[], Any]:
        built = SUITE[name].build(size, device=device)
        step = {"train": harness.training_step, "infer": harness.inference}[mode]
        return step(built, built.make_inputs(), "flambeau")

    return {f"{name} {mode}": partial(make, name, mode) for name in SUITE for mode in ("train", "infer")}


CASES: dict[str, Callable[[str], Cases]] = {
    "host": host_cases, "accelerated": partial(host_cases, accelerated=True), "device": device_cases, "ops": op_cases,
    "models": model_cases}


def enter(tree: Path, group: str) -> Any:
    """Registers this tree's entry points with torch, as the installed package may be another tree."""
    scripts = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = scripts[group]["flambeau"].partition(":")
    return getattr(importlib.import_module(module), name)


def work(tree: Path, kind: str, device: str) -> None:
    """Answers lines of JSON: [name] prepares a case, [name, n] returns the seconds of each of n calls, [name, 0] drops
    the case."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch

    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 10**6
    torch.set_num_threads(1)
    torch._dynamo.register_backend(enter(tree, "torch_dynamo_backends"), name="flambeau")
    if kind == "device":
        enter(tree, "torch.backends")()
    cases, calls = CASES[kind](device), {}
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    if kind == "device":
        wait = torch.get_device_module("flambeau").synchronize
    clock = time.thread_time if device == "cpu" else time.perf_counter

    def seconds(call: Callable[[], Any], n: int) -> float:
        wait()
        start = clock()
        for _ in range(n):
            call()
        if kind in WHOLE:
            wait()
        took = (clock() - start) / n
        wait()
        return took

    def answer(value: Any) -> None:
        if device == "cuda" and not isinstance(value, list) and (not counts or not counts[0]):
            torch.cuda.empty_cache()  # all cases together would not fit into memory
        print(json.dumps(value), file=answers, flush=True)

    counts: list[int] = []
    answer(list(cases))
    for line in sys.stdin:
        name, *counts = json.loads(line)
        try:
            if counts == [0]:
                del calls[name]
                answer(0)
                continue
            if counts:
                answer(seconds(calls[name], counts[0]))
                continue
            calls[name] = cases[name]()
            for _ in range(3 if kind in WHOLE else STEADY):
                calls[name]()
            wait()
            answer(seconds(calls[name], 3))
        except Exception as error:  # the other tree may support a case that this one does not
            answer(f"{type(error).__name__}: {error}"[:300])


# ---- turns ---------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, tree: Path, kind: str, device: str) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")]),
               "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
               "FLAMBEAU_CACHE_DIR": os.environ.get("FLAMBEAU_CACHE_DIR", str(Path.home() / ".cache/flambeau"))
               + f"/{tree.resolve().name}"}
        os.makedirs(env["FLAMBEAU_CACHE_DIR"], mode=0o700, exist_ok=True)
        self.process = subprocess.Popen([sys.executable, __file__, str(tree), str(tree), "--work", "--kind", kind,
                                         "--target", device], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        self.waiting: list[str] = []  # cases that are still to be prepared
        self.ready: dict[str, float | str] = {}
        self.busy = False  # still preparing a case when the time for that was over

    def ask(self, *words: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else "the process ended"

    def prepare_next(self) -> None:
        if self.waiting:
            self.ask(self.waiting[0])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def prepare(workers: list[Worker], until: float) -> None:
    """Lets all workers prepare their cases in parallel."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            worker.prepare_next()
        open_ones = {id(w) for w in workers if w.waiting}
        while open_ones and time.monotonic() < until:
            for key, _ in selector.select(1.0):
                worker = key.data
                if id(worker) not in open_ones:
                    continue
                worker.ready[worker.waiting.pop(0)] = answer = worker.answer()
                if not worker.waiting or answer == "the process ended":
                    open_ones.remove(id(worker))
                else:
                    worker.prepare_next()
        for worker in workers:
            worker.busy = worker.process.poll() is None and id(worker) in open_ones


def measure(pair: tuple[Worker, Worker], name: str, burst: float, most: int, limit: float) -> dict[str, Any]:
    for w in pair:
        if w.busy and select.select([w.process.stdout], [], [], LATE)[0]:
            w.ready[w.waiting.pop(0)] = w.answer()
            w.busy = False
    first = [w.ready.get(name, "not ready in time") for w in pair]
    if errors := [f for f in first if isinstance(f, str)] or ["still busy"] * any(w.busy for w in pair):
        return {"name": name, "error": errors[0]}
    count = max(1, min(most, int(burst / max(min(first), 1e-7))))
    times: tuple[list[Any], list[Any]] = [], []
    for w in pair:  # allocate memory again, which was released after the preparation
        w.ask(name, min(count, 3))
        w.answer()
    end = time.monotonic() + limit
    while (time.monotonic() < end or len(times[0]) < 5) and not any(isinstance(t[-1], str) for t in times if t):
        turn = len(times[0]) % 2
        for k in (turn, 1 - turn):
            pair[k].ask(name, count)
            times[k].append(pair[k].answer())
    for w in pair:
        w.ask(name, 0)
        w.answer()
    if errors := [t for t in (*times[0], *times[1]) if isinstance(t, str)]:
        return {"name": name, "error": errors[0]}
    pairs = [new / old for old, new in zip(*times)]
    before, after = (statistics.median(t) for t in times)
    low, _, high = statistics.quantiles(pairs, n=4)
    return {"name": name, "before": before, "after": after, "ratio": statistics.median(pairs), "low": low, "high": high,
            "least": min(times[1]) / min(times[0]), "rounds": len(pairs)}


@contextlib.contextmanager
def workers_of(trees: list[Path], kind: str, device: str, jobs: int, only: str | None
               ) -> Iterator[list[tuple[Worker, Worker]]]:
    made: list[Worker] = []
    try:
        pairs = []
        for _ in range(jobs):
            made += (old := Worker(trees[0], kind, device), new := Worker(trees[1], kind, device))
            pairs.append((old, new))
        for k, (old, new) in enumerate(pairs):
            known, also = old.answer(), new.answer()
            names = [n for n in known if n in also and (not only or any(part in n for part in only.split(",")))]
            for worker in (old, new):
                worker.waiting = names[k::jobs]
        yield pairs
    finally:
        for worker in made:
            worker.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--kind", default="host", help=f"some of {','.join(CASES)}, with the number of pairs of "
                        "processes that prepare at once: host,ops:4")
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="NAMES", help="cases whose name contains one of these, separated by commas")
    parser.add_argument("--prepare", type=float, default=3600.0, metavar="SECONDS", help="for preparing all cases")
    parser.add_argument("--limit", type=float, default=2.0, metavar="SECONDS", help="for measuring one case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.before, args.kind, args.target)
        return
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + args.prepare
    kinds = {kind: int(jobs or 1) for kind, _, jobs in (part.partition(":") for part in args.kind.split(","))}
    with contextlib.ExitStack() as stack:
        pairs = {kind: stack.enter_context(workers_of([args.before, args.after], kind, args.target, jobs, args.only))
                 for kind, jobs in kinds.items()}
        names = [(kind, pair, name) for kind in kinds for pair in pairs[kind] for name in pair[0].waiting]
        prepare([worker for kind in kinds for pair in pairs[kind] for worker in pair], until)
        for kind, pair, name in names:
            most = QUEUE if args.target == "cuda" and kind not in WHOLE else 10_000
            row = {"kind": kind, **measure(pair, name, BURST[kind], most, args.limit)}
            rows.append(row)
            print(line(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"target": args.target, "rows": rows}, indent=1))
    for kind in kinds:
        if ratios := [row["ratio"] for row in rows if row["kind"] == kind and "ratio" in row]:
            print(f"{kind}, {args.target}: geometric mean {statistics.geometric_mean(ratios):.3f}, worst "
                  f"{max(ratios):.3f}, {sum(r > 1.02 for r in ratios)} of {len(ratios)} beyond 1.02")


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['kind']}, {row['name']}: {row['error']}"
    return (f"{row['kind']}, {row['name']}: {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}; minima "
            f"{row['least']:.3f}), {row['before'] * 1e6:.1f} to {row['after'] * 1e6:.1f} us")


if __name__ == "__main__":
    main()
