"""Measures activation offloading: a training step of LM 24 that keeps less on the device, against one that keeps all.

    flambeau bench offload --target cuda --json results/offload-cuda.json

Each wish is a part (`parts`), which compiles while others do, and is timed alone. The peak is that of a step with
parameters, inputs and gradients, as torch's allocator counts it. Loss and gradients are compared bit by bit with those
of the step that keeps all.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.bench.harness import alternate, clock_of, own_code, wanted
from flambeau.bench.models import Inputs
from flambeau.bench.networks import NETWORKS
from flambeau.bench.parts import Talk, absorb, run, threads

NETWORK = "lm24"
PREPARE = 0.6  # the share of the time after which nothing more is compiled
WARM = 2  # steps
ROUNDS = (7, 40)
# Shares of the peak, with options. With eager's numerics, recomputed values have the same bits; these steps use
# deterministic kernels, since their bits are compared.
EAGER = {"numerics": "eager"}
WISHES: dict[str, tuple[float, dict[str, Any]]] = {
    "0.3": (0.3, {}), "0.6": (0.6, {}), "0.3, numerics=eager": (0.3, EAGER), "0.33, numerics=eager": (0.33, EAGER),
    "0.6, numerics=eager": (0.6, EAGER)}
MIB = 2**20


@dataclass
class OffloadRow:
    """The results of a wish, by kind: keep, less."""

    name: str
    ms: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    equal: bool | None = None  # whether the bits of loss and gradients are equal
    steady: bool | None = None  # whether two steps that keep all have the same bits
    differ: float | None = None  # the largest difference, relative to the largest value of a tensor
    notes: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


def part(talk: Talk, wish: str, device: str, size: str, seconds: float) -> None:
    """Measures one wish, in a process of its own."""
    from flambeau.debug import collect

    if device == "flambeau":
        from flambeau.device.enable import enable_device

        enable_device()
    share, options = WISHES[wish]
    cuda = device == "cuda"
    if options:
        torch.use_deterministic_algorithms(True)  # with warnings only, attention would not be deterministic
    with torch.device(device if cuda else "cpu"):  # the CPU would take seconds for the weights
        built = NETWORKS[NETWORK].build(size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    model, inputs = built.module, built.make_inputs()
    there = sum(t.numel() * t.itemsize for t in (*model.parameters(), *inputs))
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    found: dict[str, list[Tensor]] = {}
    for kind, less in (("keep", {}), ("less", {"offload": share})):
        steps[kind] = training_step(model, inputs, built.loss, f"{wish} {kind}", contractions="library", **options,
                                    **less)
        with collect() as compiled:
            found[kind], used = peak_of(steps[kind], model, device)
        talk.tell(peak_mib={kind: (used + there) / MIB})
    talk.tell(equal=all(map(torch.equal, *found.values())), differ=max(map(difference, *found.values())),
              notes=[note for g in compiled for note in g.program.notes if "MiB" in note][:12])
    talk.tell(steady=all(map(torch.equal, found["keep"], steps["keep"]())))
    del found
    talk.turn()
    times = alternate(steps, seconds, ROUNDS, 1, clock_of(device))
    talk.tell(ms={kind: 1e3 * statistics.median(t) for kind, t in times.items()})


def difference(a: Tensor, b: Tensor) -> float:
    largest = b.double().abs().max()
    return float((a.double() - b.double()).abs().max() / largest) if largest else float(a.any())


def training_step(model: nn.Module, inputs: Inputs, loss: Any, label: str, **options: Any
                  ) -> Callable[[], list[Tensor]]:
    """Returns a training step; the loss is part of the compiled function."""
    def call(*given: Tensor) -> Tensor:
        *args, target = given
        return loss(model(*args), target)

    made = torch.compile(own_code(call, label), backend="flambeau", options=options)

    def step() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        found = made(*inputs)
        found.backward()
        return [found.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return step


def peak_of(step: Callable[[], list[Tensor]], model: nn.Module, device: str) -> tuple[list[Tensor], int]:
    """Returns the results of a step, and its peak of bytes in addition to those allocated before it."""
    module = torch.get_device_module(device)
    for _ in range(WARM):
        last = step()
    last = [t.clone() for t in last]
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.accelerator.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    step()
    torch.accelerator.synchronize()
    return last, module.max_memory_allocated() - before


def measure(device: str, size: str, only: str | None, jobs: int, limit: float, beside: Path | None = None
            ) -> Iterator[list[OffloadRow]]:
    """Yields the rows, again whenever there is more in them. `limit`: seconds for all of it."""
    rows = {name: OffloadRow(name) for name in WISHES if wanted(name, only)}
    seconds = min(2.0, limit * (1 - PREPARE) / max(len(rows), 1) / 5)
    parts = {name: {"wish": name, "device": device, "size": size, "seconds": seconds} for name in rows}
    for name, told in run("flambeau.bench.offload", parts, jobs, limit, limit * PREPARE, threads(jobs), beside):
        absorb(rows[name], told)
        yield list(rows.values())


def summarise(rows: Sequence[OffloadRow]) -> dict[str, Any]:
    """Returns, for each wish, how much less memory and how much more time it takes, relative to the step that keeps
    all."""
    return {row.name: {what: round(sign * (found["less"] / found["keep"] - 1), 4)
                       for what, sign, found in (("memory", -1, row.peak_mib), ("time", 1, row.ms))
                       if {"keep", "less"} <= found.keys()} for row in rows}
