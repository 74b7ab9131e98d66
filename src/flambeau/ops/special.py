"""The functions of torch.special: gamma, zeta, Bessel, error functions and orthogonal polynomials."""

from __future__ import annotations

import math

import torch
import torch._prims  # defines torch.ops.prims

from flambeau.ir.expr import Expr, binary, const, unary, where
from flambeau.ir.scalar import digamma, erfc, log, log1p, math1, math2
from flambeau.ops.registry import lower_pointwise, table

aten = torch.ops.aten
prims = torch.ops.prims

table("float", {
    aten.lgamma: math1("lgamma"), prims.lgamma: math1("lgamma"),
    aten.digamma: math1("digamma"), prims.digamma: math1("digamma"),
    aten.igamma: math2("igamma"), prims.igamma: math2("igamma"),
    aten.igammac: math2("igammac"), prims.igammac: math2("igammac"),
    aten.special_zeta: math2("zeta"), prims.zeta: math2("zeta"),
    aten.i0: math1("i0"), prims.bessel_i0: math1("i0"),
    aten.special_i0e: math1("i0e"), prims.bessel_i0e: math1("i0e"),
    aten.special_i1: math1("i1"), prims.bessel_i1: math1("i1"),
    aten.special_i1e: math1("i1e"), prims.bessel_i1e: math1("i1e"),
    prims.bessel_j0: math1("bessel_j0"), prims.bessel_j1: math1("bessel_j1"),
    prims.spherical_bessel_j0: math1("spherical_bessel_j0"),
    prims.ndtri: math1("ndtri"), prims.erfcx: math1("erfcx"),
})
table("float", {getattr(aten, f"special_{name}"): math1(name) for name in (
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "erfcx", "modified_bessel_i0",
    "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "ndtri", "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1", "spherical_bessel_j0",
)})
table("float", {getattr(aten, f"special_{name}"): math2(name) for name in (
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he",
    "laguerre_polynomial_l", "legendre_polynomial_p",
)})


@lower_pointwise(aten.polygamma, kind="float", operands=2)
def polygamma(n: Expr, x: Expr) -> Expr:
    return digamma(x) if n.op == "const" and n.attr == 0 else binary("polygamma", n, x)


@lower_pointwise(aten.special_log_ndtr, kind="float")
def log_ndtr(x: Expr) -> Expr:
    """log of the normal distribution function; the scaled erfc keeps the far left tail from underflowing."""
    t = x * math.sqrt(0.5)
    return where(x < 1, log(unary("erfcx", -t) / 2) - t * t, log1p(-erfc(t) / const(2, x.dtype)))
