"""Measures automatic streams: a model's steps with `streams="auto"` against one stream.

    flambeau bench overlap --target cuda --json results/overlap-cuda.json

Each model and mode is a part (`parts`), compiled once, while others compile. The choice between one stream and several
(`runtime/streams/overlap_choice.py`: by the device's times, then by a clock over steps), and everything after it, runs
alone on the machine. On CUDA both are recorded (`graphs=True`). Their results are
compared bit by bit. `seconds` are the device's, which is kept busy while the host launches a step; `wall` are those of
a clock, over consecutive steps, which for a small model is the host's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.bench.harness import alternate, clock_of, geometric_mean, wanted
from flambeau.bench.models import DLRM, GPT, Inputs, ViT, class_loss, draw_clicks, draw_images, draw_tokens, token_loss
from flambeau.bench.parts import Talk, absorb, run, threads
from flambeau.runtime import launch_plan
from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.runtime.streams import overlap_choice
from flambeau.targets.base import Run, Target
from flambeau.torch_compat import cuda

Config = dict[str, int]
PREPARE = 0.6  # the share of the time after which nothing more is compiled
WARM = 5  # steps in which recordings are made
TRIAL = 2 * overlap_choice.TURNS * overlap_choice.CALLS + 1  # steps after which a clock has decided
BURST, ROUNDS = 0.01, (11, 60)  # seconds of consecutive steps that make one measurement; the number of measurements
STEPS = 25  # steps for the device's times
CLOCK = 2e9  # cycles per second of a GPU, roughly


@dataclass
class OverlapRow:
    """The results of a model. Seconds of a step are by kind: one, auto."""

    name: str
    mode: str
    seconds: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    equal: bool | None = None  # whether the bits of results and gradients are equal
    steady: bool | None = None  # whether two steps on one stream have the same bits
    chosen: list[str] = field(default_factory=list)  # for each graph with a choice: by the device, the seconds of both
    trials: list[str] = field(default_factory=list)  # for each function with a choice: by a clock, the same
    errors: dict[str, str] = field(default_factory=dict)

    def gain(self, times: str = "seconds") -> float | None:
        found: dict[str, float] = getattr(self, times)
        return found["one"] / found["auto"] if {"one", "auto"} <= found.keys() else None


class Mixed(nn.Module):
    """Four parallel branches, as in GoogLeNet."""

    def __init__(self, given: int, wide: int):
        super().__init__()
        self.one, self.pooled = conv(given, wide, 1), conv(given, wide, 1)
        self.three = nn.Sequential(conv(given, wide, 1), conv(wide, wide, 3))
        self.five = nn.Sequential(conv(given, wide // 2, 1), conv(wide // 2, wide, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pooled(F.max_pool2d(x, 3, 1, 1))), 1)


def conv(given: int, made: int, window: int, stride: int = 1) -> nn.Module:
    window_at = nn.Conv2d(given, made, window, stride, window // 2, bias=False)
    return nn.Sequential(window_at, nn.BatchNorm2d(made), nn.ReLU())


class Inception(nn.Module):
    def __init__(self, image: int, width: int, depth: int, classes: int):
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1), conv(width, 2 * width, 3))
        self.mixed = nn.Sequential(Mixed(2 * width, width), *(Mixed(4 * width, width) for _ in range(depth - 1)))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixed(self.stem(x)).mean((2, 3)))


class Experts(nn.Module):
    """A layer whose experts are weighted for each token."""

    def __init__(self, dim: int, experts: int):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(dim), nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = self.gate(y).softmax(-1)
        return x + sum(w.unsqueeze(-1) * expert(y) for w, expert in zip(weights.unbind(-1), self.experts))


class Mixture(nn.Module):
    def __init__(self, dim: int, experts: int, depth: int, classes: int):
        super().__init__()
        self.layers = nn.Sequential(*(Experts(dim, experts) for _ in range(depth)))
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class TwoTowers(nn.Module):
    """Queries and items, each through layers of its own, and how well they match."""

    def __init__(self, rows: int, dim: int, depth: int):
        super().__init__()
        self.users, self.items = (nn.Embedding(rows, dim) for _ in range(2))
        self.user, self.item = (nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(dim, dim), nn.ReLU())))
                                for _ in range(2))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (F.normalize(self.user(self.users(users)), dim=-1) * F.normalize(self.item(self.items(items)), dim=-1)
                ).sum(-1)


def draw_rows(config: Config, batch: int) -> Inputs:
    return torch.randn(batch, config["dim"]), torch.randint(config["classes"], (batch,))


def draw_pairs(config: Config, batch: int) -> Inputs:
    users, items = (torch.randint(config["rows"], (batch,)) for _ in range(2))
    return users, items, torch.rand(batch).round()


def match_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores.float(), target.float())


# Name: the model, its sizes, those of tests, a batch for inference and one for training, inputs, loss, dtype.
MODELS: dict[str, tuple[Any, ...]] = {
    "inception": (Inception, {"image": 128, "width": 64, "depth": 6, "classes": 100},
                  {"image": 16, "width": 4, "depth": 2, "classes": 3}, 1, 8, draw_images, class_loss, torch.bfloat16),
    "experts": (Mixture, {"dim": 512, "experts": 8, "depth": 2, "classes": 100},
                {"dim": 16, "experts": 3, "depth": 1, "classes": 3}, 64, 256, draw_rows, class_loss, torch.bfloat16),
    "dlrm": (DLRM, {"tables": 16, "rows": 100000, "bag": 16, "dense": 13, "dim": 64},
             {"tables": 3, "rows": 50, "bag": 3, "dense": 5, "dim": 8}, 512, 2048, draw_clicks, match_loss,
             torch.float32),
    "two towers": (TwoTowers, {"rows": 100000, "dim": 512, "depth": 6}, {"rows": 30, "dim": 8, "depth": 2}, 64, 256,
                   draw_pairs, match_loss, torch.bfloat16),
    "vit": (ViT, {"image": 224, "patch": 16, "dim": 384, "heads": 6, "depth": 5, "classes": 100},
            {"image": 16, "patch": 4, "dim": 32, "heads": 2, "depth": 2, "classes": 10}, 1, 4, draw_images, class_loss,
            torch.bfloat16),
    "lm": (GPT, {"vocab": 8192, "time": 256, "dim": 512, "heads": 8, "depth": 5},
           {"vocab": 64, "time": 16, "dim": 32, "heads": 2, "depth": 2}, 1, 1, draw_tokens, token_loss, torch.bfloat16),
}


def built(name: str, device: str, mode: str, tiny: bool) -> tuple[nn.Module, Inputs, Any]:
    kind, sizes, small, serve, train, draw, loss, dtype = MODELS[name]
    config, batch = (small, 2) if tiny else (sizes, serve if mode == "infer" else train)
    torch.manual_seed(0)
    dtype = torch.float32 if tiny else dtype
    model = kind(**config).to(device, dtype).train(mode == "train")
    inputs = tuple(x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in draw(config, batch))
    return model, inputs, loss


class Kinds:
    """Programs on one stream and on several, from the same compiled graphs: `kind` selects which of them calls run."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.kind, self.mine = talk, "one", False
        self.chosen: list[str] = []
        self.time_both = overlap_choice.measured

    def turn(self) -> None:
        if not self.mine:
            self.talk.turn()
            self.mine = True

    def measured(self, plans: tuple[LaunchPlan, LaunchPlan], target: Target, kernels: Mapping[str, Any],
                 args: list[Any]) -> str:
        """Times both programs, alone on the machine."""
        self.turn()
        self.chosen.append(self.time_both(plans, target, kernels, args))
        return self.chosen[-1]

    def both(self, plan: LaunchPlan, beside: LaunchPlan, target: Target, kernels: Mapping[str, Any],
             function: Hashable) -> Run:
        runs = {"one": plan.bound(kernels, ("one", function)),
                "auto": overlap_choice.chosen(plan, beside, target, kernels, function)}
        return lambda args: runs[self.kind](args)


def stepper(kinds: Kinds, kind: str, run: Callable[..., Any], model: nn.Module, inputs: Inputs, loss: Any, mode: str
            ) -> Callable[[], list[Tensor]]:
    *given, target = inputs

    def step() -> list[Tensor]:
        kinds.kind = kind
        if mode == "infer":
            with torch.no_grad():
                return [run(*given)]
        model.zero_grad(set_to_none=True)
        found = loss(run(*given), target)
        found.backward()
        return [found.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return step


def part(talk: Talk, name: str, mode: str, device: str, tiny: bool, seconds: float) -> None:
    """Measures a model in a mode, in a process of its own."""
    if device == "flambeau":
        from flambeau.device.enable import enable_device

        enable_device()
    model, inputs, loss = built(name, device, mode, tiny)

    def call(*given: Tensor) -> Any:
        return model(*given)

    compiled = torch.compile(call, backend="flambeau", options={"graphs": device == "cuda", "streams": "auto"})
    kinds = Kinds(talk)
    launch_plan.chosen, overlap_choice.measured = kinds.both, kinds.measured
    steps = {kind: stepper(kinds, kind, compiled, model, inputs, loss, mode) for kind in ("one", "auto")}
    found: dict[str, list[Tensor]] = {}
    for kind, step in steps.items():
        for _ in range(WARM):
            step()
        found[kind] = [t.clone() for t in step()]  # a recording cannot be replayed while its results are held
    kinds.turn()
    trials = [*overlap_choice.TRIALS.values()]
    for _ in range(TRIAL if trials else 0):
        steps["auto"]()
    talk.tell(trials=[f"{t.kind} {' '.join(f'{min(s[1:]):.4g}' for s in t.seconds)}" for t in trials if t.over])
    # With sums in no fixed order (gradients of embedding bags), two runs of one program differ.
    talk.tell(steady=all(map(torch.equal, found["one"], steps["one"]())),
              equal=all(map(torch.equal, found["one"], found["auto"])), chosen=kinds.chosen)
    del found
    times = alternate(steps, seconds, ROUNDS, 3, clock_of(device), burst=BURST)
    wall = {kind: statistics.median(t) for kind, t in times.items()}
    talk.tell(wall=wall, seconds=device_seconds(steps) if device == "cuda" else wall)


def device_seconds(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Times the steps, alternating. Before each step the device waits for as long as the host takes to launch it."""
    found: dict[str, list[float]] = {label: [] for label in steps}
    host = 0.0
    for step in steps.values():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        host = max(host, time.perf_counter() - begin)
    for _ in range(STEPS):
        for label, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cuda.sleep(int((2 * host + 1e-4) * CLOCK))
            start.record()
            step()
            end.record()
            end.synchronize()
            found[label].append(start.elapsed_time(end) / 1e3)
    return {label: statistics.median(times) for label, times in found.items()}


def measure(device: str, tiny: bool, modes: Sequence[str], only: str | None, jobs: int, limit: float,
            beside: Path | None = None) -> Iterator[list[OverlapRow]]:
    """Yields the rows, again whenever there is more in them. `limit`: seconds for all of it."""
    rows = {label: OverlapRow(name, mode) for mode in modes for name in MODELS
            if wanted(label := f"{name} {mode}", only)}
    seconds = min(2.0, limit * (1 - PREPARE) / max(len(rows), 1) / 2)  # the choice and other clocks take the rest
    parts = {label: {"name": row.name, "mode": row.mode, "device": device, "tiny": tiny, "seconds": seconds}
             for label, row in rows.items()}
    for label, told in run("flambeau.bench.overlap", parts, jobs, limit, limit * PREPARE, threads(jobs), beside):
        absorb(rows[label], told)
        yield list(rows.values())


def summarise(rows: Sequence[OverlapRow]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for times in ("seconds", "wall"):
        gains = [g for row in rows if (g := row.gain(times)) is not None]
        if gains:
            out[f"gain by {times}"], out[f"least by {times}"] = geometric_mean(gains), min(gains)
    out["other bits"] = [f"{row.name} {row.mode}" for row in rows if row.equal is False and row.steady]
    return out
