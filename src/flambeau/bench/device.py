"""Measures the host time of operators on the device against PyTorch's CPU device, alternating.

    python -m flambeau.bench.device

Every round makes `COUNT` calls on small tensors, and waits for the device while no clock runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from flambeau.bench.harness import alternate
from flambeau.device.enable import enable_device
from flambeau.device.torch_module import NAME

COUNT, ROUNDS = 500, 20
SHAPE = (64, 32)
LIMITS = {"operator": 15.0, "view": 2.0}  # the limits in microseconds that we aim for


def calls(device: str) -> dict[tuple[str, str], Callable[[], Any]]:
    """Returns the calls, by kind and name."""
    x, y = torch.ones(SHAPE, device=device), torch.ones(SHAPE, device=device)
    return {
        ("operator", "x * y"): lambda: x * y,
        ("operator", "x * 2.5"): lambda: x * 2.5,
        ("operator", "x.add_(y)"): lambda: x.add_(y),
        ("operator", "x.relu()"): lambda: x.relu(),
        ("operator", "x.sum(1)"): lambda: x.sum(1),
        ("view", "x.view(32, 64)"): lambda: x.view(32, 64),
        ("view", "x.t()"): lambda: x.t(),
        ("view", "x[1:]"): lambda: x[1:],
    }


def measure(count: int = COUNT, rounds: int = ROUNDS) -> list[tuple[str, str, float, float, float]]:
    """Returns (kind, name, microseconds on the device, on the CPU, best of the device) of each call.

    Times are medians of alternating rounds, and the best: if the device is the host's own cores, kernels take the
    host's time.
    """
    enable_device()
    ours, theirs = calls(NAME), calls("cpu")
    out = []
    for key, call in ours.items():
        times = alternate({"ours": call, "theirs": theirs[key]}, 0.0, (rounds, rounds), 1, count=count,
                          wait=torch.accelerator.synchronize)
        device, cpu = ([1e6 * seconds for seconds in taken] for taken in times.values())
        out.append((*key, statistics.median(device), statistics.median(cpu), min(device)))
    return out


def main() -> None:
    print(f"{'call':<16}{'device':>10}{'best':>10}{'CPU':>10}{'ratio':>8}{'limit':>10}")
    for kind, name, ours, theirs, best in measure():
        print(f"{name:<16}{ours:>7.1f} us{best:>7.1f} us{theirs:>7.1f} us{ours / theirs:>8.1f}{LIMITS[kind]:>7.0f} us")


if __name__ == "__main__":
    main()
