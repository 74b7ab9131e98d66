"""Functions that create tensors, against eager: dtypes, ends, empty ranges, triangles, windows, run-time sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

from agreement import agree
from samples import samples_agree

SAMPLED = (
    "full", "full_like", "new_full", "zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones",
    "arange", "linspace", "linspace_tensor_overload", "logspace", "logspace_tensor_overload", "eye",
    "scalar_tensor",
)


def test_constants_and_their_dtypes() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.full((2, 3), 1), torch.full((2,), 1.5), torch.full((), True), torch.full_like(x, 3),
                torch.full_like(x, 2.7, dtype=torch.int32), x.new_full((2,), -1), torch.zeros(3),
                torch.zeros(0, 2), torch.ones(2, dtype=torch.bool), torch.zeros_like(x),
                torch.ones_like(x, dtype=torch.int64), torch.scalar_tensor(3),
                torch.scalar_tensor(2.5, dtype=torch.float64), x.clone().fill_(4),
                x * 0 + 1]

    agree(fn, torch.randn(2, 3).bfloat16())


def test_an_empty_tensor_has_the_right_shape() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(2, 3).fill_(1) + torch.empty_like(x).copy_(x) + x.new_empty((2, 3)).zero_()

    agree(fn, torch.randn(2, 3))


def test_ranges() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.arange(5), torch.arange(2, 9), torch.arange(9, 2, -3), torch.arange(0),
                torch.arange(5.0), torch.arange(0, 1, 0.1), torch.arange(1, -1, -0.3, dtype=torch.float64),
                torch.arange(0, 5, dtype=torch.int32), torch.arange(3, dtype=torch.bfloat16),
                torch.arange(0.5, 3.5, dtype=torch.int64), x]

    agree(fn, torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ranges_of_fractions_have_eager_bits(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.arange(0.3, 10, 0.07, dtype=dtype) + x, torch.arange(5, -3, -0.3, dtype=dtype) + x]

    x = torch.ones(1, dtype=dtype)
    for ours, eager in zip(torch.compile(fn, backend="flambeau", options={"numerics": "eager"})(x), fn(x), strict=True):
        assert torch.equal(ours, eager)


def test_even_steps_are_exact_at_both_ends() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.linspace(0, 1, 7), torch.linspace(3, -2, 100), torch.linspace(-1, 1, 1),
                torch.linspace(0, 1, 0), torch.linspace(0, 10, 5, dtype=torch.int64),
                torch.linspace(-7, 9, 33, dtype=torch.int32),
                torch.linspace(-1, 1, 9, dtype=torch.float64), torch.logspace(-2, 2, 5),
                torch.logspace(0, 4, 5, base=2, dtype=torch.int64), torch.linspace(x[0], x[1], 4)]

    agree(fn, torch.tensor([1.0, 2.0]))


def test_triangles_of_indices() -> None:
    shapes = list(itertools.product((0, 1, 5), (0, 1, 3, 7), (-9, -2, -1, 0, 1, 4, 9)))

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [f(r, c, o) for f in (torch.tril_indices, torch.triu_indices) for r, c, o in shapes] + [x]

    agree(fn, torch.ones(1))


def test_large_triangles_of_indices() -> None:
    """The row comes from a square root, which must not be off by one."""
    agree(lambda x: [torch.tril_indices(900, 1000, 3), torch.triu_indices(1000, 900, -2), x], torch.ones(1))


def test_windows() -> None:
    names = ("bartlett", "blackman", "hamming", "hann", "kaiser")

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        makers = [getattr(torch, f"{name}_window") for name in names]
        out = [make(n, periodic=p) for make in makers for n in (1, 2, 9) for p in (True, False)]
        return [*out, torch.kaiser_window(8, True, 5.0), torch.hamming_window(8, True, 0.5, 0.4),
                torch.hann_window(8, dtype=torch.float64), torch.eye(3), torch.eye(2, 4, dtype=torch.int64),
                x]

    agree(fn, torch.ones(1))


def test_sizes_known_at_run_time() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        n = x.shape[0]
        return [torch.arange(n), torch.arange(1, n, 2), torch.full((n,), n), torch.eye(n), torch.zeros(n, 2),
                torch.linspace(0, 1, n), torch.arange(n, 0, -1)]

    compiled = torch.compile(fn, backend="flambeau", fullgraph=True, dynamic=True)
    for n in (3, 6, 11):
        torch.testing.assert_close(compiled(torch.ones(n)), fn(torch.ones(n)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(name: str, dtype: torch.dtype) -> None:
    samples_agree(name, dtype, limit=5)
