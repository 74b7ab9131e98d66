"""Where a fused kernel may keep more precision than eager, and where it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from schedule.programs import program, written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_maximum_equals_the_value_it_came_from(dtype: torch.dtype) -> None:
    """Its gradient goes to the elements that equal it: both sides of that comparison are rounded."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x, 1, [1]).amax(0)

    x = torch.randn(64, 33).to(dtype).requires_grad_()
    (ours,) = torch.autograd.grad(torch.compile(f, backend="flambeau")(x), x)
    rows = ours.float().abs().amax(1)
    assert torch.isfinite(ours).all() and (rows > 0).any()
    totals = x.detach().double().abs().sum(1)
    assert (totals[rows > 0] >= totals.max() * (1 - 2 * torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize("compare", ["eq", "le"])
def test_values_are_compared_as_eager_rounds_them(compare: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return getattr(torch, compare)(x * 1.01, y * 1.02)

    x = torch.randn(4096).bfloat16()
    y = (x.float() / 1.01).bfloat16()
    assert torch.equal(torch.compile(f, backend="flambeau")(x, y), f(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [torch.trunc, torch.floor, torch.ceil, torch.round, torch.Tensor.long,
                                   torch.Tensor.bool])
def test_whole_numbers_are_those_of_what_eager_rounds(whole: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
                                                      ) -> None:
    """Beside a step, the last digit decides: 8.998 is 9 in bfloat16."""
    a, b = (torch.rand(4000).mul(10).sub(5).to(dtype) for _ in range(2))
    b = torch.where(b.abs() < 0.1, torch.ones_like(b), b)

    def quotients(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return whole(a / b), whole(a * b), torch.div(a, b, rounding_mode="trunc"), whole(a * 1e-6)

    for ours, eagers in zip(torch.compile(quotients, backend="flambeau")(a, b), quotients(a, b), strict=True):
        assert torch.equal(ours, eagers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_maximum_of_a_rough_function_has_a_gradient(dtype: torch.dtype) -> None:
    """The compared value is computed once: vector code and the code for the rest of a line may round differently."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.amax((1, 2)).sin()
        return y.amax(0).square() + (y.amax(0, keepdim=True) + y).var(0)

    x = torch.randn(3, 8, 4, 7, dtype=dtype, requires_grad=True)
    (ours,) = torch.autograd.grad(torch.compile(f, backend="flambeau")(x).sum(), x)
    (eager,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("middle", [torch.bool, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_choice_among_integers_is_none_among_what_they_were_made_of(dtype: torch.dtype, middle: torch.dtype) -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x.to(middle), (1, 2)).to(x.dtype)

    torch._dynamo.reset()
    x = torch.tensor([[0.25, -1.5, 2.75]], dtype=dtype)
    assert torch.equal(torch.compile(padded, backend="flambeau")(x), padded(x))


def test_what_one_kernel_compares_is_no_memory() -> None:
    def entropy(x: torch.Tensor) -> torch.Tensor:
        p = x.softmax(1)
        return torch.where(p == 0, 0, p * p.log()).sum(1)

    x = torch.randn(40, 300)
    x[:, ::7] = -torch.inf
    p = program(entropy, x)
    assert len(written(p)) == 1, written(p)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(entropy, backend="flambeau")(x), entropy(x))
