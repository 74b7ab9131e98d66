"""Symbolic sizes as Python source: what a run computes is what the index algebra means."""

from __future__ import annotations

import pytest
import torch

from flambeau.codegen.source import host_text
from flambeau.ir.index import Index, Sym, as_index, floordiv, maximum, minimum, mod

A, B, C = (as_index(Sym(name)) for name in "abc")


@pytest.mark.parametrize(("index", "value"), [
    (floordiv(A, B * C), 30 // (2 * 3)), (mod(A, B * C), 30 % 6), (mod(as_index(-1), B * C), 5),
    (floordiv(A * B, C) * B, 30 * 2 // 3 * 2), (floordiv(A - B, B * C) * -1 + C, -(28 // 6) + 3),
    (mod(A - B * C, C * C), 24 % 9), (minimum(A, B * C) + maximum(B, C), 9),
    (floordiv(mod(A, B * C + 1), C), 30 % 7 // 3)], ids=str)
def test_quotients_by_products(index: Index, value: int) -> None:
    assert eval(host_text(index), {"a": 30, "b": 2, "c": 3}) == value


def test_the_last_element_of_what_was_flattened() -> None:
    """Its place is a remainder by a product of sizes."""

    def last(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(1, 2).flatten()
        return y.select(0, y.shape[0] - 1)

    torch._dynamo.reset()
    compiled = torch.compile(last, backend="flambeau", dynamic=True)
    for shape in ((2, 3, 2, 2), (3, 4, 5, 2)):
        x = torch.randn(shape)
        assert compiled(x) == last(x)


def test_a_size_that_a_guard_holds_at_one_is_broadcast() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 4) * y.view(-1, 4)

    torch._dynamo.reset()
    compiled = torch.compile(product, backend="flambeau", dynamic=True)
    for n, m in ((4, 8), (8, 4), (8, 8), (4, 12), (12, 12)):
        x, y = torch.randn(n), torch.randn(m)
        torch.testing.assert_close(compiled(x, y), product(x, y))


def test_starts_that_only_the_run_knows() -> None:
    """A number may be counted from the end: known by its range, or by its value alone."""

    def parts(x: torch.Tensor, n: int, m: int) -> tuple[torch.Tensor, ...]:
        return x[:, n - 2::2] + 1, x[:, n - 2::2], x[:, n - m:] * 2

    torch._dynamo.reset()
    compiled = torch.compile(parts, backend="flambeau", dynamic=True)
    x = torch.randn(3, 5)
    for n, m in ((1, 3), (4, 2), (2, 4)):
        for ours, eager in zip(compiled(x, n, m), parts(x, n, m), strict=True):
            assert torch.equal(ours, eager)


def test_windows_over_a_symbolic_size_less_one() -> None:
    pool = torch.nn.functional.adaptive_max_pool1d
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: pool(x.diff(), 2), backend="flambeau", dynamic=True, fullgraph=True)
    x = torch.randn(2, 3, 6)
    assert torch.equal(compiled(x), pool(x.diff(), 2))
