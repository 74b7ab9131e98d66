"""Trains networks with `numerics="eager"`: counts bits that differ from eager's, and measures step times.

There is a part for each network (`numerics`). It compares losses, the first gradients, and parameters, state and
generator after the last step, with dropout and AdamW, both compiled; eager runs twice, as it may differ from itself.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.bench.bits import Finding, compiling, exactly, found, short, states
from flambeau.bench.harness import UNSTEADY, alternate, clock_of
from flambeau.bench.models import Built
from flambeau.bench.networks import DTYPES, NETWORKS, with_dropout
from flambeau.bench.parts import Talk
from flambeau.testing.one_order import in_one_order
from flambeau.torch_compat.dynamo import allow_recompiles


@dataclass(frozen=True)
class Size:
    """The size of a run. `draws` of weights and data are compared with float64 in batches of `batch` samples, before
    and after the other dtype; `kept`: seconds that a task has to leave for what follows, so that steps can be timed."""

    network: str
    steps: int
    batch: int
    draws: tuple[range, range]
    kept: dict[str, float]
    seconds: float


SIZES = {"large": Size("medium", 20, 8, (range(3), range(3, 21)),
                       {"errors": 30.0, "other dtype": 45.0, "more errors": 40.0}, 9.0),
         "tiny": Size("tiny", 3, 2, (range(1), range(1, 2)), {}, 0.0)}
KINDS: dict[str, dict[str, Any] | None] = {
    "eager": None, "exact": {"numerics": "eager"}, "fast": {"numerics": "fast"},
    "exact graphs": {"numerics": "eager", "graphs": True}, "fast graphs": {"numerics": "fast", "graphs": True}}
LEARNING_RATE = 1e-3


class Loss(nn.Module):
    def __init__(self, built: Built) -> None:
        super().__init__()
        self.module, self.loss = built.module, built.loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.module(*inputs[:-1]), inputs[-1])


def losing(name: str, size: str, dtype: torch.dtype, device: str) -> tuple[Loss, Built]:
    built = NETWORKS[name].build(SIZES[size].network, device=device, dtype=dtype)
    with_dropout(built.module)
    return Loss(built), built


def trained(name: str, size: str, dtype: torch.dtype, device: str) -> list[Finding]:
    """Returns a finding for losses, one for the first gradients, and one for the state at the end."""
    start, built = losing(name, size, dtype, device)
    data, steps = [built.make_inputs(seed=seed) for seed in (1, 2, 3)], SIZES[size].steps

    def run(by: Callable[[Any], Any]) -> dict[str, list[Tensor]]:
        module = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE)
        call, step = by(module), by(optimizer.step)
        torch.manual_seed(3)
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for k in range(steps):
            loss = call(*data[k % len(data)])
            loss.backward()
            gradients = gradients or [p.grad.clone() for p in module.parameters() if p.grad is not None]
            step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        generator = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
        end = [*module.state_dict().values(), *states(optimizer), generator]
        return {"losses": losses, "first gradients": gradients, f"after {steps} steps": end}

    def all_three() -> list[Finding]:
        eager, again = run(lambda f: f), run(lambda f: f)
        with compiling():
            ours = run(exactly)
        group, out = f"{name}, {short(dtype)}: losses, gradients, parameters and state after {steps} steps", []
        for what, tensors in eager.items():
            out.append(found(group, what, ours[what], tensors))
            if unsteady := found("", "", again[what], tensors).unequal:
                out[-1].note = f"{UNSTEADY}, in {unsteady:,} values; {out[-1].note}"
        return out

    return in_one_order(all_three)


def error(name: str, size: str, device: str, seed: int) -> tuple[float, float]:
    """Returns the errors of fast numerics against float64, as multiples of eager's: of the result, and of the
    gradients."""
    import flambeau.debug

    built = NETWORKS[name].build(SIZES[size].network, seed=seed, device=device, dtype=DTYPES[name])
    *inputs, _ = built.make_inputs(*(() if name == "dlrm" else (SIZES[size].batch,)), seed=seed + 1)
    report = flambeau.debug.compare(built.module, *inputs, numerics="fast", layers=False, locate=False)

    def ratio(rows: Any) -> float:
        known = [r for r in rows if r.ratio is not None]
        ours, eager = (sum(getattr(r, key) ** 2 * r.total for r in known) for key in ("rms_compiled", "rms_eager"))
        return (ours / eager) ** 0.5

    return ratio(report.results), ratio(report.gradients)


def step(name: str, size: str, device: str, options: dict[str, Any] | None) -> Callable[[], None]:
    """Returns a training step; of the optimizer, nothing is recorded."""
    module, built = losing(name, size, DTYPES[name], device)
    inputs, optimizer = built.make_inputs(), torch.optim.AdamW(module.parameters(), LEARNING_RATE)
    call: Any = module
    update: Any = optimizer.step
    if options is not None:
        call = torch.compile(module, backend="flambeau", options=options)
        update = torch.compile(update, backend="flambeau", options={"numerics": options["numerics"]})

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        call(*inputs).backward()
        update()

    return once


def part(talk: Talk, name: str, size: str, device: str) -> None:
    os.environ["FLAMBEAU_JOBS"] = "3"  # before it is read
    torch.set_num_threads(1)
    allow_recompiles(64)
    given = SIZES[size]
    ratios: list[tuple[float, float]] = []

    def train(dtype: torch.dtype) -> None:
        talk.tell(found=[asdict(f) for f in trained(name, size, dtype, device)])

    def errors(seeds: range) -> None:
        for seed in seeds:
            ratios.append(error(name, size, device, seed))
            # Medians over draws, not means: where an input of a rectifier is as near to zero as its error, a whole
            # gradient depends on its sign, and a wrong sign is an error of a thousand times.
            results, gradients = (statistics.median(r) for r in zip(*ratios))
            talk.tell(error={name: gradients}, error_of_results={name: results}, draws={name: len(ratios)})

    own = DTYPES[name]
    other = torch.float32 if own is torch.bfloat16 else torch.bfloat16
    talk.attempt(f"{name} {short(own)}", partial(train, own))
    for what, act in {"errors": partial(errors, given.draws[0]), "other dtype": partial(train, other),
                      "more errors": partial(errors, given.draws[1])}.items():
        talk.attempt(f"{name} {what}", act, talk.left() - given.kept.get(what, 0.0))
    torch.compiler.reset()
    steps: dict[str, Callable[[], Any]] = {}

    def prepare(kind: str) -> None:
        made = step(name, size, device, KINDS[kind])
        for _ in range(4):
            made()
        steps[kind] = made

    for kind in KINDS:
        if "graphs" not in kind or device == "cuda":
            talk.attempt(f"{name} {kind}", partial(prepare, kind))
    talk.turn()
    times = alternate(steps, given.seconds, (5, 11), warmup=1, clock=clock_of(device))
    talk.tell(ms={name: {kind: statistics.median(t) * 1e3 for kind, t in times.items()}})
