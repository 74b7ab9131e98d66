"""Block kernels for sizes of the run: right for any, and shaped by those of the capture."""

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
from flambeau.config import config
from flambeau.ir.program import Call
from flambeau.testing.one_order import one_order

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]

Shapes = tuple[tuple[int, ...], ...]
CASES: dict[str, tuple[Callable[[Any], Any], Shapes]] = {  # the first shape is that of the capture
    "sum": (lambda x: x.sum(), ((3, 20_000), (3, 7), (4, 2))),
    "rows": (lambda x: x.max(1), ((3, 20_000), (5, 3), (2, 23_457))),
    "short rows": (lambda x: F.rms_norm(x, (x.shape[1],)), ((100, 57), (3, 2000), (700, 5))),
    "columns": (lambda x: x.var(0), ((300, 5), (5, 300), (40, 40))),
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


def texts(f: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    with config.override(target="interpreter"), flambeau.debug.collect() as graphs:
        torch._dynamo.reset()
        torch.compile(f, backend="flambeau", dynamic=True)(*args)
    return [source.text for graph in graphs for source in graph.texts]


def test_few_results_are_reduced_in_pieces() -> None:
    assert len(texts(lambda x: x.sum(), torch.randn(3, 40_000))) == 2  # the pieces, and what they come to


def test_short_rows_lie_side_by_side() -> None:
    text, = texts(lambda x: x.softmax(1), torch.randn(300, 57))
    assert "tl.arange(0, 64)" in text and "tl.arange(0, 2048)" not in text


NORMS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "a group's channels": (lambda x: F.group_norm(x, 2), ((1, 4, 179, 97), (2, 4, 5, 7))),
    "images as channels": (lambda x: F.gelu(F.instance_norm(x)), ((2, 3, 179, 197), (3, 2, 5, 7))),
    "of a gate": (lambda x: F.group_norm(F.silu(x[:, :, 1:] + x[:, :, :-1]), 1), ((1, 2, 279, 197), (3, 2, 5, 7))),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_long_row_is_read_twice_without_divisions(name: str) -> None:
    """For its moments, in pieces, and for what comes of them; what it is made of is computed again."""
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
