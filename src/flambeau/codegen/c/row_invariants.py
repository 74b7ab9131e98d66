"""Computes what many rows share once for a block of points, and keeps it in small arrays.

All channels of an image are sampled at the same places; a broadcast table may take more work than the values it is
combined with. If such work does not depend on one of the outer variables, that variable becomes the loop around the
innermost, and the work is done before it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch

from flambeau.ir.dtypes import is_bool
from flambeau.ir.expr import FREE, SIMPLE, Expr, cast, const, index_children, index_value, loads, rewrite, walk, where
from flambeau.ir.index import Dyn, Index, Sym, from_atom
from flambeau.ir.tuning import CPU

NEVER = frozenset(("fold", "carry", "local", "check", "require", "raw"))


def best_shared(exprs: Sequence[Expr], others: Sequence[Sym], v: Sym) -> Sym | None:
    """The outer variable on which most of the work at the points of v does not depend; None if too little is saved."""
    gains = {c: gain(exprs, (c,), v) for c in others if _repeats(c)}
    best = max(gains, key=lambda c: gains[c], default=None)
    return best if best is not None and gains[best] >= CPU.shared_work else None


def gain(exprs: Sequence[Expr], rows: Sequence[Sym], v: Sym) -> int:
    """The number of operations at the points of v that are the same for all rows."""
    return sum(_weight(e) for e in _shared(exprs, rows, v))


def _repeats(c: Sym) -> bool:
    return not (c.size.is_const and c.size.const < 2)


def _weight(e: Expr) -> int:
    return 0 if e.op in FREE else 1 if e.op in SIMPLE else 6


def _shared(exprs: Sequence[Expr], rows: Sequence[Sym], v: Sym) -> Iterator[Expr]:
    """Yields the expressions that are the same for all rows: they depend on v, but neither on the rows nor on loops
    inside, and contain no operation in NEVER."""
    own = {*rows, *(w for e in walk(*exprs) if e.op == "fold" for w, _, _ in e.attr.loops)}
    closed: dict[Expr, bool] = {}
    for e in walk(*exprs):  # operands come before their users
        closed[e] = e.op not in NEVER and all(closed[a] for a in (*e.args, *index_children(e)))
        if closed[e] and v in e.symbols() and own.isdisjoint(e.symbols()):
            yield e


def shared_values(exprs: Sequence[Expr], rows: Sequence[Sym], v: Sym) -> list[Expr]:
    """The largest expressions that are the same for all rows and take more than a read."""
    same = dict.fromkeys(_shared(exprs, rows, v))
    used = dict.fromkeys(exprs)
    for e in walk(*exprs):
        if e not in same:
            used.update(dict.fromkeys((*e.args, *index_children(e))))
    kept = dict.fromkeys(x for e in used if e in same for x in _kept(e))
    return [e for e in kept if e in same and any(_weight(x) for x in walk(e))]


def _kept(e: Expr) -> Iterator[Expr]:
    """Yields a value before its last conversion, which is often to a wider dtype, or the operands of a condition:
    compilers do not vectorise bools in memory."""
    if e.op == "cast" or is_bool(e.dtype):
        for a in e.args:
            yield from _kept(a)
    else:
        yield e


def with_offsets(exprs: Sequence[Expr], rows: Sequence[Sym], v: Sym) -> list[Expr]:
    """The expressions with the computed place of each read that is the same for all rows as one number: of 32 bits, as
    processors gather best, and negative where nothing is read."""
    same = dict.fromkeys(_shared(exprs, rows, v))
    places = {e: p for e in loads(*exprs) if (p := _offset(e, same)) is not None}
    masks = {e.args[0]: p[1] >= 0 for e, p in places.items() if e.args}

    def fn(x: Expr) -> Expr:
        if x in masks:
            return masks[x]
        if x.op == "where" and x.args[2].op == "const" and x.args[2].attr == 0 and _reads_under(x.args[1], x.args[0]):
            return x.args[1]  # a read that is masked out gives zero
        return x

    memo: dict[Expr, Expr] = {}
    for e, (rest, offset) in places.items():
        top = rest.bounds()[1]
        address = rest + from_atom(Dyn(cast(offset, torch.int64), 0, top))
        memo[e] = Expr("load", e.dtype, (masks[e.args[0]],) if e.args else (), (e.attr[0], (address,)))
    return [rewrite(e, fn, None, memo) for e in exprs]


def _offset(e: Expr, same: Container[Expr]) -> tuple[Index, Expr] | None:
    """The address of a read without its computed parts, and those parts as one number; None if there are none."""
    computed = Index((), 0)
    for mono, coef in e.attr[1][0].terms:
        if len(mono) == 1 and isinstance(mono[0], Dyn) and mono[0].expr in same:
            computed = computed + Index(((mono, coef),), 0)
    offset = None if computed.is_const else number(computed)
    if offset is None or (e.args and e.args[0] not in same):
        return None
    return e.attr[1][0] - computed, where(e.args[0], offset, -1) if e.args else offset


def number(i: Index) -> Expr | None:
    """A nonnegative index as a 32-bit number; None if it may be negative or not fit."""
    lo, hi = i.bounds()
    if lo is None or hi is None or lo < 0 or hi >= 2**31 or any(len(m) > 1 for m, _ in i.terms):
        return None
    total = const(i.const, torch.int32)
    for (atom,), coef in i.terms:
        e = atom.expr if isinstance(atom, Dyn) else index_value(from_atom(atom))
        e = e.args[0] if e.op == "cast" and e.args[0].dtype is torch.int32 else e
        total = total + cast(e, torch.int32) * coef
    return total


def _reads_under(e: Expr, mask: Expr) -> bool:
    while e.op == "cast":
        e, = e.args
    return e.op == "load" and e.args == (mask,)
