"""Measures training steps and a matrix product on the device against PyTorch's CPU device, alternating.

    flambeau bench device-steps

A step is forward, loss, backward and AdamW. Each step is waited for, as in a loop that reads its loss. The losses of
the first steps are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from flambeau.bench.harness import Row, clock_of, message, timed, training_step
from flambeau.bench.models import SUITE
from flambeau.device.enable import enable_device
from flambeau.device.torch_module import NAME

PLACES = {"cpu": "cpu", "flambeau": NAME}  # by the names of backends in a report
PRODUCT, SIDES = "matmul", {"small": 1024, "large": 4096, "tiny": 32}
MODELS = ("gpt", "resnet")
CHECKED = 2  # steps; the second one depends on the gradients of the first


def step_on(name: str, size: str, device: str) -> Callable[[], Tensor]:
    built = SUITE[name].build(size, device=device)
    forth_and_back = training_step(built, built.make_inputs(), "eager")
    optimizer = torch.optim.AdamW(built.module.parameters(), 1e-4)

    def step() -> Tensor:
        loss = forth_and_back()
        optimizer.step()
        return loss.detach()

    return step


def product_on(size: str, device: str) -> Callable[[], Tensor]:
    side = SIDES[size]
    x, y = (torch.randn(side, side, generator=torch.Generator().manual_seed(k)).to(device) for k in range(2))
    return partial(torch.mm, x, y)


def measure(only: str | None, size: str, limit: float,
            console: Callable[[Sequence[str]], Iterator[str]] = iter) -> Iterator[Row]:
    enable_device()
    for name in console([n for n in (PRODUCT, *MODELS) if not only or only in n]):
        row = Row(name, "product" if name == PRODUCT else "train", "forward" if name == PRODUCT else "train")
        try:
            calls = {backend: product_on(size, device) if name == PRODUCT else step_on(name, size, device)
                     for backend, device in PLACES.items()}
            for _ in range(CHECKED):
                ours, theirs = calls["flambeau"]().cpu(), calls["cpu"]()
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        except Exception as error:
            row.errors["flambeau"] = message(error)
        else:
            timed(row, calls, limit, clock_of(NAME))
        yield row
