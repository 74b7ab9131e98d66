"""Block kernels with nothing to do, and with so little that no axis is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flambeau.debug
from flambeau.config import config

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]

NOTHING: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "sums so far": (lambda x: x.cumsum(0), (0,)),
    "products so far": (lambda x: x.cumprod(1), (3, 0)),
    "no rows": (lambda x: x.logcumsumexp(1), (0, 3)),
    "a map": (lambda x: x.sin(), (2, 0)),
    "a reduction": (lambda x: x.amax(1), (0, 4)),
    "windows": (lambda x: F.unfold(x, 2), (0, 1, 5, 5)),
    "a scatter": (lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]), (2, 0)),
}


def both(f: Callable[..., Any], *args: torch.Tensor) -> tuple[Any, Any]:
    torch._dynamo.reset()
    return f(*args), torch.compile(f, backend="flambeau", options={"target": "interpreter"})(*args)


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_do(name: str) -> None:
    f, shape = NOTHING[name]
    x = torch.empty(shape, requires_grad=True)
    want, got = both(f, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x, torch.ones_like(got)), (torch.zeros(shape),))


@pytest.mark.parametrize("f", (lambda x: (x.cumsum(0), x.sum()), lambda x: x.norm()))
def test_no_kernel_where_there_is_nothing_to_compute(f: Callable[..., Any]) -> None:
    with config.override(target="interpreter"):
        graph, = flambeau.debug.compile_once(f, (torch.empty(0),))
    assert graph.program.steps and not graph.program.kernels  # they are eager's calls


def test_a_sum_of_nothing() -> None:
    want, got = both(lambda x: (x.sum(0), x.prod(1), x.sum()), torch.empty(0, 3))
    torch.testing.assert_close(got, want)


def test_a_scatter_of_few_points() -> None:
    counts = torch.tensor([2, 0, 1, 3])
    want, got = both(lambda x, n: x.repeat_interleave(n, 0, output_size=6), torch.randn(4, 1), counts)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [4, 5, 7])
def test_windows_that_overlap_with_gaps(size: int) -> None:
    f = lambda x: F.unfold(x, 2, dilation=2, stride=2)  # noqa: E731
    x = torch.randn(2, 3, size, size, requires_grad=True)
    want, got = both(f, x)
    seed = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, x, seed), torch.autograd.grad(want, x, seed))


def test_quotients_of_constants() -> None:
    f = lambda n: (n // 3, n % 3, n.fmod(-3), torch.div(n, -7, rounding_mode="trunc"))  # noqa: E731
    want, got = both(f, torch.arange(-20, 20))
    torch.testing.assert_close(got, want)


def test_zero_division() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.compile(lambda a, b: a // b, backend="flambeau", options={"target": "interpreter"})(
            torch.arange(4), torch.tensor([1, 0, 2, 3]))


@pytest.mark.parametrize("target", ["interpreter", "opencl"])
def test_quotients_of_products_beyond_32_bits(target: str) -> None:
    """Which outputs an input reaches is found by dividing y * 50000 * 2; the quotient is small, the product is not."""
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, 50_000, mode="linear")

    grads = []
    for run in (f, torch.compile(f, backend="flambeau", options={"target": target})):
        x = torch.linspace(-1, 1, 60_000).reshape(1, 1, -1).requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("shape", "dim"), [((3, 40, 17), 1), ((5, 13), 1), ((700, 5), 0), ((2, 2500), 1)])
def test_first_of_equal_extrema_and_of_nan(shape: tuple[int, ...], dim: int) -> None:
    """Also where nothing is larger than what a reduction starts from."""
    draw = torch.Generator().manual_seed(sum(shape))
    x = torch.randint(-3, 4, shape, generator=draw).float()
    x[torch.rand(shape, generator=draw) < 0.3] = -torch.inf
    some = torch.where(torch.rand(shape, generator=draw) < 0.02, torch.nan, x)
    for t in (x, some, torch.full(shape, -torch.inf), torch.full(shape, torch.nan)):
        want, got = both(lambda t: (t.argmax(dim), (-t).argmin(dim), *t.max(dim), t.argmax()), t)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(137, 301), (7, 2051), (300, 3)])
def test_sums_over_what_lies_two_ways(shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape[::-1]).t(), torch.randn(shape)
    want, got = both(lambda x, y: F.huber_loss(x, y.sigmoid()), x.double(), y.double())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("length", [5, 569, 1030])
def test_rows_that_are_read_across(length: int) -> None:
    want, got = both(lambda x: F.layer_norm(x, (length,)), torch.randn(length, 2113, dtype=torch.float64).t())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape, order, f", (
    ((600, 501), (1, 0), lambda x: x.softmax(0).contiguous()),
    ((41, 39, 200), (0, 2, 1), lambda x: x.softmax(0).contiguous()),
    ((41, 39, 200), (1, 2, 0), lambda x: x.log_softmax(1).contiguous() * 2),
    ((5, 13, 11, 70), (3, 0, 1, 2), lambda x: x.mul(2).contiguous()),
    ((15, 16, 3, 40), (3, 2, 1, 0), lambda x: x.mul(2).contiguous()),
    ((70, 9, 6), (0, 1, 2), lambda x: x[..., :5].logcumsumexp(0)),
    ((70, 9, 6), (0, 1, 2), lambda x: x[..., :5].cummax(0).values),
    ((3, 37, 5, 4), (1, 0, 2, 3), lambda x: torch.cat((x, x.transpose(0, 1).contiguous().transpose(0, 1)), 1)),
))
def test_what_is_written_across_its_reads(shape: tuple[int, ...], order: tuple[int, ...], f: Callable[..., Any]
                                          ) -> None:
    x = torch.randn(shape).permute(order)
    want, got = both(f, x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()


def test_a_map_of_one_element() -> None:
    x = torch.tensor(2.5)
    want, got = both(lambda x: torch.minimum(x, x * 2) + 1, x)
    torch.testing.assert_close(got, want)
