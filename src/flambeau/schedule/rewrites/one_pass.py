"""Computes the maximum of a row and the sum of its exponentials in one pass.

A softmax goes over its rows three times: for the largest element, for the sum, and for the results. Where a row does
not stay in registers, each pass reads it from memory. The first two can be one: the partial sum is rescaled whenever a
larger element is found (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch

from flambeau.ir.build import make_combine, simple_combine
from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr, const, loads, rewrite, walk, where
from flambeau.ir.nodes import Combine, Graph, Level, Node, Pointwise, Reduce, as_indices, dim_vars
from flambeau.ir.program import Item
from flambeau.ir.scalar import abs_, eq, exp, fma, maximum

Stage = tuple[Item, ...]


def exponentials_at_once(stages: Sequence[Stage], stored: Collection[str]) -> list[Stage]:
    """The stages, with each maximum and the sum of exponentials below it computed in one pass."""
    for at, stage in enumerate(stages):
        for top in (i for i in stage if i.combine is simple_combine("max", torch.float32)):
            later = [(k, i) for k in range(at + 1, len(stages)) for i in stages[k] if is_sum_below(i, stages[k], top)]
            if not later:
                continue
            place, total = later[0]
            both = replace(top, names=(top.names[0], f"{total.names[0]}_at_once"), combine=_scaled_sum(torch.float32),
                           exprs=(top.exprs[0], const(1, torch.float32)))
            m, s = (Expr("local", torch.float32, (), n) for n in both.names)
            result = Item(total.names, "outer", (finished(m, s),))
            out = list(stages)
            out[place] = tuple(i for i in out[place] if i is not total)
            out[at] = tuple(both if i is top else i for i in stage)
            out.insert(at + 1, (result,))
            return exponentials_at_once(alive(out, stored), stored)
    return list(stages)


def with_sum_below(n: Reduce, nodes: Iterable[Node]) -> tuple[Reduce, Reduce] | None:
    """A reduction that computes the largest element and, under a name of its own, the sum of exponentials below it; and
    the node that computes this sum now. None if there is no such sum."""
    if n.combine is not simple_combine("max", torch.float32):
        return None
    for m in nodes:
        if type(m) is not Reduce or m.combine is not simple_combine("sum", torch.float32) or m.axes != n.axes \
                or [v.size for v in m.vars] != [v.size for v in n.vars] or n.names[0] not in m.reads():
            continue
        e = m.inputs[0].subs(dict(zip(m.vars, as_indices(n.vars), strict=True)))
        top = next(x for x in loads(e) if x.attr[0] == n.names[0])
        if e is exp(n.inputs[0] - top):
            return replace(n, names=(n.names[0], f"{m.names[0]}_at_once"), combine=_scaled_sum(torch.float32),
                           inputs=(n.inputs[0], const(1, torch.float32)), inlined=(*n.inlined, *m.origins)), m
    return None


def sum_of(m: Reduce, both: Reduce, graph: Graph) -> Pointwise:
    """The node that reads the sum from the results of the joint reduction."""
    vars = dim_vars([v.size for v in m.kept])
    top, total = (graph.whole(name).load(as_indices(vars)) for name in both.names)
    return Pointwise(m.names, vars, finished(top, total), origin=m.origin)


def finished(top: Expr, total: Expr) -> Expr:
    """The sum as two passes give it: NaN if the maximum is infinite, because inf - inf is NaN."""
    return where(eq(abs_(top), math.inf), math.nan, total)


def is_sum_below(i: Item, stage: Stage, top: Item) -> bool:
    """Whether an item sums exp(x - m), where m is the largest x."""
    if i.combine is not simple_combine("sum", torch.float32):
        return False
    maps = {j.names[0]: j.exprs[0] for j in stage if j.combine is None and j.level == "full"}
    below = exp(top.exprs[0] - Expr("local", torch.float32, (), top.names[0]))
    return rewrite(i.exprs[0], lambda x: maps.get(x.attr, x) if x.op == "local" else x) is below


def alive(stages: Sequence[Stage], stored: Collection[str]) -> list[Stage]:
    """The stages without items that nothing reads."""
    used, out = set(stored), []
    for stage in reversed(stages):
        kept: Stage = ()
        for i in reversed(stage):
            if used & set(i.names):
                used |= {e.attr for e in walk(*i.exprs) if e.op == "local"}
                kept = (i, *kept)
        out += [kept] if kept else []
    return out[::-1]


@cache
def _scaled_sum(dtype: DType) -> Combine:
    """A combine of pairs (m, s): the largest x, and the sum s of all exp(x - m)."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (am, asum), (bm, bsum) = a, b
        scale = where(eq(am, bm), 1, exp(-abs_(am - bm)))  # equal infinities: their difference is NaN
        return maximum(am, bm), where(am >= bm, fma(bsum, scale, asum), fma(asum, scale, bsum))

    both = make_combine("scaled sum", (dtype, dtype), (-math.inf, 0), fn)
    m, s = both.left
    top, total = (Expr("carry", dtype, (), name) for name in ("top", "total"))
    scaled = s * where(eq(m, top), 1, exp(m - top))
    return replace(both, level=Level(top, total, m, const(True, torch.bool), scaled, (top, total)))
