"""Streams that nobody asked for by hand: steps side by side, and copies to the host, beside the same on one stream.

    python -m flambeau.bench.overlap --device cuda --json results/overlap-h200.json
    python -m flambeau.bench.overlap --device cuda --offload --json results/offload-h200.json

Both are recorded (`graphs=True`), run in turns, and their results compared bit by bit before they are timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.bench.harness import alternate, clock_of, geometric_mean, message, own_code
from flambeau.bench.models import DLRM, GPT, Inputs, ViT, class_loss, draw_clicks, draw_images, draw_tokens, token_loss
from flambeau.bench.networks import NETWORKS
from flambeau.debug import collect

Config = dict[str, int]


def ready() -> None:
    """All is compiled, and what follows is timed."""


class Mixed(nn.Module):
    """Four branches side by side, as in GoogLeNet."""

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
    """A layer whose experts are weighed for each token."""

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


def stepper(model: nn.Module, inputs: Inputs, loss: Any, mode: str, label: str, **options: Any) -> Callable[[], Any]:
    def run(*given: Tensor) -> Any:
        return model(*given)

    made = torch.compile(own_code(run, label), backend="flambeau", options=options)
    *given, target = inputs

    def step() -> list[Tensor]:
        if mode == "infer":
            with torch.no_grad():
                return [made(*given)]
        model.zero_grad(set_to_none=True)
        found = loss(made(*given), target)
        found.backward()
        return [found.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return step


def compare(name: str, mode: str, device: str, tiny: bool, seconds: float, graphs: bool = True) -> dict[str, Any]:
    """One stream and several, of one model."""
    model, inputs, loss = built(name, device, mode, tiny)
    steps = {label: stepper(model, inputs, loss, mode, f"{name} {label}", graphs=graphs, **options)
             for label, options in (("one", {}), ("auto", {"streams": "auto"}))}
    found: dict[str, list[Tensor]] = {}
    for label, step in steps.items():
        for _ in range(5):
            last = step()
        found[label] = [t.clone() for t in last]
    row: dict[str, Any] = {"model": name, "mode": mode}
    # Of sums in no fixed order (gradients of embedding bags), two runs of one program differ.
    row["steady"] = all(torch.equal(a, b) for a, b in zip(found["one"], steps["one"](), strict=True))
    row["equal"] = all(torch.equal(a, b) for a, b in zip(found["one"], found["auto"], strict=True))
    del found
    if not seconds:
        return row
    ready()
    times = alternate(steps, seconds, (11, 60), 3, clock_of(device), burst=0.01)
    row |= {label: statistics.median(t) for label, t in times.items()}
    return row | {"gain": row["one"] / row["auto"]}


# ---- memory ----------------------------------------------------------------------------------------------------


def offload_steps(size: str, device: str, wishes: list[Any], dtype: torch.dtype, graphs: bool, regions: bool,
                  seconds: float, numerics: str, told: Callable[[list[dict[str, Any]]], None]) -> None:
    """A training step of LM 24 that keeps all, and with so much less: peak memory, time, bits of loss and gradients."""
    network = NETWORKS["lm24"].build(size, device=device, dtype=dtype)
    model, inputs = network.module, network.make_inputs()
    there = sum(t.numel() * t.itemsize for t in (*model.parameters(), *inputs))
    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], Any]] = {}
    reference: list[Tensor] = []
    for wish in [None, *wishes]:
        row: dict[str, Any] = {"offload": wish, "dtype": str(dtype), "graphs": graphs, "regions": regions,
                               "numerics": numerics}
        try:
            step = training_step(model, inputs, network.loss, f"offload {wish}", offload=wish, graphs=graphs,
                                 regions=regions, numerics=numerics, contractions="library")
            begin = time.perf_counter()
            with collect() as found:
                last, used = peak_of(step, model, device, graphs)
            row["first_s"], row["peak"] = time.perf_counter() - begin, used + there
            row["notes"] = [note for g in found for note in g.program.notes if "MiB" in note][:12]
            reference = reference or [t.cpu() for t in last]
            row["equal"] = all(torch.equal(a.cpu(), b) for a, b in zip(last, reference, strict=True))
            row["differ"] = max(float((a.cpu().double() - b.double()).abs().max() / b.double().abs().max())
                                for a, b in zip(last, reference, strict=True))
            row["less"] = 1 - row["peak"] / (rows or [row])[0]["peak"]
            del last
            steps[str(wish)] = step
        except Exception as error:
            row["error"] = message(error)
        rows.append(row)
        print(row, flush=True)
        told(rows)
    ready()
    for row in rows[1:]:
        if seconds and str(row["offload"]) in steps:
            both = {"keep": steps["None"], "seconds": steps[str(row["offload"])]}
            times = alternate(both, seconds, (7, 40), 1, clock_of(device))
            row |= {label: statistics.median(t) for label, t in times.items()}
            row["slower"] = row["seconds"] / row["keep"] - 1
            print(row, flush=True)
            told(rows)


def training_step(model: nn.Module, inputs: Inputs, loss: Any, label: str, **options: Any) -> Callable[[], Any]:
    """The loss is part of what is compiled."""
    def run(*given: Tensor) -> Tensor:
        *args, target = given
        return loss(model(*args), target)

    made = torch.compile(own_code(run, label), backend="flambeau", options=options)

    def step() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        found = made(*inputs)
        found.backward()
        return [found.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return step


def peak_of(step: Callable[[], Any], model: nn.Module, device: str, graphs: bool) -> tuple[list[Tensor], int]:
    """The results of a step, and the bytes that it takes beyond what is there. A recording's memory stays reserved."""
    module = torch.get_device_module(device)

    def settle() -> None:
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.accelerator.synchronize()
        if graphs:
            module.empty_cache()

    settle()
    reserved = module.memory_reserved() if graphs else 0
    for _ in range(5):
        last = step()
    last = [t.cpu() for t in last]
    settle()
    if graphs:
        return last, module.memory_reserved() - reserved
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    step()
    torch.accelerator.synchronize()
    return last, module.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0, help="for one comparison")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--wishes", default="0.1,0.3,0.6")
    parser.add_argument("--regions", type=int, default=0, help="with --offload")
    parser.add_argument("--numerics", default="fast", help="with --offload")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graphs", type=int, default=1)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if args.device == "flambeau":
        from flambeau.device.enable import enable_device

        enable_device()
    rows: list[dict[str, Any]] = []
    kind: torch.dtype = getattr(torch, args.dtype)
    if args.offload:
        offload_steps("tiny" if args.tiny else "large", args.device, [float(w) for w in args.wishes.split(",")], kind,
                      bool(args.graphs), bool(args.regions), args.seconds, args.numerics,
                      lambda rows: write(args.json, rows))
        return
    for name in [n for n in MODELS if args.only in n]:
        for mode in args.modes.split(","):
            torch.compiler.reset()
            try:
                rows.append(compare(name, mode, args.device, args.tiny, args.seconds, bool(args.graphs)))
            except Exception as error:
                rows.append({"model": name, "mode": mode, "error": message(error)})
            print(rows[-1], flush=True)
            write(args.json, rows)
    gains = [row["gain"] for row in rows if "gain" in row]
    if gains:
        print(f"gain {geometric_mean(gains):.3f}, least {min(gains):.3f}")
    write(args.json, rows)


def write(path: str, rows: list[dict[str, Any]]) -> None:
    if path:
        with open(path, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
