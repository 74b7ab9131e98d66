"""Splits loops where a mask changes or an index reaches a border, so that most iterations need no checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from flambeau.ir.expr import Expr, rewrite, walk
from flambeau.ir.index import Index, Op, Sym, as_index
from flambeau.ir.tuning import CPU


def pieces(exprs: Sequence[Expr], v: Sym, addresses: bool = False) -> list[tuple[int, int]]:
    """The ranges of v in which every comparison of an index with a bound has one outcome; with `addresses`, every
    minimum or maximum of two indices in an address as well."""
    if not v.size.is_const or v.size.const < 2:
        return []
    n = v.size.const
    cuts = {0, n}
    for d in differences(exprs, addresses):
        c = d.coefficient(v)
        if c is None or not c.is_const or c.const == 0:
            continue
        step = c.const
        for k in set((d - c * v).bounds()):  # a window has a first and a last position: between them it is mixed
            cut = None if k is None else -k // step + 1 if step > 0 else -(k // step)
            if cut is not None and 0 < cut < n:
                cuts.add(cut)
    edges = sorted(cuts)
    return list(zip(edges, edges[1:], strict=False))


def differences(exprs: Sequence[Expr], addresses: bool) -> Iterator[Index]:
    """Yields indices; whether each is greater than zero decides the comparisons in the expressions."""
    for e in walk(*exprs):
        if e.op in ("lt", "le", "gt", "ge") and all(a.op in ("index", "const") for a in e.args):
            x, y = (as_index(a.attr) if a.op == "const" else a.attr for a in e.args)
            yield (y - x) if e.op in ("lt", "ge") else (x - y)  # lt, gt: d > 0; ge, le: not (d > 0)
        elif e.op == "load" and addresses:
            for a in e.attr[1][0].atoms():
                if is_border(a):
                    yield from (x - y for x in choices(a.a) for y in choices(a.b))


def is_border(a: object) -> TypeGuard[Op]:
    return isinstance(a, Op) and a.kind in ("min", "max")


def choices(i: Index) -> list[Index]:
    """The indices that a minimum or maximum chooses from; the index itself if it is neither."""
    a = i.atom()
    return [*choices(a.a), *choices(a.b)] if is_border(a) else [i]


def affordable(exprs: Sequence[Expr], v: Sym, parts: Sequence[tuple[int, int]]) -> bool:
    """Whether a body that is written out once for each part, and simplified there, stays quick to compile."""
    if len(parts) > CPU.copied // 10:
        return False
    total = 0
    for a, b in parts:
        memo: dict[Expr, Expr] = {}
        narrow = {v: as_index(Sym(v.name, v.size, a, b - 1))}
        total += written([rewrite(e, lambda x: x, narrow, memo) for e in exprs])
    return total <= CPU.copied


def written(exprs: Sequence[Expr]) -> int:
    """The number of expressions that the text will hold; small constant loops are written out."""
    total = 0
    loops: set[tuple[Expr, ...]] = set()
    for e in walk(*exprs):
        total += 1
        if e.op == "fold" and e.args not in loops and e.attr.steps <= CPU.unroll:
            loops.add(e.args)
            total += (e.attr.steps - 1) * sum(1 for _ in walk(*e.args[len(e.attr.carries):]))
    return total
