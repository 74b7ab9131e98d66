"""Groups in bands: rows that read the same are walked side by side, every point once, at whatever sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from codegen.programs import graph_of
from flambeau import pipeline
from flambeau.codegen.simt import group_order
from flambeau.codegen.simt.metal import SHAPE, Metal, capabilities
from flambeau.config import config
from flambeau.ir import build
from flambeau.ir.tuning import POINTS
from flambeau.schedule.plan import schedule
from targets.kernel_costs import costs

TARGETS = ("metal-emulator", "opencl-points")


@pytest.fixture(params=TARGETS)
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target whose cache is small, so that small tensors leave it."""
    if request.param == "opencl-points":
        pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
        import opencl_forms  # noqa: F401
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr(group_order, "POINTS", replace(POINTS, row_lines=1 << 10))
    return request.param


def checked(f: Callable[..., torch.Tensor], on: str, *every: tuple[torch.Tensor, ...], dynamic: bool = False,
            through: Callable[..., Callable[..., object]] = lambda f: f, by: str = "start") -> None:
    """That it agrees with eager at all of these inputs, and has bands."""
    texts: list[str] = []
    observe = lambda made: texts.extend(t.text for t in made.texts)  # noqa: E731
    pipeline.OBSERVERS.append(observe)
    try:
        with config.override(graph_cache=False):
            ours = torch.compile(f, backend="flambeau", options={"target": on}, dynamic=dynamic)
            for args in every:
                torch.testing.assert_close(through(ours)(*args), through(f)(*args), rtol=1e-4, atol=1e-4)
    finally:
        pipeline.OBSERVERS.remove(observe)
    assert any(by in text for text in texts)


@pytest.mark.parametrize(("rows", "length"), [(2, 9000), (17, 1031), (16, 1024), (33, 700), (130, 257)])
def test_maps(rows: int, length: int, on: str) -> None:
    checked(lambda x, y: x * y + 1, on, (torch.randn(rows, length), torch.randn(length)))


def test_a_map_whose_table_lacks_a_variable_between(on: str) -> None:
    checked(lambda x, y: x + y, on, (torch.randn(3, 7, 1001), torch.randn(3, 1, 1001)))


@pytest.mark.parametrize("shape", [(130, 37, 50), (70, 3, 96), (66, 16, 32)])
def test_columns_that_lie_two_ways(shape: tuple[int, ...], on: str) -> None:
    checked(lambda x, y: (x * y).sum(0), on, (torch.randn(shape), torch.randn(shape).transpose(1, 2).contiguous()
                                              .transpose(1, 2)))


@pytest.mark.parametrize("shape", [(17, 130, 97), (2, 33, 500), (5, 3, 7, 200, 64)])
def test_tiles_that_share_a_factor(shape: tuple[int, ...], on: str) -> None:
    y = torch.randn(shape[:-3:-1])
    checked(lambda x, y: x * y.t() + 1, on, (torch.randn(shape), y), by="(tile <")


@pytest.mark.parametrize("shape", [(96, 757, 13), (33, 300, 9), (3, 1031, 7)])
def test_results_that_lie_the_other_way(shape: tuple[int, ...], on: str) -> None:
    checked(lambda x: x.amax(0), on, (torch.randn(shape).permute(2, 1, 0),))


@pytest.mark.parametrize(("rows", "inner"), [(2, 2), (5, 3), (17, 2), (33, 7)])
def test_rows_that_share_a_factor(rows: int, inner: int, on: str) -> None:
    checked(lambda x, y: (x * y).sum(-1), on, (torch.randn(rows, inner, 1031), torch.randn(inner, 1031)))


def test_rows_of_any_number(on: str) -> None:
    shapes = ((19, 3, 1003), (300, 2, 400), (2, 3, 1001), (1, 1, 3))
    checked(lambda x, y: (x * y).sum(-1), on, *((torch.randn(s), torch.randn(s[1:])) for s in shapes), dynamic=True)


def test_windows_between_lines(on: str) -> None:
    x = torch.randn(3001, 2, 3).permute(2, 1, 0)
    checked(lambda x: F.avg_pool1d(x, 5, 1, 1), on, (x,))


@pytest.mark.parametrize("batch", [2, 3, 17])
def test_products_of_a_batch_whose_factors_lie_between_each_other(batch: int, on: str) -> None:
    x = torch.randn(70, 40, batch).permute(2, 0, 1)
    checked(torch.bmm, on, (x, torch.randn(batch, 40, 66)), by="if (block <")


def test_convolutions_of_images_that_lie_between_each_other(on: str) -> None:
    x, w = torch.randn(301, 5, 3).permute(2, 1, 0), torch.randn(9, 5, 3)
    checked(lambda x, w: F.conv1d(x, w, padding=1), on, (x, w), by="if (block <")


def test_one_text_for_all_sizes(on: str) -> None:
    shapes = ((19, 5003), (300, 40), (2, 3), (40, 1025))
    checked(lambda x, y: x * y, on, *((torch.randn(s), torch.randn(s[1])) for s in shapes), dynamic=True)


def test_windows_and_scatters(on: str) -> None:
    def slopes(sample: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda x, grid: torch.autograd.grad(sample(x, grid).square().sum(), [x, grid])

    sample = lambda x, grid: F.grid_sample(x, grid, align_corners=False)  # noqa: E731
    inputs = (torch.randn(2, 5, 9, 11, requires_grad=True), (torch.rand(2, 30, 20, 2) * 2 - 1).requires_grad_())
    checked(sample, on, inputs, through=slopes)


@pytest.mark.parametrize("target", TARGETS)
def test_three_that_lie_three_ways(target: str) -> None:
    if target == "opencl-points":
        pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
        import opencl_forms  # noqa: F401
    x = (torch.randn(70, 9, 3, 33), torch.randn(9, 3, 33, 70).movedim(3, 0), torch.randn(70, 3, 33, 9).movedim(3, 1))
    f = lambda x, y, z: x - y * z  # noqa: E731
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="flambeau", options={"target": target})(*x), f(*x))


def test_three_that_lie_three_ways_move_once() -> None:
    inputs = [torch.empty(shape, device="meta") for shape in ((640, 120, 320), (120, 320, 640), (640, 320, 120))]
    graph = graph_of(lambda x, y, z: [build.pointwise(x.shape, lambda i: x.load(i) + y.load((i[1], i[2], i[0]))
                                                      + z.load((i[0], i[2], i[1])))], *inputs)
    kernel, = schedule(graph, capabilities("metal")).kernels
    assert costs(kernel, Metal, SHAPE)[0].ratio < 1.1


def test_what_rows_share_moves_about_once() -> None:
    inputs = [torch.empty(shape, device="meta") for shape in ((72, 835_625), (835_625,))]
    graph = graph_of(lambda x, y: [build.pointwise(x.shape, lambda i: x.load(i) + y.load(i[1:]))], *inputs)
    kernel, = schedule(graph, capabilities("metal")).kernels
    cost, = costs(kernel, Metal, SHAPE)
    assert cost.must < cost.moved < 1.1 * cost.must and cost.groups < 1.1 * 72 * 835_625 / 1024
