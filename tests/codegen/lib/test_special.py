"""The special functions of generated kernels: against scipy, and at the edges against torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from codegen.native import Native, float_kernels

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

EDGES = np.array(
    [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1,
        -1,
        2,
        -2,
        -2.5,
        3,
        -3,
        4,
        -4,
        8,
        10,
        800,
        -800,
        1e-30,
        -1e-30,
        np.inf,
        -np.inf,
        np.nan,
    ]
)

# name: (scipy, lowest argument, highest, absolute tolerance where the function has zeros)
UNARY: dict[str, tuple[Callable[..., Any], float, float, float]] = {
    "lgamma": (scipy.special.gammaln, -20, 200, 1e-12),
    "digamma": (scipy.special.digamma, -20, 200, 1e-13),
    "i0": (scipy.special.i0, -50, 50, 0),
    "i0e": (scipy.special.i0e, -500, 500, 0),
    "i1": (scipy.special.i1, -50, 50, 0),
    "i1e": (scipy.special.i1e, -500, 500, 0),
    "modified_bessel_k0": (scipy.special.k0, 0, 100, 0),
    "modified_bessel_k1": (scipy.special.k1, 0, 100, 0),
    "scaled_modified_bessel_k0": (scipy.special.k0e, 0, 1000, 0),
    "scaled_modified_bessel_k1": (scipy.special.k1e, 0, 1000, 0),
    "bessel_j0": (scipy.special.j0, -60, 60, 1e-14),
    "bessel_j1": (scipy.special.j1, -60, 60, 1e-14),
    "bessel_y0": (scipy.special.y0, 0, 60, 1e-14),
    "bessel_y1": (scipy.special.y1, 0, 60, 1e-14),
    "spherical_bessel_j0": (lambda x: scipy.special.spherical_jn(0, x), -60, 60, 1e-15),
    "airy_ai": (lambda x: scipy.special.airy(x)[0], -30, 30, 1e-13),
    "erfcx": (scipy.special.erfcx, -20, 100, 0),
    "ndtri": (scipy.special.ndtri, 0, 1, 0),
}
TORCH_NAMES = {"lgamma": "gammaln", "igamma": "gammainc", "igammac": "gammaincc"}
POLYNOMIALS = (
    "chebyshev_polynomial_t",
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    kernels = float_kernels(UNARY, 1) + float_kernels(
        [*POLYNOMIALS, "zeta", "igamma", "igammac", "polygamma"], 2
    )
    return Native(tmp_path_factory.mktemp("special"), kernels, "special.h", "-march=native")


def of_torch(name: str) -> Callable[..., torch.Tensor]:
    return getattr(torch.special, TORCH_NAMES.get(name, name))


def grid(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.meshgrid(a, b)
    return first.ravel(), second.ravel()


def assert_close(got: np.ndarray, want: np.ndarray, rtol: float = 1e-12, atol: float = 0.0) -> None:
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", UNARY)
def test_unary(native: Native, name: str) -> None:
    reference, low, high, atol = UNARY[name]
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(low, high, 2000), rng.uniform(max(low, -3), min(high, 3), 2000)])
    if name == "ndtri":
        x = np.concatenate([x, 10.0 ** rng.uniform(-300, -1, 500), 1 - 10.0 ** rng.uniform(-15, -1, 500)])
    assert_close(native(f"f64_{name}", x), reference(x), atol=atol)
    single = x.astype(np.float32)
    assert_close(
        native(f"f32_{name}", single),
        reference(single.astype(np.float64)).astype(np.float32),
        rtol=2e-7,
        atol=1e-45 + atol,
    )


@pytest.mark.parametrize("name", UNARY)
def test_unary_edges_as_in_torch(native: Native, name: str) -> None:
    want = of_torch(name)(torch.from_numpy(EDGES)).numpy()
    assert_close(native(f"f64_{name}", EDGES), want, rtol=1e-6, atol=1e-6)
    assert_close(
        native(f"f32_{name}", EDGES.astype(np.float32)), want.astype(np.float32), rtol=1e-4, atol=1e-6
    )


def test_zeta(native: Native) -> None:
    rng = np.random.default_rng(2)
    x, q = grid(rng.uniform(1.01, 30, 60), rng.uniform(0.01, 100, 60))
    assert_close(native("f64_zeta", x, q), scipy.special.zeta(x, q))
    x, q = grid(
        np.array([1, 2, 2.5, 3, 0.5, -1, np.inf, np.nan]), np.array([0, 1, -1, -0.5, 2.5, np.inf, np.nan])
    )
    assert_close(native("f64_zeta", x, q), torch.special.zeta(*map(torch.from_numpy, (x, q))).numpy())
    # Left of 0, terms are added one by one near it and reflected far from it: both must agree.
    near, far = np.array([-999.25]), np.array([-1000.25])
    order = np.array([3.0])
    step = native("f64_zeta", order, far) - native("f64_zeta", order, near)
    assert_close(step, far**-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["igamma", "igammac"])
def test_incomplete_gamma(native: Native, name: str) -> None:
    reference = {"igamma": scipy.special.gammainc, "igammac": scipy.special.gammaincc}[name]
    rng = np.random.default_rng(3)
    a, x = grid(10.0 ** rng.uniform(-4, 3, 80), 10.0 ** rng.uniform(-4, 3, 80))
    large = 10.0 ** rng.uniform(0, 7, 500)
    a, x = (
        np.concatenate([a, large]),
        np.concatenate([x, large * (1 + rng.normal(size=500) / np.sqrt(large))]),
    )
    # scipy itself is good to 1e-11 here.
    assert_close(native(f"f64_{name}", a, x), reference(a, x), rtol=1e-11, atol=1e-290)
    a, x = grid(*[np.array([0, 1, 2, -1, np.inf, np.nan])] * 2)
    assert_close(native(f"f64_{name}", a, x), of_torch(name)(*map(torch.from_numpy, (a, x))).numpy())


def test_polygamma(native: Native) -> None:
    n, x = grid(np.arange(0.0, 6), np.random.default_rng(4).uniform(-2.4, 50, 300))
    assert_close(
        native("f64_polygamma", n, x), scipy.special.polygamma(n.astype(int), x), rtol=1e-11, atol=1e-12
    )
    for order in (2, 3):
        want = torch.special.polygamma(order, torch.from_numpy(EDGES)).numpy()
        assert_close(native("f64_polygamma", np.full_like(EDGES, order), EDGES), want)


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials_as_in_torch(native: Native, name: str) -> None:
    rng = np.random.default_rng(5)
    points = np.concatenate([EDGES[~np.isnan(EDGES)], rng.uniform(-2, 2, 50), rng.uniform(0, 1, 50)])
    for kind, dtype, rtol, atol in (("f64", np.float64, 1e-12, 1e-12), ("f32", np.float32, 1e-4, 1e-4)):
        x, n = (v.astype(dtype) for v in grid(points, np.array([-1, *range(13), 2.7, np.inf, np.nan])))
        want = of_torch(name)(torch.from_numpy(x), torch.from_numpy(n)).numpy()
        # Near a zero of the polynomial, what is left is the rounding of terms as large as the degree.
        scale = np.maximum(1, np.abs(np.nan_to_num(n, posinf=1)) ** 4)
        assert_close(native(f"{kind}_{name}", x, n) / scale, want / scale, rtol, atol)


@pytest.mark.parametrize("name", ["hermite_polynomial_h", "hermite_polynomial_he"])
def test_hermite_polynomials_end(native: Native, name: str) -> None:
    for kind, dtype, last in (("f64", np.float64, 512), ("f32", np.float32, 128)):
        assert np.isnan(
            native(f"{kind}_{name}", np.full(2, 0.5, dtype), np.array([last + 1, 600], dtype))
        ).all()


def test_nan_stays_nan(native: Native) -> None:
    nan, degree = np.full(8, np.nan), np.arange(1.0, 9)
    for name in POLYNOMIALS:
        assert np.isnan(native(f"f64_{name}", nan, degree)).all(), name
