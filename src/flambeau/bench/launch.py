"""Measures the host time of a launch against Triton's own launcher and an eager operator, alternating, on one GPU.

    python -m flambeau.bench.launch

Every round makes `COUNT` calls with kernels that take almost no time, and waits for them while no clock runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from flambeau.bench.harness import alternate
from flambeau.codegen.source import BlockSource, Part
from flambeau.targets.base import get_target
from flambeau.targets.cuda.triton_worker import module_of

COUNT, ROUNDS = 50, 200  # few enough for the driver's queue, where each call is ten launches
TEN = "plan of 10"
SIZE = 1024
TEXT = """
import triton
import triton.language as tl

@triton.jit
def part0(p0, p1, p2, n0, bad):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    m = i < n0
    tl.store(p2 + i, tl.load(p0 + i, m) + tl.load(p1 + i, m), m)
"""


def callables() -> dict[str, Callable[[], Any]]:
    """Returns calls that each add two vectors."""
    a, b, c = (torch.zeros(SIZE, device="cuda") for _ in range(3))
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    target = get_target("cuda")
    source = BlockSource("add", TEXT, ("*fp32",) * 3, ("i32",), (Part("part0", "(n0 + 1023) // 1024"),))
    launch: Any = target.build([source]).wait()["add"]
    pointers, sizes = [x.data_ptr() for x in (a, b, c)], [SIZE]
    step = (launch, [(0, 0), (1, 0), (2, 0)], [0])
    one, ten = target.plan([step]), target.plan([step] * 10)

    theirs = module_of(TEXT, "launch_bench").part0
    return {
        TEN: lambda: ten(pointers, sizes),
        "plan of 1": lambda: one(pointers, sizes),
        "launch": lambda: launch(pointers, sizes),
        "Triton": lambda: theirs[(1,)](a, b, c, SIZE, flag),
        "eager": lambda: torch.add(a, b, out=c),
    }


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """Returns the median microseconds of one launch."""
    times = alternate(callables(), 0.0, (rounds, rounds), COUNT, count=COUNT, wait=torch.cuda.synchronize)
    return {name: 1e6 * statistics.median(found) / (10 if name == TEN else 1) for name, found in times.items()}


if __name__ == "__main__":
    for name, microseconds in measure().items():
        print(f"{name:12} {microseconds:6.2f} us")
