"""A rough cost of an expression, to decide what to compute twice and what to run in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from .expr import Expr, walk

FREE = frozenset(("const", "load", "index", "cast", "local", "carry", "raw"))
SIMPLE = frozenset((
    "add", "sub", "mul", "neg", "abs", "min", "max", "where", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "logical_not", "shl", "shr", "isnan", "fma", "sign",
    "require"))


def cost_of(exprs: Sequence[Expr]) -> int:
    """Element operations of a body; a transcendental function counts for several, a loop for many."""
    total = 1
    for e in walk(*exprs):
        if e.op == "fold":
            total += 16
        elif e.op not in FREE:
            total += 1 if e.op in SIMPLE else 6
    return total
