"""Expressions that are zero outside a range of a variable: the range can be walked without asking."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flambeau.ir.expr import Expr, chosen, conjuncts, const, loads, rewrite
from flambeau.ir.index import Index, Sym, as_index


@dataclass(frozen=True)
class Guard:
    """Of an expression: it is `inside` where `holds` and lows <= v < highs, and zero elsewhere."""

    holds: Expr  # does not depend on v
    lows: tuple[Index, ...]
    highs: tuple[Index, ...]
    inside: Expr


def guard_of(e: Expr, v: Sym) -> Guard | None:
    """The guard of an expression that is chosen by a mask, if each part of it is a bound of v or free of v."""
    found = chosen(e)
    if found is None:
        return None
    mask, inside = found
    if any(v not in x.attr[1][0].symbols() for x in loads(inside)):
        return None  # it would be read before the loop, where nobody has asked yet
    holds, lows, highs = const(True, torch.bool), [], []
    for part in conjuncts(mask):
        if v not in part.symbols():
            holds = holds & part
            continue
        positive = positive_of(part)
        step = None if positive is None else positive.coefficient(v)
        if positive is None or step is None or not step.is_const or step.const == 0:
            return None
        rest, n = positive - step * v, step.const
        if n > 0:  # n v + rest > 0
            lows.append(-rest // n + 1)
        else:
            highs.append((rest + (-n - 1)) // -n)
    true = const(True, torch.bool)
    return Guard(holds, tuple(lows), tuple(highs), rewrite(inside, lambda x: true if x is mask else x))


def positive_of(e: Expr) -> Index | None:
    """An index that is greater than zero just where a comparison of two indices holds."""
    if e.op not in ("lt", "le", "gt", "ge") or any(a.op not in ("index", "const") for a in e.args):
        return None
    x, y = (as_index(a.attr) if a.op == "const" else a.attr for a in e.args)
    return {"lt": y - x, "le": y - x + 1, "gt": x - y, "ge": x - y + 1}[e.op]
