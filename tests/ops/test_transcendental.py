"""Exponentials, logarithms, angles against eager: limits, infinities, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from agreement import agree
from samples import samples_agree

SAMPLED = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "sigmoid", "sinc", "hypot",
    "atan2", "logaddexp", "logaddexp2", "xlogy", "special_xlog1py", "special_entr",
)
EDGES = (-math.inf, -200.0, -2.0, -1.0, -0.5, -1e-30, -0.0, 0.0, 1e-30, 0.5, 1.0, 2.0, 200.0, math.inf,
         math.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_edges(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.exp(), x.exp2(), x.expm1(), x.log(), x.log2(), x.log10(), x.log1p(), x.sin(), x.cos(),
                x.tan(), x.asin(), x.acos(), x.atan(), x.sinh(), x.cosh(), x.tanh(), x.asinh(), x.acosh(),
                x.atanh(), x.erf(), x.erfc(), x.erfinv(), x.sigmoid(), x.sinc(), torch.special.entr(x)]

    agree(fn, torch.tensor(EDGES, dtype=dtype))


def test_edges_of_two() -> None:
    x = torch.tensor(EDGES)

    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [torch.atan2(a, b), torch.hypot(a, b), torch.logaddexp(a, b), torch.logaddexp2(a, b),
                torch.xlogy(a, b), torch.special.xlog1py(a, b), torch.xlogy(a, 2), torch.xlogy(0, b)]

    agree(fn, x[:, None], x)


def test_integers_become_floats() -> None:
    agree(lambda n, b: [n.exp(), n.log1p(), n.sin(), n.sqrt(), n.sigmoid(), b.exp(), n.atan2(n), n.sinc()],
          torch.arange(5), torch.tensor([True, False]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(name: str) -> None:
    samples_agree(name)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_every_sample(name: str, dtype: torch.dtype) -> None:
    samples_agree(name, dtype, limit=None)
