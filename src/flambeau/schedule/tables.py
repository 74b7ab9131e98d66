"""Kernels of equal form become one over a table: the same map over any number of tensors of any sizes.

What a map over memory of one order does to it depends neither on its length nor on its names. Without these, the
kernels of an optimizer's step over two hundred parameters are one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.ir.expr import Expr, rewrite, walk
from flambeau.ir.index import ONE, Index, Sym, as_index
from flambeau.ir.program import Item, Kernel, LoopKernel, Param, TableKernel

LENGTH = Sym("length")
PLACE = Sym("v", LENGTH)


@dataclass(frozen=True)
class Rows:
    """What a launch is as a row of a table: the kernel that it shares with others, its pointers, its length."""

    kernel: TableKernel
    args: tuple[str, ...]
    length: Index


def as_row(k: Kernel, args: Sequence[str]) -> Rows | None:
    """A launch in the form that it shares with others; None if it is not a map of whole tensors."""
    if not isinstance(k, LoopKernel) or k.inner or k.bounds is not None or len(k.outer) > 1 or not is_plain(k):
        return None
    length = k.outer[0].extent if k.outer else ONE
    assert length is not None
    mapping = dict.fromkeys(k.outer, as_index(PLACE))
    # What is updated in place is one pointer here: all that is read of it, is read before it is written.
    columns = tuple(dict.fromkeys(args))
    names = {p.name: f"r{columns.index(a)}" for p, a in zip(k.params, args, strict=True)}
    written = {names[p.name] for p in k.params if p.written}
    dtypes = {names[p.name]: p.dtype for p in k.params}
    for items in k.stages:
        for i in items:
            names.setdefault(i.names[0], f"t{len(names)}")

    def rename(e: Expr) -> Expr:
        if e.op == "load":
            return Expr("load", e.dtype, e.args, (names[e.attr[0]], e.attr[1]))
        return Expr("local", e.dtype, (), names[e.attr]) if e.op == "local" else e

    memo: dict[Expr, Expr] = {}
    stages = tuple(tuple(Item((names[i.names[0]],), i.level, (rewrite(i.exprs[0], rename, mapping, memo),))
                         for i in items) for items in k.stages)
    body = LoopKernel(
        outer=(PLACE,) if k.outer else (), inner=(), vector=PLACE if k.outer else None, stages=stages,
        stores=tuple((names[name], at.subs(mapping)) for name, at in k.stores), scratch=frozenset(),
        params=tuple(Param(r, dtypes[r], r in written) for r in (f"r{at}" for at in range(len(columns)))), sizes=())
    return Rows(TableKernel(body), columns, length)


def is_plain(k: LoopKernel) -> bool:
    """Whether it touches every tensor either at its own point or at one place, and asks nothing else of its index."""
    places: dict[str, Index] = {}
    own = as_index(k.outer[0]) if k.outer else None
    for name, at in k.accesses():
        if not (at is own or at.is_const) or places.setdefault(name, at) is not at:
            return False
    everything = walk(*(e for items in k.stages for i in items for e in i.exprs))
    return all(e.op == "load" or (e.op not in ("check", "require", "fold") and not e.own_indices()) for e in everything)
