"""The functions of torch.special: gamma, zeta, Bessel, error functions and orthogonal polynomials."""

from __future__ import annotations

import torch

from flambeau.ir.expr import Expr, binary
from flambeau.ir.scalar import digamma, math1, math2
from flambeau.ops.registry import lower_pointwise, table

aten = torch.ops.aten

table("float", {
    aten.lgamma: math1("lgamma"), aten.digamma: math1("digamma"), aten.i0: math1("i0"), aten.igamma: math2("igamma"),
    aten.igammac: math2("igammac"), aten.special_zeta: math2("zeta"),
})
table("float", {getattr(aten, f"special_{name}"): math1(name) for name in (
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "erfcx", "i0e", "i1", "i1e", "modified_bessel_i0",
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
