"""Applies the numerics policy to a graph: where a kernel keeps more precision than eager, and where it rounds."""

from __future__ import annotations

import math

import torch

from flambeau.ir.dtypes import DType, is_float
from flambeau.ir.expr import Expr, cast, const, rewrite, unary, walk, where
from flambeau.ir.nodes import Contract, Graph

from .fusion.inline import map_exprs

_SMALL = (torch.float16, torch.bfloat16)
_CHOICES = ("where", "min", "max")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_STEPS = ("floor", "ceil", "trunc", "round")


def widen(e: Expr) -> Expr:
    """Removes the rounding of a float32 value to half precision that is widened again at once."""
    if e.op == "cast" and e.dtype is torch.float32 and e.args[0].op == "cast" and e.args[0].dtype in _SMALL:
        inner = e.args[0].args[0]
        if is_float(inner.dtype) and inner.dtype is torch.float32:
            return inner
    return e


def keep_compared(roots: list[Expr], memo: dict[Expr, Expr]) -> None:
    """Keeps eager's rounding of values that are compared with another value: a maximum must equal the value it came
    from. Also keeps that of values converted to whole numbers: near a step, the last digit decides the result."""
    everything = list(walk(*roots))
    compared = {a for e in everything if e.op in _STEPS or e.op == "cast" and not is_float(e.dtype)
                or e.op in _COMPARISONS and all(a.op != "const" for a in e.args) for a in e.args}
    for e in everything:  # operands before users
        if e in compared:
            keep_rounded(e, memo)


def keep_rounded(e: Expr, memo: dict[Expr, Expr]) -> None:
    if widen(e) is not e:
        half = e.args[0]
        memo[e] = cast(cast(rewrite(half.args[0], widen, None, memo), half.dtype), e.dtype)


def narrow(e: Expr, choices: tuple[str, ...] = _CHOICES) -> Expr:
    """Makes a choice among half-precision values (where, min, max) in half precision. The result is one of them, so it
    needs no rounding, which is most of the work of a rectifier."""
    if e.op == "cast" and e.dtype in _SMALL and e.args[0].op in choices:
        chosen = stored(e.args[0], e.dtype, choices)
        return e if chosen is None else chosen
    return e


def choose(e: Expr) -> Expr:
    """`narrow` for `where` alone, if the sign of zeros counts: minima and maxima see it, but the comparisons that would
    replace them do not."""
    return narrow(e, ("where",))


def stored(e: Expr, dtype: DType, choices: tuple[str, ...] = _CHOICES) -> Expr | None:
    """A float32 expression computed in `dtype`; None unless it is a choice among constants and values widened from
    `dtype`."""
    if e.op == "const":
        return None if math.isnan(e.attr) else const(e.attr, dtype)
    if e.op == "cast":
        return e.args[0] if e.args[0].dtype is dtype and is_float(e.dtype) else None  # an integer lost its fraction
    if e.op not in choices:
        return None
    *_, a, b = e.args
    x, y = stored(a, dtype, choices), stored(b, dtype, choices)
    if x is None or y is None:
        return None
    if e.op == "where":
        return where(e.args[0], x, y)
    first, second = (a < b, b < a) if e.op == "min" else (a > b, b > a)
    if a.op == "const":  # a NaN is neither less nor greater, so it stays
        return where(first, x, y)
    return where(second if b.op == "const" else second | unary("isnan", b), y, x)


def apply_policy(graph: Graph) -> None:
    """Removes the rounding between fused operators, unless the policy asks for eager's."""
    last = choose if graph.policy.orders_zeros else narrow
    for rule in (last,) if graph.policy.rounds else (widen, last):
        memo: dict[Expr, Expr] = {}
        if rule is widen:
            keep_compared([e for n in graph.nodes for e in n.exprs()], memo)
            if graph.capabilities.multiplies is not None:  # a factor that eager rounds to half precision stays rounded
                for e in (e for n in graph.nodes if isinstance(n, Contract) for e in n.factors or ()):
                    keep_rounded(e, memo)
        graph.nodes = [map_exprs(n, lambda e, f=rule, m=memo: rewrite(e, f, None, m)) for n in graph.nodes]
