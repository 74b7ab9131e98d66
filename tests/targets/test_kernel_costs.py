"""Compares the static cost model with a cache that is simulated access by access."""

from __future__ import annotations

import re
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
from flambeau.codegen.simt.points import Points
from flambeau.ir import build
from flambeau.ir.expr import loads
from flambeau.ir.nodes import Value
from flambeau.ir.program import Form, Kernel, LoopKernel
from flambeau.schedule.plan import schedule
from flambeau.targets.base import get_target
from flambeau.targets.metal.mac import MacLaunch, MacLibrary
from targets import kernel_costs
from targets.kernel_costs import LINE, Access, Model
from targets.metal_shader import compile_shader

MACHINE = capabilities("metal")


def kernel_of(make: Callable[..., Sequence[Value]], *inputs: torch.Tensor) -> Kernel:
    kernel, *_ = schedule(graph_of(make, *inputs), MACHINE).kernels
    assert isinstance(kernel, Kernel)
    return kernel


def model_of(kernel: Kernel) -> Model:
    draft, = write_points(Metal(), kernel, SHAPE)
    return Model(kernel, draft, {}, ())


def lines_of(m: Model, a: Access, names: Sequence[str]) -> np.ndarray:
    """The memory line that an access touches at each point of the loops, with one row per point of the outer loops."""
    at = np.full((), a.at.const, np.int64)
    for s in (loops := [*m.outer, *(s for s in m.loops if s not in m.outer)]):
        step = a.at.coefficient(s)
        assert step is not None and step.is_const and s.size.is_const
        at = np.add.outer(at, step.const * np.arange(s.size.const))
    assert loops == m.loops
    groups = prod(s.size.const for s in m.outer)
    return (at.reshape(groups, -1) * a.itemsize // LINE) * len(names) + names.index(a.name)


def simulated(m: Model, passes: Sequence[Sequence[Access]]) -> int:
    """Bytes that are loaded into the cache. Concurrent groups begin a pass when all of them have finished the previous
    one."""
    names = sorted({a.name for accesses in passes for a in accesses})
    every = [np.stack([lines_of(m, a, names) for a in accesses], -1) for accesses in passes]
    return cached(np.concatenate([lines[first:first + m.at_once].reshape(-1)
                                  for first in range(0, len(every[0]), m.at_once) for lines in every]))


def cached(lines: np.ndarray) -> int:
    """Bytes of lines that are loaded into a cache with least-recently-used replacement."""
    cache: OrderedDict[int, None] = OrderedDict()
    moved, room = 0, kernel_costs.CACHE // LINE
    for line in lines[np.append(True, lines[1:] != lines[:-1])].tolist():
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


# Functions with their inputs, the kernel form, and the bytes of the cache.
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


def with_third(x: Value, y: Value, z: Value) -> list[Value]:
    return [build.pointwise(x.shape, lambda i: x.load(i) * y.load((i[2], i[1])) * z.load(i[1:]))]


# Maps whose groups run in a special order, and the form of their loops.
ORDERS: dict[str, tuple[Callable[..., Sequence[Value]], tuple[torch.Tensor, ...], str]] = {
    "by points in bands": (both_ways, (torch.empty(90, 9000), torch.empty(9000, 90)), "points"),
    "what all rows read in bands": (added, (torch.empty(9, 300_000), torch.empty(300_000)), "points"),
    "by tiles": (both_ways, (torch.empty(700, 1500), torch.empty(1500, 700)), "transpose"),
    "by tiles in bands": (with_third, (torch.empty(9, 700, 300), torch.empty(300, 700), torch.empty(700, 300)),
                          "transpose"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ORDERS)
def test_groups_come_as_the_model_says(case: str) -> None:
    """Each writes its number. What a cache does with them one after the other is what the model says."""
    make, inputs, form = ORDERS[case]
    kernel = replace(kernel_of(make, *inputs), form=Form(form))
    assert isinstance(kernel, LoopKernel)
    m = model_of(kernel)
    source = get_target("metal").render(kernel, "order")
    text, count = re.subn(r"^( *p\d+\[.*\] = ).*;$", r"\1(float)fl_group;", source.text, flags=re.MULTILINE)
    assert count == 1
    shape = [s.size.const for s in kernel.outer]
    tensors = [torch.zeros(prod(shape) if p.written else 1 << 22) for p in kernel.params]
    launched = MacLibrary([replace(source, text=text)], compile_shader).launch("order")
    assert isinstance(launched, MacLaunch)
    launched.run([(t, 0) for t in tensors], [])
    grid = np.stack(np.unravel_index(np.arange(prod(shape)), shape))
    places = [(e.attr[0], e.attr[1][0]) for e in loads(*kernel.everything())] + [*kernel.stores]
    names = sorted({name for name, _ in places})
    at = {name: sum(at.coefficient(s).const * n for s, n in zip(kernel.outer, grid, strict=True)) + at.const
          for name, at in places}
    out = next(t for t, p in zip(tensors, kernel.params, strict=True) if p.written).numpy()
    order = np.lexsort((at[kernel.stores[0][0]], out[at[kernel.stores[0][0]]]))
    lines = np.stack([at[name][order] * 4 // LINE * len(names) + names.index(name) for name in names], 1)
    moved = cached(lines.reshape(-1))
    assert isinstance(m.w, Points) and (m.w.bands is not None) == case.endswith("in bands")
    assert abs(m.moved() / moved - 1) < 0.02
