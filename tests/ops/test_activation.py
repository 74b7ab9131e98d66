"""Activations and their gradients against eager: at the corners, far out, and on PyTorch's own samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from agreement import agree, through
from samples import samples_agree

# Every corner of the piecewise functions, and what overflows an exponential.
CORNERS = (-200.0, -50.0, -20.5, -6.0, -3.0, -2.0, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 1.0, 2.0, 3.0, 6.0,
           20.5, 50.0, 200.0)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu, "relu6": F.relu6, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "rrelu": F.rrelu,
    "threshold": lambda x: F.threshold(x, 0.5, 7.0), "hardtanh": lambda x: F.hardtanh(x, -2.0, 3.0),
    "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "softshrink": F.softshrink,
    "hardshrink": F.hardshrink, "elu": lambda x: F.elu(x, 1.5), "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu, "softplus": lambda x: F.softplus(x, 2.0, 15.0), "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": F.silu, "mish": F.mish, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softsign": F.softsign, "tanhshrink": F.tanhshrink,
}
SAMPLED = tuple(f"nn_functional_{name}" for name in (
    "relu", "relu6", "leaky_relu", "hardtanh", "hardsigmoid", "hardswish", "softshrink", "hardshrink", "silu",
    "mish", "gelu", "elu", "celu", "selu", "softplus", "logsigmoid", "threshold", "prelu", "glu", "softsign",
    "tanhshrink",
)) + ("logit",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_corners(dtype: torch.dtype) -> None:
    x = torch.tensor(CORNERS, dtype=dtype, requires_grad=True)
    agree(lambda x: [f(x) for f in ACTIVATIONS.values()], x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_at_the_corners(name: str) -> None:
    """One by one: the gradients of all of them together would be one sum."""
    agree(ACTIVATIONS[name], torch.tensor(CORNERS, requires_grad=True))


def test_nan_and_infinity() -> None:
    x = torch.tensor([math.nan, math.inf], dtype=torch.float64)
    agree(lambda x: [f(x) for f in ACTIVATIONS.values()], x)


def test_mish_keeps_its_digits_far_left() -> None:
    x = torch.linspace(-30, 30, 601)
    exact = F.mish(x.double())
    torch.testing.assert_close(through(F.mish)(x).double(), exact, rtol=1e-6, atol=0)


def test_logit_inside_and_outside() -> None:
    x = torch.tensor([-0.5, 0.0, 1e-4, 0.3, 0.9999, 1.0, 1.5], requires_grad=True)
    agree(lambda x: [torch.logit(x, 1e-3)], x)
    agree(lambda x: [torch.logit(x)], x)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_glu_along_every_dimension(dim: int) -> None:
    agree(lambda x: F.glu(x, dim), torch.randn(4, 6, 8, requires_grad=True))


@pytest.mark.parametrize("channels", [1, 3])
def test_prelu_of_one_and_of_many_slopes(channels: int) -> None:
    x, w = torch.randn(2, 3, 4, requires_grad=True), torch.rand(channels, requires_grad=True)
    agree(F.prelu, x, w)


def test_rrelu_remembers_the_slopes_it_drew() -> None:
    x = torch.randn(1000, requires_grad=True)
    y = through(lambda x: F.rrelu(x, 0.1, 0.3, training=True))(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad * x, y)
    slopes = grad[x < 0]
    assert slopes.min() >= 0.1 and slopes.max() <= 0.3 and slopes.std() > 0.03
    assert bool((grad[x > 0] == 1).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(name: str, dtype: torch.dtype) -> None:
    samples_agree(name, dtype)


def test_bounds_that_a_dtype_does_not_have() -> None:
    """Older releases of torch refuse them, newer ones cut at zero."""
    x = torch.arange(4, dtype=torch.uint8)
    try:
        expected = F.hardtanh(x)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="unsigned type with negative limits"):
            torch.compile(F.hardtanh, backend="flambeau")(x)
    else:
        assert torch.equal(torch.compile(F.hardtanh, backend="flambeau")(x), expected)


def test_the_slope_of_a_hard_sigmoid_has_eager_bits() -> None:
    """Which in double precision is a sixth in single precision."""
    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.hardsigmoid_backward(torch.ones_like(x), x)

    x = torch.linspace(-4, 4, 37, dtype=torch.float64)
    assert torch.equal(torch.compile(slope, backend="flambeau", options={"numerics": "eager"})(x), slope(x))
