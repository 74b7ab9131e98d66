"""The functions of torch.special: gamma, zeta, Bessel, error functions and orthogonal polynomials."""

from __future__ import annotations

import torch

from flambeau.ir.expr import OPS, SPECIAL, Expr, binary
from flambeau.ir.scalar import digamma, math1, math2
from flambeau.ops.facts import ON_CUDA, describe
from flambeau.ops.registry import lower_pointwise, table

aten = torch.ops.aten

table("float", {getattr(aten, name if hasattr(aten, name) else f"special_{name}"):
                math1(name) if OPS[name][0] == 1 else math2(name) for name in sorted(SPECIAL - {"polygamma"})})
describe(aten.lgamma, exact=ON_CUDA)

table("float", {aten.special_modified_bessel_i0: math1("i0"), aten.special_modified_bessel_i1: math1("i1")})


@lower_pointwise(aten.polygamma, kind="float", operands=2)
def polygamma(n: Expr, x: Expr) -> Expr:
    return digamma(x) if n.op == "const" and n.attr == 0 else binary("polygamma", n, x)
