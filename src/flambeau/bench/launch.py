"""What a launch costs the host: ours beside Triton's own launcher and an eager operator, in turns, on one GPU.

    python -m flambeau.bench.launch

Every round starts `COUNT` kernels, too small to be waited for, and waits for them after the clock has stopped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from flambeau.codegen.source import BlockSource, Part
from flambeau.targets.base import get_target
from flambeau.targets.cuda.triton_worker import module_of

COUNT, ROUNDS = 200, 50
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
    """Each adds two vectors."""
    a, b, c = (torch.zeros(SIZE, device="cuda") for _ in range(3))
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    target = get_target("cuda")
    source = BlockSource("add", TEXT, ("*fp32",) * 3, ("i32",), (Part("part0", "(n0 + 1023) // 1024"),))
    launch: Any = target.build([source]).wait()["add"]
    pointers, sizes = [x.data_ptr() for x in (a, b, c)], [SIZE]
    step = (launch, [(0, 0), (1, 0), (2, 0)], [0])
    one, ten = target.plan([step]), target.plan([step] * 10)

    def tenfold() -> None:
        for _ in range(COUNT // 10):
            ten(pointers, sizes)

    theirs = module_of(TEXT, "launch_bench").part0
    return {
        "plan of 10": tenfold,
        "plan of 1": lambda: repeated(lambda: one(pointers, sizes)),
        "launch": lambda: repeated(lambda: launch(pointers, sizes)),
        "Triton": lambda: repeated(lambda: theirs[(1,)](a, b, c, SIZE, flag)),
        "eager": lambda: repeated(lambda: torch.add(a, b, out=c)),
    }


def repeated(call: Callable[[], Any]) -> None:
    for _ in range(COUNT):
        call()


def measure(rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds of one launch."""
    calls = callables()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            spent = time.perf_counter() - start
            if turn >= 3:  # before that, everything is found for the first time
                times[name].append(spent / COUNT * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    for name, microseconds in measure().items():
        print(f"{name:12} {microseconds:6.2f} us")
