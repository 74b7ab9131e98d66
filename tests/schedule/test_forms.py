"""Loop forms are chosen once, by the numbers of the machine; writers know every name that is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from codegen.c.test_loops import running, softmax, sums, swapped
from codegen.programs import graph_of
from flambeau.ir import build
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.nodes import Value
from flambeau.ir.program import Form, LoopKernel, ScanKernel
from flambeau.ir.tuning import BLOCKS, CPU, CPU_WORK_ITEMS, POINTS, Tuning
from flambeau.schedule.plan import schedule


def form(make: Callable[[Value], Value], x: torch.Tensor, tuning: Tuning) -> Form:
    kernel, = schedule(graph_of(lambda v: [make(v)], x), Capabilities("any", tuning=tuning)).kernels
    assert isinstance(kernel, LoopKernel | ScanKernel)
    return kernel.form


def scaled(x: Value) -> Value:
    return build.pointwise(x.shape, lambda i: x.load(i) * 3)


CASES: list[tuple[str, Callable[[Value], Value], tuple[int, ...], tuple[str, str, str, str]]] = [
    # What, of which shape, on: a CPU, a CPU's work-items, points, blocks.
    ("long line", scaled, (50_000,), ("chunks", "chunks", "streamed", "map")),
    ("short line", scaled, (50,), ("chunks", "chunks", "points", "map")),
    ("transpose", swapped, (300, 200), ("tiles", "tiles", "transpose", "map")),
    ("rows", lambda x: softmax(x, 1), (300, 200), ("rows", "rows", "rows", "whole rows")),
    ("long rows", lambda x: sums(x, [1]), (3, 20_000), ("shared rows", "rows", "rows", "rows in pieces")),
    ("columns", lambda x: sums(x, [0]), (300, 200), ("columns", "columns", "columns", "rows in pieces")),
    ("long columns", lambda x: sums(x, [0]), (20_000, 48), ("shared columns", "columns", "columns", "rows in pieces")),
    ("short columns", lambda x: sums(x, [0]), (64, 200), ("columns", "columns", "points", "whole rows")),
    ("scan", lambda x: running(x, 1), (3, 40_000), ("parts", "rows", "rows", "rows")),
    ("scan down", lambda x: running(x, 0), (4000, 64), ("columns", "columns", "columns", "columns")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_forms_of_each_machine(case: tuple[str, Callable[[Value], Value], tuple[int, ...], tuple[str, ...]]) -> None:
    _, make, shape, expected = case
    found = [form(make, torch.zeros(shape), t).name for t in (CPU, CPU_WORK_ITEMS, POINTS, BLOCKS)]
    assert tuple(found) == expected


def test_a_number_of_the_table_decides() -> None:
    x = torch.zeros(3, 20_000)
    assert form(lambda v: sums(v, [1]), x, replace(CPU, long_row=20_001)) == Form("rows")
    assert form(lambda v: sums(v, [0]), torch.zeros(300, 200), replace(CPU, columns=100)) == Form("columns", 100)
    down = form(lambda v: running(v, 0), torch.zeros(4000, 64), replace(POINTS, few_rows=1))
    assert down == Form("columns", POINTS.scan_columns)
