"""Measures large networks: step times, memory, first steps, and whether regions change any bit.

    flambeau bench compiled --target cuda --json results/compiled-cuda.json

Each network and mode is a part (`parts`), which compiles while others do, and is timed alone. `first_s` therefore are
seconds on a busy machine, and our later kinds find kernels that earlier ones compiled; `flambeau bench compile`
measures compile times. Memory is what a step needs beyond parameters and inputs: the peak that is allocated, and the
memory reserved, which is also what a recording holds while it does not run.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flambeau.bench.harness import alternate, clock_of, own_code, spread, wanted
from flambeau.bench.networks import DTYPES, NETWORKS
from flambeau.bench.parts import Talk, absorb, run, threads
from flambeau.testing.one_order import in_one_order

# Arguments of torch.compile, in the order in which they are tried.
KINDS: dict[str, dict[str, Any] | None] = {
    "eager": None, "ours": {"backend": "flambeau", "options": {"regions": True}},
    "whole": {"backend": "flambeau", "options": {"regions": False}}, "inductor": {"backend": "inductor"},
    "graphs": {"backend": "flambeau", "options": {"graphs": True}}, "reduce": {"mode": "reduce-overhead"},
}
RECORDED = ("graphs", "reduce")
PREPARE = 0.66  # the share of the time after which nothing more is compiled
WARM = 4  # steps after the first, in which recordings are made
BURST, ROUNDS = 0.08, (3, 7)  # seconds of consecutive steps that make one measurement; the number of measurements
MIB = 2**20


@dataclass
class CompiledRow:
    """A network in a mode. Values are by kind, except the counts of tensors (output, gradients, buffers) whose bits
    differ."""

    name: str
    mode: str
    ms: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    reserved_mib: dict[str, float] = field(default_factory=dict)
    tensors: int | None = None
    unequal_with_regions: int | None = None
    unequal_from_run_to_run: int | None = None
    unequal_recorded: int | None = None
    one_order: bool = False  # compared with deterministic kernels, since others differed from run to run
    not_replayed: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Case:
    """A network with its steps, which share parameters and inputs."""

    def __init__(self, name: str, mode: str, size: str, device: str) -> None:
        built = NETWORKS[name].build(size, device=device, dtype=DTYPES[name])
        self.train, self.cuda, self.clock = mode == "train", device == "cuda", clock_of(device)
        self.module, self.loss, self.inputs = built.module.train(self.train), built.loss, built.make_inputs()
        self.steps: dict[str, Callable[[], Tensor]] = {}

    def step(self, kind: str) -> Callable[[], Tensor]:
        module, loss, train, inputs = self.module, self.loss, self.train, self.inputs

        def call(*inputs: Tensor) -> Tensor:
            out = module(*inputs[:-1])
            return loss(out, inputs[-1]) if train else out

        own_code(call, f"step_{kind}")
        options = KINDS[kind]
        compiled = call if options is None else torch.compile(call, **options)

        def step() -> Tensor:
            if kind == "reduce":
                torch.compiler.cudagraph_mark_step_begin()
            if not train:
                with torch.no_grad():
                    return compiled(*inputs)
            self.clear()
            out = compiled(*inputs)
            out.backward()
            return out

        return step

    def clear(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def settle(self) -> tuple[int, int]:
        """Returns allocated and reserved bytes after everything unneeded was freed."""
        self.clear()
        gc.collect()
        if not self.cuda:
            return 0, 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def prepare(self, kind: str, talk: Talk) -> None:
        """Runs the first step and the warm-up steps, and measures the memory of one more."""
        allocated, reserved = self.settle()
        step, start = self.step(kind), self.clock()
        step()
        talk.tell(first_s={kind: self.clock() - start})
        for _ in range(WARM):
            step()
        if self.cuda:
            self.settle()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            talk.tell(reserved_mib={kind: (torch.cuda.max_memory_reserved() - reserved) / MIB})
            if kind not in RECORDED:  # a replay allocates nothing
                talk.tell(peak_mib={kind: (torch.cuda.max_memory_allocated() - allocated) / MIB})
        self.clear()
        self.steps[kind] = step

    def values(self, step: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Returns output, gradients and buffers of a step, and restores the buffers."""
        before = {name: t.clone() for name, t in self.module.named_buffers()}
        torch.manual_seed(3)
        found = {"output": step().detach().clone()}
        found |= {f"gradient of {name}": p.grad.clone() for name, p in self.module.named_parameters()
                  if p.grad is not None}
        for name, t in self.module.named_buffers():
            found[name] = t.clone()
            t.copy_(before[name])
        self.clear()
        return found

    def compare(self, talk: Talk) -> None:
        """Compares results with and without regions, and from run to run; if runs differ, with deterministic
        kernels."""
        def look(ours: Callable[[], Tensor], whole: Callable[[], Tensor]) -> tuple[int, int]:
            first = self.values(ours)
            counts = unequal(first, self.values(whole)), unequal(first, self.values(ours))
            talk.tell(tensors=len(first), unequal_with_regions=counts[0], unequal_from_run_to_run=counts[1])
            return counts

        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            _, unsteady = look(self.steps["ours"], self.steps["whole"])
        if unsteady:
            in_one_order(lambda: look(self.step("ours"), self.step("whole")))
            talk.tell(one_order=True)

    def compare_recorded(self, talk: Talk) -> None:
        """Compares the recording with plain calls; no verdict if plain calls differ from run to run."""
        first, recorded = self.values(self.steps["ours"]), self.values(self.steps["graphs"])
        if (count := unequal(first, recorded)) and unequal(first, self.values(self.steps["ours"])):
            talk.tell(skipped={"equality of recordings": "ours differs from run to run"})
        else:
            talk.tell(unequal_recorded=count)

    def measure(self, seconds: float) -> dict[str, dict[str, float]]:
        """Times consecutive steps, the kinds alternating."""
        times = alternate(self.steps, seconds, ROUNDS, clock=self.clock, burst=BURST)
        return {"ms": {kind: statistics.median(t) * 1e3 for kind, t in times.items()},
                "spread": {kind: spread(t) for kind, t in times.items()}}


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    from flambeau.compare.differences import difference

    return sum(not difference(name, a.get(name), b.get(name)).equal for name in a | b)


def part(talk: Talk, name: str, mode: str, size: str, device: str, kinds: Sequence[str], seconds: float) -> None:
    """Measures a network in a mode, in a process of its own."""
    import flambeau.debug
    from flambeau.torch_compat.dynamo import allow_recompiles

    allow_recompiles(64)
    case = Case(name, mode, size, device)
    eager = case.step("eager")
    for _ in range(2):  # allocates workspaces of libraries before memory is measured
        eager()
    for kind in kinds:
        talk.attempt(kind, partial(case.prepare, kind, talk))
    if {"ours", "whole"} <= case.steps.keys():
        talk.attempt("equality", partial(case.compare, talk))
    else:
        talk.tell(skipped={"equality": "needs ours and whole"})
    if {"ours", "graphs"} <= case.steps.keys():
        talk.attempt("equality of recordings", partial(case.compare_recorded, talk))
    case.settle()
    talk.turn()
    talk.tell(**case.measure(seconds))
    reasons: dict[str, int] = {}
    for tally in flambeau.debug.recordings():
        for why, count in tally.uncaptured.items():
            if "warm-up" not in why:
                reasons[why] = reasons.get(why, 0) + count
    talk.tell(not_replayed=reasons)


def measure(device: str, size: str, modes: Sequence[str], only: str | None, kinds: Sequence[str], jobs: int,
            limit: float) -> Iterator[list[CompiledRow]]:
    """Yields the rows, again whenever there is more in them. `limit`: seconds for all of it."""
    rows = {label: CompiledRow(name, mode) for mode in modes for name in NETWORKS
            if wanted(label := f"{name} {mode}", only)}
    skipped = {} if device == "cuda" else {kind: "nothing is recorded on the CPU" for kind in RECORDED if kind in kinds}
    memory = {} if device == "cuda" else {"memory": "not measured on the CPU"}
    turn = limit * (1 - PREPARE) / max(len(rows), 1)
    for row in rows.values():
        row.skipped |= skipped | memory
    parts = {name: {"name": row.name, "mode": row.mode, "size": size, "device": device, "seconds": turn / 2,
                    "kinds": [k for k in KINDS if k in kinds and k not in skipped]} for name, row in rows.items()}
    environment = threads(jobs) | ({"OMP_NUM_THREADS": "2"} if device == "cuda" else {})
    for name, told in run("flambeau.bench.compiled", parts, jobs, limit, limit * PREPARE, environment):
        absorb(rows[name], told)
        yield list(rows.values())
