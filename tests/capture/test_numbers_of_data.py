"""Numbers that data decide, read inside a graph: `.item()`, `.tolist()`, and the sizes of results such as nonzero's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def in_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def first_rows(n: torch.Tensor, y: torch.Tensor) -> Any:
    k = (n + 1).item()
    torch._check(k >= 0)
    torch._check(k <= y.shape[0])
    return y[:k].sum() * 2, torch.zeros(k) + 1, k


def beside_the_number(n: torch.Tensor, y: torch.Tensor) -> Any:
    """What depends on the number would fuse with what is computed before it."""
    k, z = (n * 2).item(), y * 2
    return z.sin() * k, z.sum(), z.cos() + k


def after_writes(n: torch.Tensor, y: torch.Tensor) -> Any:
    y.mul_(n)
    k = y.int().sum().item()
    y.add_(1)
    return y * k + y.int().sum().item()


def of_other_types(n: torch.Tensor, y: torch.Tensor) -> Any:
    s, b = (y.double() * 2).sum().item(), (y.sum() > 0).item()
    return torch.full((3,), s), y * s, s, b


def from_a_list(n: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = (y[0, :2] * 10).int().tolist()
    return y * a + b, a, [b]


def size_alone(n: torch.Tensor, y: torch.Tensor) -> Any:
    """Nothing reads the positions, but their number."""
    k = (y * 2).round().nonzero().shape[0]
    return torch.ones(k), y * k, k


CASES = (first_rows, beside_the_number, after_writes, of_other_types, from_a_list, size_alone)


@pytest.mark.parametrize("target", ["cpu", "opencl"])
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_results(case: Callable[..., Any], target: str) -> None:
    compiled = torch.compile(case, backend="flambeau", fullgraph=True, options={"target": target})
    for k in (3, 0, 2):
        n, y = torch.tensor(k), torch.rand(5, 4)
        expected = case(n.clone(), y.clone())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that a graph is left to ATen is a warning
            found = compiled(n, y)
        torch.testing.assert_close(found, expected)


def test_gradients() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        k = (x > 0.5).sum().item()
        return ((x * k).sin() + k).sum() * k

    compiled = torch.compile(f, backend="flambeau", fullgraph=True)
    for _ in range(3):
        x, y = (t.clone().requires_grad_() for t in [torch.rand(7)] * 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = compiled(x)
            found.backward()
        expected = f(y)
        expected.backward()
        torch.testing.assert_close((found, x.grad), (expected, y.grad))


def test_checks_of_numbers_are_made() -> None:
    compiled = torch.compile(first_rows, backend="flambeau", fullgraph=True)
    compiled(torch.tensor(1), torch.ones(5, 4))
    for f in (first_rows, compiled):
        with pytest.raises(RuntimeError):
            f(torch.tensor(9), torch.ones(5, 4))
