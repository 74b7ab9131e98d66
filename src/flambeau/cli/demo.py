"""`flambeau demo`: a tour. Trains two small networks on one batch, with eager, Inductor and Flambeau."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flambeau import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from flambeau.bench.models import Built
    from flambeau.pipeline import Compiled

# Large enough to show fusion, small enough for Inductor to finish in a minute on two cores with empty caches.
SIZES = {
    "gpt": {"batch": 4, "vocab": 1024, "time": 64, "dim": 192, "heads": 6, "depth": 2},
    "resnet": {"batch": 8, "image": 64, "width": 16, "blocks": 1, "classes": 10},
}
TITLES = {"gpt": "a transformer", "resnet": "a convolutional net"}
RATE = 0.05  # learning rate
SECONDS = 2.0  # of measured steps for each network

INTRO = """\
[bold]Flambeau[/] compiles PyTorch models: [cyan]torch.compile(model, backend="flambeau")[/].
Two small networks train for {steps} steps, from the same weights, with each of
{backends}. Kernel caches are empty. Each compiler first compiles
one linear layer, so that its start-up time is not counted below.
"""
LEGEND = """\
[dim]compile: the first step minus a later one. loss, weights: the largest difference
from eager, over all steps and after the last one. float32 has a relative rounding
error of 6e-08, and sums in another order round differently.[/]
"""
NEXT = """\
[bold]What to try next[/]
  [cyan]flambeau explain --demo --text[/]  see what is fused, and the generated C++
  [cyan]flambeau explain --model gpt[/]    the same for a network
  [cyan]flambeau ops --filter softmax[/]   see which operators are compiled, in which dtypes
  [cyan]flambeau bench models[/]           measure eight networks beside eager and Inductor
and in your own program:
  [cyan]torch.compile(model, backend="flambeau")[/]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="training steps (default: 5)")
    parser.add_argument("--no-inductor", action="store_true", help="leave out Inductor: a shorter tour")


@dataclass
class Run:
    """One network trained with one backend."""

    first: float = 0.0  # seconds of the first step, which compiles
    step: float = 0.0  # median seconds of the steps after it
    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    graphs: list[Compiled] = field(default_factory=list)
    error: str = ""


def run(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise OptionError(f"--steps is {args.steps}, expected at least 1")
    backends = ["eager", *(["inductor"] if not args.no_inductor else []), "flambeau"]
    console = Console(highlight=False)
    console.print(INTRO.format(steps=args.steps, backends=", ".join(backends)))
    with empty_caches(), spinner(console) as say:
        for backend in backends[1:]:
            say(f"{backend}: getting ready")
            get_ready(backend)
        ours = [show(console, name, train_all(name, backends, args.steps, say)) for name in SIZES]
    console.print(LEGEND)
    console.print(NEXT)
    return 1 if any(r.error for r in ours) else 0


# ---- surroundings ----------------------------------------------------------------------------------------


@contextmanager
def empty_caches() -> Iterator[None]:
    """Use empty caches: compiled code of earlier runs would make the compile times meaningless."""
    from flambeau.bench.compile_time import CACHES
    from flambeau.config import config

    with tempfile.TemporaryDirectory(prefix="flambeau-demo-", ignore_cleanup_errors=True) as folder:
        folders = {variable: str(Path(folder, name)) for variable, name in CACHES.items()}
        with patch.dict(os.environ, folders), config.override(cache_dir=Path(folder, "flambeau")):
            yield


@contextmanager
def spinner(console: Console) -> Iterator[Callable[[str], None]]:
    """Show what is happening: on one line of a terminal, or else one line for each thing."""
    if not console.is_terminal:
        yield lambda text: console.print(f"  {text} ...", markup=False)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)


def get_ready(backend: str) -> None:
    """Compile one linear layer: imports, tests of the compiler and precompiled headers happen here."""
    import torch

    from flambeau.bench.harness import compiled

    compiled(torch.nn.Linear(8, 8), backend)(torch.ones(8, 8)).sum().backward()


# ---- training --------------------------------------------------------------------------------------------


def train_all(name: str, backends: list[str], steps: int, say: Callable[[str], None]) -> dict[str, Run]:
    """Train a copy of the network with each backend, then measure their steps in turns."""
    import torch

    from flambeau.bench import harness
    from flambeau.bench.models import SUITE

    torch.compiler.reset()
    built = replace(SUITE[name], sizes={"demo": SIZES[name]}).build("demo")
    calls: dict[str, Callable[[], Any]] = {}
    runs: dict[str, Run] = {}
    for backend in backends:
        say(f"{TITLES[name]}: {backend} {'trains' if backend == 'eager' else 'compiles and trains'}")
        runs[backend] = Run()
        try:
            calls[backend] = train(harness.copied(built), backend, steps, runs[backend])
        except Exception as error:  # show the error beside the results of the others
            runs[backend].error = harness.message(error)
    say(f"{TITLES[name]}: measuring steps, in turns")
    for backend, times in harness.alternate(calls, SECONDS).items():
        runs[backend].step = statistics.median(times)
    return runs


def train(built: Built, backend: str, steps: int, out: Run) -> Callable[[], Any]:
    """Train, fill in `out`, and return the step (without the optimizer) for measuring."""
    import torch

    from flambeau.bench.harness import training_step
    from flambeau.debug import collect

    step = training_step(built, built.make_inputs(), backend)
    optimizer = torch.optim.SGD(built.module.parameters(), lr=RATE)
    with collect() as out.graphs:  # empty for eager and Inductor
        for number in range(steps):
            start = time.perf_counter()
            loss = step()
            if number == 0:
                out.first = time.perf_counter() - start
            optimizer.step()
            out.losses.append(loss.item())
    out.parameters = {name: p.detach().clone() for name, p in built.module.named_parameters()}
    return step


# ---- output ---------------------------------------------------------------------------------------


def show(console: Console, name: str, runs: dict[str, Run]) -> Run:
    """Print the results of one network, and return those of Flambeau."""
    console.print(table(TITLES[name], runs))
    for backend, r in runs.items():
        if r.error:
            console.print(f"  {backend} failed: {r.error}", markup=False)
    show_fusion(console, runs["flambeau"])
    return runs["flambeau"]


def table(title: str, runs: dict[str, Run]) -> Table:
    eager = runs["eager"]
    fell = f"loss {eager.losses[0]:.4f} -> {eager.losses[-1]:.4f}" if eager.losses else "eager failed"
    out = Table("backend", "compile", "step", "over eager", "loss", "weights",
                title=f"{title}, {fell}", title_justify="left", title_style="bold")
    for column in out.columns:
        column.justify, column.no_wrap = "left" if column is out.columns[0] else "right", True
    for backend, r in runs.items():
        if r.error:
            out.add_row(backend, "failed")
            continue
        compile_seconds = f"{max(r.first - r.step, 0):.1f} s" if r is not eager else ""
        cells = [compile_seconds, f"{r.step * 1e3:.1f} ms"]
        if r is not eager and not eager.error:
            loss, parameter = differences(r, eager)
            cells += [f"{eager.step / r.step:.2f} x", f"{loss:.1e}", f"{parameter:.1e}"]
        out.add_row(backend, *cells, style="bold" if backend == "flambeau" else None)
    return out


def differences(r: Run, eager: Run) -> tuple[float, float]:
    """The largest difference of a loss, and of a parameter after the last step, from eager's."""
    losses = max(abs(a - b) for a, b in zip(r.losses, eager.losses))
    return losses, max((p - eager.parameters[name]).abs().max().item() for name, p in r.parameters.items())


def show_fusion(console: Console, r: Run) -> None:
    from flambeau.report.program import summarise

    for graph in r.graphs:
        summary = summarise(graph)
        compiled_once = summary.count("kernel") - sum(bool(s.same_as) for s in summary.steps)
        console.print(f"  {summary.headline()} [dim]({compiled_once} different)[/]", soft_wrap=True)
    console.print()
