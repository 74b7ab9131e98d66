"""Contractions: thin ones are loops of our own, the others library calls."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from agreement import agree, through
from flambeau.capture.graph import capture
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.nodes import Library

aten = torch.ops.aten


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def kinds(fn: Callable[..., torch.Tensor], *args: torch.Tensor) -> set[str]:
    """The kinds of the nodes of fn's graph."""
    gm = make_fx(lambda *a: [fn(*a)], tracing_mode="fake")(*args)
    return {n.kind for n in capture(gm, Capabilities("any")).graph.nodes}


def test_vectors() -> None:
    agree(lambda a, x: (a @ x, a[0] @ x, torch.vdot(x, x), torch.addmv(a[:, 0], a, x, beta=0.5, alpha=2)),
          random(5, 5), random(5))
    assert kinds(lambda a, x: a @ x, torch.randn(3, 4), torch.randn(4)) <= {"reduce", "pointwise"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bfloat16])
def test_vectors_in_other_dtypes(dtype: torch.dtype) -> None:
    a = torch.randint(0, 9, (6, 7)).to(dtype)
    agree(lambda a: (a @ a[0], a[0].dot(a[1]), torch.addmv(a[:, 0], a, a[0])), a)


def test_nothing_to_sum() -> None:
    agree(lambda a, x: (a @ x, x @ x), torch.randn(3, 0), torch.randn(0))


def test_beta_of_zero_hides_nan() -> None:
    agree(lambda y, a, x: torch.addmv(y, a, x, beta=0), torch.tensor([math.nan, 1.0]), torch.randn(2, 3),
          torch.randn(3))


def test_sums_over_one_element_are_products() -> None:
    agree(lambda a, b, c: (a @ b, torch.addmm(c, a, b, beta=0.5, alpha=2),
                           torch.baddbmm(c[None], a[None], b[None])),
          random(5, 1), random(1, 4), random(5, 4))
    assert kinds(torch.mm, torch.randn(5, 1), torch.randn(1, 4)) == {"pointwise"}


def test_matrices_are_library_calls() -> None:
    assert kinds(torch.mm, torch.randn(5, 3), torch.randn(3, 4)) == {Library.kind}
    agree(lambda a, b: (a @ b, torch.bmm(a[None], b[None]), torch.addmm(b[0], a, b)),
          random(5, 3), random(3, 4))


def test_integer_matrices() -> None:
    agree(lambda a: a @ a, torch.randint(-9, 9, (5, 5)))


def test_convolution() -> None:
    agree(lambda x, w, b: (F.conv2d(x, w, b, 2, 1), F.conv_transpose2d(x, w[:3], None, 2),
                           F.conv1d(x[:, :, 0], w[:, :, 0], b)),
          random(2, 3, 8, 8), random(4, 3, 3, 3), random(4))


def test_attention() -> None:
    agree(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), random(2, 2, 8, 16),
          random(2, 2, 8, 16), random(2, 2, 8, 16))


def test_sizes_known_only_at_the_call() -> None:
    run = through(lambda a, x: (a @ x, torch.addmv(x[:1], a, x)), dynamic=True)
    a, x = torch.randn(7, 5), torch.randn(5)
    torch.testing.assert_close(run(a, x), (a @ x, torch.addmv(x[:1], a, x)))
