"""Reductions of a few rows, written out: each thread combines the elements of its own columns.

As an axis of a tile, the rows of a column would be in different threads, which then wait for one another. Written out,
a kernel is a map over its outer points that reads one element of each row, and lanes are contiguous as in any map.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product as points_of

from flambeau.ir.expr import Expr, cast, loads, rewrite, walk
from flambeau.ir.index import Index, as_index, volume
from flambeau.ir.program import Item, LoopKernel
from flambeau.ir.tuning import BLOCKS

from .polyphase import Phases


def rows_written_out(k: LoopKernel) -> Phases | None:
    """Returns the kernel as a map, if its rows are few and the contiguous variable is not reduced; else None."""
    rows, exprs = volume(k.inner), k.everything()
    if not rows.is_const or not rows.const or k.bounds is not None or k.vector not in k.outer:
        return None
    inner = frozenset(k.inner)
    reads = sum(not inner.isdisjoint(e.symbols()) for e in loads(*exprs))
    body = list(walk(*exprs))
    if rows.const * max(reads, 1) > BLOCKS.held_rows or rows.const * len(body) > BLOCKS.written_out \
            or any(e.op == "fold" for e in body):
        return None
    items: list[Item] = []
    stores: list[tuple[str, Index]] = []
    buffers: dict[str, str] = {}
    dtypes, stored, places = k.dtype_of(), {p.name: p.dtype for p in k.params}, dict(k.stores)
    points = [dict(zip(k.inner, map(as_index, at), strict=True))
              for at in points_of(*(range(v.size.const) for v in k.inner))]
    full = {i.names[0] for i in k.items if i.level == "full" and i.combine is None}

    def at(e: Expr, row: int) -> Expr:
        """Returns an expression at the points of a row."""
        put = rewrite(e, lambda x: x, points[row])
        return rewrite(put, lambda x: local(of(x.attr, row), x) if x.op == "local" and x.attr in full else x)

    def keep(name: str, value: str, address: Index, e: Expr) -> None:
        items.append(Item((value,), "full", (e,)))
        if name in places:
            stores.append((value, address))
            buffers[value] = name

    for i in k.items:
        if i.combine is not None:
            items += joined(i, [tuple(at(e, row) for e in i.exprs) for row in range(len(points))])
            for name in i.names:
                if name in places:
                    one = Expr("local", dtypes[name], (), name)
                    keep(name, f"{name}@", places[name], cast(one, stored[name]))
        elif i.level == "full":
            for row, point in enumerate(points):
                address = places[i.names[0]].subs(point) if i.names[0] in places else as_index(0)
                keep(i.names[0], of(i.names[0], row), address, at(i.exprs[0], row))
        else:
            keep(i.names[0], i.names[0], places.get(i.names[0], as_index(0)), i.exprs[0])
    kernel = replace(k, inner=(), stages=(tuple(items),), stores=tuple(stores), scratch=frozenset())
    return Phases(kernel, buffers, {}, tuple((name,) for name, _ in stores), rows=True)


def given_for(given: dict[Expr, Expr], e: Expr) -> Expr:
    return given.get(e, e)


def of(name: str, row: int) -> str:
    return f"{name}@{row}"


def local(name: str, e: Expr) -> Expr:
    return Expr("local", e.dtype, (), name)


def joined(i: Item, rows: list[tuple[Expr, ...]]) -> Iterator[Item]:
    """Yields the items that reduce row by row; the last ones have the reduction's own names."""
    c = i.joins
    before = rows[0]
    for at, row in enumerate(rows):
        values = before
        if at:
            given = dict(zip((*c.left, *c.right), (*before, *row), strict=True))
            values = tuple(rewrite(e, partial(given_for, given)) for e in c.result)
        names = i.names if at == len(rows) - 1 else [f"{n}@to{at}" for n in i.names]
        yield from (Item((name,), "full", (e,)) for name, e in zip(names, values, strict=True))
        before = tuple(Expr("local", e.dtype, (), n) for n, e in zip(names, values, strict=True))
