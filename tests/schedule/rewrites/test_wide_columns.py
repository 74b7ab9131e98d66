"""Few columns are summed several rows side by side; others, and what waits for the sum at the same points, as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from schedule.programs import launches, program


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def widths(fn: Callable[..., Any], *args: Any, numerics: str = "fast") -> list[int]:
    """The extents of the variables along which kernels have vectors."""
    found = [getattr(k, "vector", None) for k in launches(program(fn, *args, numerics=numerics))]
    return [v.size.const for v in found if v is not None]


@pytest.mark.parametrize(("fn", "shape", "wide"), [
    (total, (3720, 13), 195),  # 15 rows at a time
    (total, (4096, 8), 256), (total, (4096, 3), 192),
    (lambda x: x.sigmoid().amax((0, 1)), (7, 512, 5), 160),
    (lambda x: x.argmax(1), (7, 512, 5), 512),  # it says which row: rows are apart
    (total, (997, 13), 13),  # rows of a prime number
    (total, (4096, 16), 16),  # one whole vector
    (total, (30, 13), 13),  # too few rows
    (total, (3720, 100), 100),
    (lambda x: x.softmax(0), (3720, 13), 13),  # the sum waits for the maximum
])
def test_few_columns_are_as_many_as_vectors_have_lanes(fn: Callable[..., Any], shape: tuple[int, ...], wide: int
                                                        ) -> None:
    assert max(widths(fn, torch.randn(shape))) == wide


def test_with_eagers_bits_sums_stay_as_they_are() -> None:
    x = torch.randn(3720, 13)
    assert torch.equal(torch.compile(total, backend="flambeau", options={"numerics": "eager"})(x), total(x))


def test_what_is_read_beside_the_rows_keeps_them_apart() -> None:
    assert max(widths(lambda x, y: (x * y).sum(0), torch.randn(3720, 13), torch.randn(13))) == 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fn", [total, lambda x: x.var(0), lambda x: x.amin(0), lambda x: x.argmax(0),
                                lambda x: x.logsumexp(0), lambda x: x.prod(0), lambda x: (x > 3).any(0)])
def test_results(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.randn(960, 13).to(dtype)
    got, want = torch.compile(fn, backend="flambeau")(x), fn(x)
    torch.testing.assert_close(got, want)
