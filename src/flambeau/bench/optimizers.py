"""Measures optimizer steps over many tensors: torch's foreach and fused forms, ours compiled, ours accelerated.

    flambeau bench optimizers --target cuda

The floor is each parameter, gradient and state read once, and each parameter and state written once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flambeau.bench.floors import FloorRow
from flambeau.bench.harness import clock_of, message
from flambeau.optim.eager_steps import EagerSteps

STEPS = 20
# (class, options, the number of float32 values read or written for each element of a parameter)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}, 7),
    "Adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-2}, 7),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, 5),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}, 5),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-3}, 5),
}
FUSED = ("AdamW", "Adam", "SGD, momentum")  # on every device


def tensor_sets(small: bool) -> dict[str, list[tuple[int, int]]]:
    draw = random.Random(0)
    rows, columns = ([1, 3, 17], [1, 2, 64]) if small else ([1, 3, 17, 128, 1000, 4096], [1, 2, 64, 129, 512])
    return {"200 equal": [(16, 16) if small else (1024, 1024)] * 200,
            "2,000 mixed": [(draw.choice(rows), draw.choice(columns)) for _ in range(2000)]}


@dataclass
class StepRow(FloorRow):
    """A measured optimizer. `first`: the first call, which compiles; `host`: the host's part of a step."""

    first: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)


def parameters(shapes: Sequence[tuple[int, int]], device: str) -> list[Tensor]:
    draw = torch.Generator(device).manual_seed(0)
    made = [torch.randn(s, device=device, generator=draw).requires_grad_() for s in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, device=device, generator=draw)
    return made


def measure(device: str, only: str | None, backends: Sequence[str], bandwidth: float, small: bool = False,
            ) -> Iterator[StepRow]:
    for size, shapes in tensor_sets(small).items():
        for name, (kind, options, numbers) in OPTIMIZERS.items():
            if only and only not in f"{name}, {size}":
                continue
            moved = 4 * numbers * sum(a * b for a, b in shapes)
            row = StepRow(f"{name}, {size}", "optimizer", "step", moved, moved / bandwidth)
            want: list[Tensor] | None = None
            for backend in backends:
                if backend == "fused" and name not in FUSED:
                    continue
                tensors = parameters(shapes, device)
                try:
                    with stepping(kind(tensors, **options, **({"fused": True} if backend == "fused" else
                                                              {"foreach": True})), backend, device) as step:
                        measure_backend(row, backend, step, device)
                except Exception as error:
                    row.errors[backend] = message(error)
                    continue
                want = tensors if want is None else want
                if any(not torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(tensors, want, strict=True)):
                    row.errors[backend] = f"other parameters than {backends[0]}'s"
            yield row


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, backend: str, device: str) -> Iterator[Callable[[], Any]]:
    """Yields the step of an optimizer by one of the backends."""
    torch.compiler.reset()
    accelerated = EagerSteps(device) if backend == "accelerate" else None
    try:
        yield torch.compile(optimizer.step, backend="flambeau") if backend == "flambeau" else optimizer.step
    finally:
        if accelerated is not None:
            accelerated.undo()


def measure_backend(row: StepRow, backend: str, step: Callable[[], Any], device: str) -> None:
    """Times consecutive steps, without waiting for the device between them."""
    finished = clock_of(device)
    start = finished()
    step()
    row.first[backend] = finished() - start
    for _ in range(2):
        step()
    start = finished()
    for _ in range(STEPS):
        step()
    row.host[backend] = (time.perf_counter() - start) / STEPS
    row.seconds[backend] = (finished() - start) / STEPS
