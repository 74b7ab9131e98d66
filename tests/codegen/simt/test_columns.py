"""Columns, segments and short rows on GPUs: a group shares them, at any size; what registers do not hold; none at all.

The Metal emulator runs them, which looks at every access; OpenCL compiles the same writers' texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from flambeau.config import config

METAL = "metal-emulator"
FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda x: (x.sum(0), x.sum(1)), "softmax": lambda x: (x.softmax(0), x.softmax(1)),
    "places": lambda x: (x.argmax(0), x.argmin(1)), "moments": lambda x: (x.var(0), F.layer_norm(x, x.shape[1:])),
    "statistics": lambda x: (x.logsumexp(0), F.log_softmax(x * 3, 1)),
}
SHAPES = ((70, 40), (64, 33), (65, 1), (1, 65), (3, 5), (300, 70), (1, 9000), (9000, 1), (40, 300), (100, 3000))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def agrees(f: Callable[..., object], *args: torch.Tensor, compiled: Callable[..., object]) -> None:
    torch.testing.assert_close(compiled(*args), f(*args), rtol=1e-4, atol=1e-4, equal_nan=True)


def compiled(f: Callable[..., object], on: str = METAL, **options: object) -> Callable[..., object]:
    return torch.compile(f, backend="flambeau", options={"target": on}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_every_size(name: str, shape: tuple[int, int]) -> None:
    f = FUNCTIONS[name]
    if min(shape) > 1 or name != "moments":  # of one element there is no variance
        agrees(f, torch.randn(shape), compiled=compiled(f, dynamic=False))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_text_for_all_sizes(name: str) -> None:
    f = FUNCTIONS[name]
    with config.override(graph_cache=False):
        own = compiled(f, dynamic=True)
        for shape in ((70, 40), (3, 5), (4, 9000), (2100, 35), *(((0, 5), (5, 0)) if name == "sum" else ())):
            agrees(f, torch.randn(shape), compiled=own)


@pytest.mark.parametrize("width", [4000, 40_001])
def test_rows_that_registers_hold_a_part_of(width: int) -> None:
    x = torch.randn(9, width)
    x[0, 5], x[1], x[2, 7], x[3, ::2] = torch.inf, -torch.inf, torch.nan, -torch.inf
    f = lambda x: (x.softmax(1), (x - x.amax(1, True)).exp().sum(1))  # noqa: E731
    with config.override(graph_cache=False):
        agrees(f, x, compiled=compiled(f, dynamic=width == 4000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on", [METAL, "opencl-points"])
@pytest.mark.parametrize("shape", [(2, 40_001), (12_011, 5)])
def test_values_that_registers_hold(shape: tuple[int, int], on: str, dtype: torch.dtype) -> None:
    if on != METAL:
        pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
        import opencl_forms  # noqa: F401
    a, b, c = (torch.randn(shape).to(dtype) for _ in range(3))
    a[0, 0], b[1, -1] = torch.nan, torch.inf
    axis = shape.index(max(shape))

    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        h = torch.where(a < 0.5, b * c, c) * a
        h = h - h.amax(axis, True)
        return h * (h * b).mean(axis, True) + h

    right = f(*(x.double() for x in (a, b, c)))
    own, eager = compiled(f, on, dynamic=axis == 1)(a, b, c), f(a, b, c)
    assert own.isnan().equal(eager.isnan())
    error, allowed = ((x.double() - right).nan_to_num(0, 0, 0).abs().amax(axis) for x in (own, eager))
    assert (error <= 1.5 * allowed + 1e-5 * right.nan_to_num(0, 0, 0).abs().amax(axis)).all()


@pytest.mark.parametrize("on", [METAL, "opencl-points"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_segments(mode: str, on: str) -> None:
    if on != METAL:
        pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
        import opencl_forms  # noqa: F401
    i, at = torch.randint(50, (300,)), torch.tensor([0, 3, 3, 10, 250, 299])
    for columns in (70, 1):
        f = lambda w: F.embedding_bag(i, w, at, mode=mode)  # noqa: E731
        agrees(f, torch.randn(50, columns), compiled=compiled(f, on, dynamic=False))


WINDOWS: dict[str, Callable[[torch.Tensor], object]] = {
    "average": lambda x: F.avg_pool2d(x, 16, 16, count_include_pad=False),
    "largest": lambda x: F.max_pool2d(x, 11, 4, padding=5, return_indices=True),
    "of any length": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 3),
    "folded": lambda x: F.fold(F.unfold(x[..., :20, :20], 9), (20, 20), 9),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_large_windows(name: str) -> None:
    x = torch.randn(2, 3, 32, 48)
    if name == "largest":
        x.view(-1)[::37], x.view(-1)[::11] = torch.nan, -torch.inf
    agrees(WINDOWS[name], x, compiled=compiled(WINDOWS[name], dynamic=False))


JOINED = {"prod": torch.int64, "amin": torch.int64, "amax": torch.bfloat16, "mean": torch.float16}


@pytest.mark.parametrize("on", [METAL, "opencl-points"])
@pytest.mark.parametrize("mode", JOINED)
def test_what_no_atomic_joins(mode: str, on: str) -> None:
    if on != METAL:
        pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
        import opencl_forms  # noqa: F401
    dtype = JOINED[mode]
    x, i = torch.randint(1, 4, (53, 7)).to(dtype), torch.randint(9, (53,))
    f = lambda x, i: torch.ones(9, 8, dtype=dtype)[:, 1:].index_reduce(0, i, x, mode)  # noqa: E731
    torch.testing.assert_close(compiled(f, on, dynamic=False)(x, i), f(x, i), rtol=0.02, atol=0)
