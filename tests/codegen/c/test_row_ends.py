"""Ends of rows go in vectors: reductions in fewer lanes, maps in a last whole step that ends where the row does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flambeau.debug

LENGTHS = (1, 3, 8, 15, 16, 17, 31, 47, 55, 64, 129)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]).exp()


def total(x: Tensor) -> Tensor:
    return x.exp().sum(-1)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1).tanh()


def compiled(fn: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> tuple[Tensor, str]:
    """Returns the results of a compiled function, and the text of its kernels."""
    torch.compiler.reset()
    with flambeau.debug.collect() as graphs:
        got = torch.compile(fn, backend="flambeau", **options)(x)
    return got, "".join(str(getattr(t, "text", t)) for g in graphs for t in g.texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fn", [norm, total, softmax])
def test_rows_of_any_length(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """The text for any length, and that for one, which are cut at other places."""
    run = torch.compile(fn, backend="flambeau", dynamic=True)
    for n in LENGTHS:
        x = torch.randn(37, n).to(dtype)
        x[3] = 40.0  # rows of one value
        exact = fn(x.double())
        room = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        if dtype is torch.float64:
            room = {"rtol": 1e-12, "atol": 1e-13}
        elif dtype is torch.float32:
            room = {"rtol": 3e-5, "atol": 3e-6}
        torch.testing.assert_close(run(x).double(), exact, **room, equal_nan=True)
    x = torch.randn(37, 55).to(dtype)
    torch.testing.assert_close(compiled(fn, x)[0].double(), fn(x.double()), **room)


def test_the_last_step_ends_where_the_row_does() -> None:
    _, text = compiled(norm, torch.randn(40, 55))
    assert "fl::imin(" in text and ", 39)" in text  # 55 - 16
    _, text = compiled(norm, torch.randn(40, 64))
    assert ", 48)" not in text


def test_an_end_of_unknown_length_goes_in_fewer_lanes() -> None:
    _, text = compiled(total, torch.randn(40, 55), dynamic=True)
    assert all(f"l < {few};" in text for few in (16, 8, 4))


def test_choices_between_library_functions_have_no_branch() -> None:
    """Compilers do not vectorize library calls in branches. Our own float32 functions are inlined, and may stay."""
    def either(x: Tensor) -> Tensor:
        return torch.where(x > 0, x.exp(), x.tanh())

    assert "fl::choose(" in compiled(either, torch.randn(500, dtype=torch.float64))[1]
    assert "fl::choose(" not in compiled(either, torch.randn(500))[1]


def across(x: Tensor) -> Tensor:
    return x.log_softmax(1).exp() * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_columns_and_short_lines_of_any_length(dtype: torch.dtype) -> None:
    """Lines that do not follow one another in memory: each is cut into parts that fill vectors."""
    for n in LENGTHS:
        x = torch.randn(3, 21, 11, n).to(dtype).transpose(0, 2)
        for fn in (across, lambda x: (x.exp() + x.sin()).tanh()[:, ::2]):
            got, exact = compiled(fn, x)[0].double(), fn(x.double())
            room = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float64: 1e-13}[dtype]
            torch.testing.assert_close(got, exact, rtol=room, atol=room)


def test_what_is_left_after_whole_vectors_goes_in_halves() -> None:
    x = torch.randn(35, 39, 23).permute(2, 0, 1)  # 23 columns: 16, 4, 2 and 1
    text = compiled(lambda x: x.log_softmax(1), x)[1]
    parts = [(0, 16), (16, 20), (20, 22), (22, 23)]
    assert all(re.search(rf"= {a}; \w+ < {b};", text) for a, b in parts)


def test_choices_of_16_bit_floats_have_no_branch() -> None:
    """Compilers round to 16 bits only what is chosen, in a branch, and such loops are not vectors."""
    x = torch.randn(500, dtype=torch.bfloat16)
    text = compiled(lambda x: torch.where(x > 0, x, x.exp()) * 3, x, options={"numerics": "eager"})[1]
    assert "fl::choose(" in text and not re.search(r"fl::bf16 \w+ = \w+ \?", text)
