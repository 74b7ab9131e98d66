"""Masks in contractions: limits loops to the range where a factor is not zero, or computes a mask once for all uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flambeau.ir.expr import Expr, chosen, conjuncts, const, loads, rewrite
from flambeau.ir.index import Index, Sym, as_index
from flambeau.ir.lines import joined
from flambeau.ir.tuning import CPU


@dataclass(frozen=True)
class Guard:
    """The guard of an expression, which is `inside` where `holds` and lows <= v < highs, and zero elsewhere."""

    holds: Expr  # does not depend on v
    lows: tuple[Index, ...]
    highs: tuple[Index, ...]
    inside: Expr


MASK = "mask"  # the name of the local that reads a mask computed before


@dataclass(frozen=True)
class Masks:
    """The mask of a factor, computed once for all uses. `mask` depends on the factor's points and on the few variables
    `vars` of the depth; `which` numbers their `count` values. `factor` is the expression that reads the computed mask;
    its points are walked as `own`."""

    mask: Expr
    vars: tuple[Sym, ...]
    which: Index
    count: int
    own: tuple[Sym, ...]
    depth: tuple[Sym, ...]
    factor: Expr


def masks_of(e: Expr, own: Sequence[Sym], depth: Sequence[Sym]) -> Masks | None:
    """The mask of a factor, if computing it before makes lines longer; else None. An example is a convolution whose
    images are as large as its results: a whole plane is one line in memory, in which the borders are zero."""
    found = chosen(e)
    if found is None:
        return None
    mask, _ = found
    vars = tuple(u for u in depth if u in mask.symbols())
    sizes = [u.size.const if u.size.is_const else CPU.masks + 1 for u in vars]
    if math.prod(sizes) > CPU.masks:
        return None
    known = Expr("local", torch.bool, (), MASK)
    factor = rewrite(e, lambda x: known if x is mask else x)
    lines, (factor,) = joined(own, factor)
    if len(lines) >= len(joined(own, e)[0]):
        return None
    which = as_index(0)
    for u, size in zip(vars, sizes, strict=True):
        which = which * size + u
    return Masks(mask, vars, which, math.prod(sizes), lines, tuple(depth), factor)


def guard_of(e: Expr, v: Sym) -> Guard | None:
    """The guard of an expression that is chosen by a mask, if each part of it is a bound of v or free of v."""
    found = chosen(e)
    if found is None:
        return None
    mask, inside = found
    if any(v not in x.attr[1][0].symbols() for x in loads(inside)):
        return None  # it would be read before the loop, where the mask has not been tested yet
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
    """An index that is greater than zero exactly where a comparison of two indices holds; None for anything else."""
    if e.op not in ("lt", "le", "gt", "ge") or any(a.op not in ("index", "const") for a in e.args):
        return None
    x, y = (as_index(a.attr) if a.op == "const" else a.attr for a in e.args)
    return {"lt": y - x, "le": y - x + 1, "gt": x - y, "ge": x - y + 1}[e.op]
