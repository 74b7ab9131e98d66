"""torch.special against eager: gradients, tails, and PyTorch's own samples of every function."""

from __future__ import annotations

import pytest
import torch

from agreement import agree
from flambeau.testing.opinfo import OPS
from samples import samples_agree

SAMPLED = (
    "lgamma", "digamma", "igamma", "igammac", "i0", "mvlgamma_mvlgamma_p_3", "polygamma_polygamma_n_2",
    *(name for name in OPS if name.startswith("special_") and "xlog" not in name),
)


def test_gamma_functions_and_their_gradients() -> None:
    x = torch.tensor([0.1, 0.7, 1.0, 2.5, 9.0], dtype=torch.float64, requires_grad=True)
    agree(lambda x: [x.lgamma(), x.digamma(), x.polygamma(1), x.polygamma(3), torch.mvlgamma(x + 2, 3)], x)


def test_bessel_functions_and_their_gradients() -> None:
    x = torch.tensor([-3.0, -0.1, 0.2, 1.0, 12.0], dtype=torch.float64, requires_grad=True)
    special = torch.special
    agree(lambda x: [special.i0(x), special.i0e(x), special.i1(x), special.i1e(x), special.erfcx(x)], x)


def test_the_normal_distribution_in_its_tails() -> None:
    x = torch.tensor([-30.0, -10.0, -1.0, 0.0, 0.99, 1.0, 5.0], dtype=torch.float64)
    agree(lambda x: [torch.special.log_ndtr(x), torch.special.ndtr(x)], x)
    agree(torch.special.ndtri, torch.tensor([0.0, 1e-300, 1e-9, 0.5, 0.999, 1.0], dtype=torch.float64))


def test_polynomials_of_a_degree_for_each_element() -> None:
    x, n = torch.linspace(-0.9, 0.9, 7)[:, None], torch.arange(6)
    special = torch.special
    agree(lambda x, n: [special.chebyshev_polynomial_t(x, n), special.hermite_polynomial_he(x, n),
                        special.legendre_polynomial_p(x, n), special.laguerre_polynomial_l(x, 3)], x, n)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(name: str) -> None:
    samples_agree(name, limit=3)
