"""Triton kernels with run-time sizes: correct for any size, with blocks chosen for the sizes at capture."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flambeau.debug
from flambeau.codegen.source import BlockSource
from flambeau.config import config
from flambeau.ir.program import Call
from flambeau.targets.cuda.target import shape_function
from flambeau.testing.one_order import one_order

pytestmark = [
    pytest.mark.filterwarnings("error:flambeau:RuntimeWarning"),  # a kernel that cannot be written runs as ATen
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]

Shapes = tuple[tuple[int, ...], ...]
CASES: dict[str, tuple[Callable[[Any], Any], Shapes]] = {  # the first shape is that of the capture
    "sum": (lambda x: x.sum(), ((3, 20_000), (3, 7), (4, 2))),
    "rows": (lambda x: x.max(1), ((3, 20_000), (5, 3), (2, 23_457))),
    "short rows": (lambda x: F.rms_norm(x, (x.shape[1],)), ((100, 57), (3, 2000), (700, 5))),
    "columns": (lambda x: x.var(0), ((300, 5), (5, 300), (40, 40))),
    "columns of all axes": (lambda x: x.argmax(1), ((30, 40, 17), (5, 3, 9), (2, 300, 70))),
    "lines": (lambda x: x[:, :, 3:].max(2).values.sum() + x[:, :, 3:].amin((1, 2)),
              ((3, 50, 120), (2, 7, 300), (4, 5, 4), (2, 3, 5000))),
    "a loss": (lambda x: F.huber_loss(x, x * 0.5 + 1), ((187, 104), (3, 7), (900, 40))),
    "groups": (lambda x: F.group_norm(x, 2), ((2, 4, 89, 53), (3, 8, 5, 5))),
    "scan of rows": (lambda x: x.cumsum(1), ((4, 300), (2, 40_000), (3, 5))),
    "scan of columns": (lambda x: (x * 0.1 + 1).cumprod(0), ((30, 33), (200, 5), (3, 900))),
    "transposed": (lambda x: x.permute(0, 2, 1).repeat(1, 1, 3) + 1, ((3, 159, 11), (4, 2, 300))),
    "scatter": (lambda x: x.index_add(0, torch.zeros(x.shape[0], dtype=torch.long), x), ((30, 50), (3, 500))),
}


@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_other_sizes(name: str) -> None:
    f, shapes = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="flambeau", dynamic=True, options={"target": "interpreter"})
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), f(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["short rows", "columns", "scan of rows", "transposed", "scatter"])
def test_wide_indices_do_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flambeau.codegen.triton.blocks.NARROW", 2)
    test_one_program_serves_other_sizes(name)


def sources(f: Callable[..., Any], *args: torch.Tensor) -> list[BlockSource]:
    with config.override(target="interpreter"), flambeau.debug.collect() as graphs:
        torch._dynamo.reset()
        torch.compile(f, backend="flambeau", dynamic=True)(*args)
    return [source for graph in graphs for source in graph.texts]


def texts(f: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    return [source.text for source in sources(f, *args)]


FEW = torch.tensor([0, 2, 1])
LIMITS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    # a shape to capture, sizes whose indices fit into 32 bits, and some whose do not
    "a map": (lambda x: x.sin(), (3, 5), (46_000, 46_000), (47_000, 47_000)),
    "rows": (lambda x: x.softmax(1), (3, 5), (46_000, 46_000), (47_000, 47_000)),
    "a scan": (lambda x: x.cumsum(1), (3, 5), (46_000, 46_000), (47_000, 47_000)),
    "rows that data say": (lambda x: x[FEW], (3, 5), (46_000, 46_000), (47_000, 47_000)),
    "a scatter": (lambda x: x.index_add(0, FEW, x[:3]), (4, 5), (46_000, 46_000), (47_000, 47_000)),
    # Its quotients are small, but not what is divided.
    "quotients": (lambda x: F.adaptive_avg_pool1d(x, 20_000), (1, 1, 7), (100_000,), (110_000,)),
}


@pytest.mark.parametrize("name", LIMITS)
def test_indices_are_as_wide_as_the_sizes_of_a_run_ask_for(name: str) -> None:
    f, shape, narrow, wide = LIMITS[name]
    made = [s for s in sources(f, torch.randn(shape)) if len(s.sizes) == len(narrow)]
    assert made and all(s.narrow and set(s.sizes) == {"i32"} for s in made)
    for source in made:
        assert [shape_function(source)(*sizes)[1] for sizes in (narrow, wide)] == [False, True]


def test_the_variant_of_the_first_call_is_the_one_that_is_built() -> None:
    source, = sources(lambda x: x.sin().t(), torch.randn(48, 5))
    assert source.usual in (1, 2)  # one of the two


def test_few_results_are_reduced_in_pieces() -> None:
    assert len(texts(lambda x: x.sum(), torch.randn(3, 40_000))) == 2  # the pieces, and what they come to


def test_short_rows_lie_side_by_side() -> None:
    text, = texts(lambda x: x.softmax(1), torch.randn(300, 57))
    assert "tl.arange(0, 64)" in text and "tl.arange(0, 2048)" not in text


@pytest.mark.parametrize(("inner", "joined", "stages"), [(17, True, 1), (50, True, 1), (64, False, 4), (63, False, 1)])
def test_columns_fill_the_lanes(inner: int, joined: bool, stages: int) -> None:
    """Columns of several axes are joined into one axis, unless each fills a block. Lines without wide accesses do not
    go through shared memory."""
    source, = sources(lambda x: x.sum(1), torch.randn(40, 100, inner))
    assert ("n1 * n2" in source.parts[0].grid) is joined
    assert f"num_stages={stages}" in source.text


NORMS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "a group's channels": (lambda x: F.group_norm(x, 2), ((1, 4, 179, 97), (2, 4, 5, 7))),
    "images as channels": (lambda x: F.gelu(F.instance_norm(x)), ((2, 3, 179, 197), (3, 2, 5, 7))),
    "of a gate": (lambda x: F.group_norm(F.silu(x[:, :, 1:] + x[:, :, :-1]), 1), ((1, 2, 279, 197), (3, 2, 5, 7))),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_long_row_is_read_twice_without_divisions(name: str) -> None:
    """A row is read in pieces for its moments, and again for the results; its elements are recomputed."""
    f, shapes = NORMS[name]
    with config.override(target="interpreter"), flambeau.debug.collect() as graphs:
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="flambeau", dynamic=True)
        for shape in shapes:
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), f(x), rtol=1e-4, atol=1e-4)
    pieces, _, _ = (source.text for source in graphs[0].texts)
    assert "//" not in re.sub(r"pid\d* //|i\d+ = .*", "", pieces) and "% s" not in pieces


def test_a_library_leaves_its_last_step_to_what_follows() -> None:
    x, w, b = torch.randn(2, 3, 9, 8), torch.randn(5, 3, 3, 3), torch.randn(5)
    with config.override(target="interpreter"):
        graph, = flambeau.debug.compile_once(lambda x, w, b: F.conv2d(x, w, b).relu(), (x, w, b))
        alone, = flambeau.debug.compile_once(lambda x, w, b: F.conv2d(x, w, b), (x, w, b))
    call, = (s for s in graph.program.steps if isinstance(s, Call))
    assert call.args[2] is None and len(graph.program.kernels) == 1
    call, = (s for s in alone.program.steps if isinstance(s, Call))
    assert call.args[2] is not None and not alone.program.kernels


@pytest.mark.parametrize("f", [
    lambda x: F.interpolate(x, (7, 13), mode="bilinear"), lambda x: F.interpolate(x, (7, 13), mode="bicubic")])
def test_resizing_is_one_kernel(f: Callable[..., Any]) -> None:
    x = torch.randn(2, 3, 6, 9)
    with config.override(target="interpreter"):
        graph, = flambeau.debug.compile_once(f, (x,))
    assert len(graph.program.kernels) == 1
    torch.testing.assert_close(graph.run([x])[0], f(x))


@pytest.mark.parametrize("shape", [(200, 7, 120), pytest.param((500, 2, 2100), marks=pytest.mark.slow)])
def test_lines_of_a_row_are_an_axis(shape: tuple[int, ...]) -> None:
    """Then the places of lines are found by dividing, and not those of elements."""
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 3:].amax((1, 2))

    x = torch.randn(shape)
    source, = sources(f, x)
    assert ", None]" in source.text and "num_stages=1" in source.text
    with config.override(target="interpreter"):
        graph, = flambeau.debug.compile_once(f, (x,))
    torch.testing.assert_close(graph.run([x])[0], f(x))


@pytest.mark.parametrize("mode", ["linear", "nearest-exact"])
def test_windows_that_begin_at_different_places_go_in_step(mode: str) -> None:
    """A loop from the first place of any lane to the last one would go along the whole dimension."""
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, x.shape[2] + 44, mode=mode)

    with config.override(target="interpreter"), flambeau.debug.collect() as graphs:
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="flambeau", dynamic=True)
        for n in (203, 11):
            x, y = (torch.linspace(-1, 1, 6 * n).view(2, 3, n).requires_grad_() for _ in range(2))
            compiled(x).square().sum().backward()
            f(y).square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
    assert any("range(0, tl.max(" in source.text for source in graphs[-1].texts)


@pytest.mark.parametrize("size, deterministic, atomics", [((3, 4), False, True), ((3, 4), True, False),
                                                          ((19, 23), False, False)])
def test_maxima_of_many_places_add_to_zeros(size: tuple[int, int], deterministic: bool, atomics: bool) -> None:
    x = torch.randn(2, 3, 40, 41)
    best, at = F.adaptive_max_pool2d(x, size, return_indices=True)
    grad = torch.ops.aten.adaptive_max_pool2d_backward
    with config.override(target="interpreter"), one_order() if deterministic else nullcontext():
        graph, = flambeau.debug.compile_once(grad, (best, x, at))
        assert any("atomic_add" in source.text for source in graph.texts) == atomics
        torch.testing.assert_close(torch.compile(grad, backend="flambeau")(best, x, at), grad(best, x, at))
