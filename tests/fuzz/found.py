"""What the fuzzer found once, shrunk: `test_fuzz.py` runs these on every target."""

from __future__ import annotations

from .program import Program, Sizes, written

FOUND: dict[str, Program] = {
    "a copy is given to an operator of ATen's": written(
        ["torch.tensor(2)"], "v0 = a0.repeat(3)", "v1 = v0.median(-1).values", results="v1", exact=True),
    "the factor of whole numbers is cut off": written(
        ["torch.arange(4)"], "v0 = torch.addcmul(a0, a0, a0, value=0.5)", "v1 = torch.addcmul(a0, a0, a0, value=-2.5)",
        results="v0, v1", exact=True),
    "eager has no kernel": written(["torch.ones(3)"], "v0 = a0.bitwise_not()", results="v0"),
    "eager has no kernel for a scalar": written(["torch.ones(())"], "v0 = a0 & a0", results="v0"),
    "eager takes no such index": written(["torch.ones(3)"], "v0 = a0.index_select(0, a0)", results="v0"),
    "a sort of nothing": written(
        ["torch.randn(0, n0, n0)"], "v0 = torch.where(a0 > a0, a0, a0)", "v1 = v0.sort(-2, descending=True)[0]",
        results="v1", exact=True, dynamic=True, sizes=(Sizes(n0=2),)),
}
