"""The static model of cost beside a cache that is simulated, access by access."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch

from codegen.c.test_loops import softmax, sums, swapped
from codegen.programs import graph_of
from flambeau.codegen.simt.kernel import write_points
from flambeau.codegen.simt.metal import SHAPE, Metal, capabilities
from flambeau.ir import build
from flambeau.ir.nodes import Value
from flambeau.ir.program import Form, Kernel
from flambeau.schedule.plan import schedule
from targets import kernel_costs
from targets.kernel_costs import LINE, Access, Model

MACHINE = capabilities("metal")


def kernel_of(make: Callable[..., Sequence[Value]], *inputs: torch.Tensor) -> Kernel:
    kernel, *_ = schedule(graph_of(make, *inputs), MACHINE).kernels
    assert isinstance(kernel, Kernel)
    return kernel


def model_of(kernel: Kernel) -> Model:
    draft, = write_points(Metal(), kernel, SHAPE)
    return Model(kernel, draft, {}, ())


def lines_of(m: Model, a: Access, names: Sequence[str]) -> np.ndarray:
    """The line of memory that an access touches at each point of the loops: a row for each point of the outer ones."""
    at = np.full((), a.at.const, np.int64)
    for s in (loops := [*m.outer, *(s for s in m.loops if s not in m.outer)]):
        step = a.at.coefficient(s)
        assert step is not None and step.is_const and s.size.is_const
        at = np.add.outer(at, step.const * np.arange(s.size.const))
    assert loops == m.loops
    groups = prod(s.size.const for s in m.outer)
    return (at.reshape(groups, -1) * a.itemsize // LINE) * len(names) + names.index(a.name)


def simulated(m: Model, passes: Sequence[Sequence[Access]]) -> int:
    """Bytes that come into a cache, which keeps what was used last. Groups that run at once begin a pass when all of
    them are done with the one before."""
    cache: OrderedDict[int, None] = OrderedDict()
    moved, room = 0, kernel_costs.CACHE // LINE
    names = sorted({a.name for accesses in passes for a in accesses})
    every = [np.stack([lines_of(m, a, names) for a in accesses], -1) for accesses in passes]
    for first in range(0, len(every[0]), m.at_once):
        for lines in every:
            flat = lines[first:first + m.at_once].reshape(-1)
            for line in flat[np.append(True, flat[1:] != flat[:-1])].tolist():
                moved += LINE * (line not in cache)
                cache[line] = None
                cache.move_to_end(line)
                if len(cache) > room:
                    cache.popitem(last=False)
    return moved


def added(x: Value, y: Value) -> list[Value]:
    return [build.pointwise(x.shape, lambda i: x.load(i) + y.load(i[1:]))]


def both_ways(x: Value, y: Value) -> list[Value]:
    return [build.pointwise(x.shape, lambda i: x.load(i) * y.load(i[::-1]))]


def by_points(kernel: Kernel) -> Kernel:
    return replace(kernel, form=Form("points"))


# What is computed of which inputs, in which form, with a cache of how many bytes.
CASES: dict[str, tuple[Callable[..., Sequence[Value]], tuple[torch.Tensor, ...], bool, int]] = {
    "a map": (lambda x: [swapped(x)], (torch.empty(300, 1000).t(),), False, 1 << 14),
    "what all rows read, held": (added, (torch.empty(64, 4096), torch.empty(4096)), True, 1 << 16),
    "what all rows read, lost": (added, (torch.empty(64, 4096), torch.empty(4096)), True, 1 << 13),
    "across the lines, held": (both_ways, (torch.empty(128, 256), torch.empty(256, 128)), True, 1 << 17),
    "across the lines, lost": (both_ways, (torch.empty(512, 512), torch.empty(512, 512)), True, 1 << 13),
    "by tiles": (both_ways, (torch.empty(512, 512), torch.empty(512, 512)), False, 1 << 16),
    "in bands": (both_ways, (torch.empty(700, 1500), torch.empty(1500, 700)), True, 768 << 10),
    "rows": (lambda x: [sums(x, [1])], (torch.empty(300, 1000),), False, 1 << 16),
    "rows in each other's lines": (lambda x: [sums(x, [0])], (torch.empty(512, 96),), False, 1 << 16),
    "short rows, held": (lambda x: [softmax(x, 1)], (torch.empty(40_000, 9),), True, 768 << 10),
    "short rows, lost": (lambda x: [softmax(x, 1)], (torch.empty(40_000, 24),), True, 1 << 16),
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_says_what_a_cache_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs, points, cache = CASES[case]
    monkeypatch.setattr(kernel_costs, "CACHE", cache)
    kernel = kernel_of(make, *inputs)
    m = model_of(by_points(kernel) if points else kernel)
    reads = [accesses for accesses, _ in m.reads() if accesses]
    moved = simulated(m, [*reads[:-1], [*reads[-1], *m.writes]])
    assert abs(m.moved() / moved - 1) < 0.02 and (m.moved() > 1.2 * m.must()) == case.endswith("lost")
