"""What many rows share: found once for a block of points, kept in small arrays, and read for each of the rows.

All channels of an image are sampled at the same places; a table that is broadcast may take more to compute than what it
is joined with. Where such work does not depend on one of the outer variables, that variable becomes the loop around
the innermost, and the work is done before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flambeau.ir.cost import FREE, SIMPLE
from flambeau.ir.expr import Expr, cast, const, index_children, rewrite, walk
from flambeau.ir.index import Dyn, Index, Sym, from_atom

WORTH = 16  # operations at a point
ROOM = 16384  # bytes of the arrays
NEVER = frozenset(("fold", "carry", "local", "check", "require", "raw"))


def best_shared(exprs: Sequence[Expr], others: Sequence[Sym], v: Sym) -> Sym | None:
    """The outer variable on which most of the work at the points of v does not depend, if it is worth while."""
    gains = {c: sum(_weight(e) for e in _shared(exprs, c, v)) for c in others if _repeats(c)}
    best = max(gains, key=lambda c: gains[c], default=None)
    return best if best is not None and gains[best] >= WORTH else None


def _repeats(c: Sym) -> bool:
    return c.extent is not None and not (c.extent.is_const and c.extent.const < 2)


def _weight(e: Expr) -> int:
    return 0 if e.op in FREE else 1 if e.op in SIMPLE else 6


def _shared(exprs: Sequence[Expr], c: Sym, v: Sym) -> Iterator[Expr]:
    """Whatever is the same for all c: it depends on loop variables alone, and nothing in it is the loop's own."""
    bound = {w for e in walk(*exprs) if e.op == "fold" for w, _, _ in e.attr.loops}
    closed: dict[Expr, bool] = {}
    for e in walk(*exprs):  # operands come before their users
        closed[e] = e.op not in NEVER and all(closed[a] for a in (*e.args, *index_children(e)))
        if closed[e] and v in e.symbols() and c not in e.symbols() and bound.isdisjoint(e.symbols()):
            yield e


def shared_values(exprs: Sequence[Expr], c: Sym, v: Sym) -> list[Expr]:
    """The largest of them that take more than a read; without a last conversion, which is often to something wider."""
    same = dict.fromkeys(_shared(exprs, c, v))
    used = dict.fromkeys(exprs)
    for e in walk(*exprs):
        if e not in same:
            used.update(dict.fromkeys((*e.args, *index_children(e))))
    out = dict.fromkeys(e.args[0] if e.op == "cast" else e for e in used if e in same)
    return [e for e in out if any(_weight(x) for x in walk(e))]


def with_offsets(e: Expr, c: Sym, v: Sym) -> Expr:
    """Addresses whose computed parts do not depend on c: those parts become one number each, of 32 bits if they fit, as
    processors gather best."""

    def fn(x: Expr) -> Expr:
        if x.op != "load":
            return x
        address: Index = x.attr[1][0]
        total = None
        rest = address
        for mono, coef in address.terms:
            part = Index(((mono, coef),), 0)
            if len(mono) == 1 and isinstance(mono[0], Dyn) and c not in part.symbols() and v in part.symbols():
                total, rest = part if total is None else total + part, rest - part
        if total is None or not _fits(total):
            return x
        offset = const(0, torch.int32)
        for (atom,), coef in total.terms:
            assert isinstance(atom, Dyn)
            offset = offset + cast(_narrow(atom.expr), torch.int32) * coef
        lo, hi = total.bounds()
        return Expr("load", x.dtype, x.args, (x.attr[0], (rest + from_atom(Dyn(cast(offset, torch.int64), lo, hi)),)))

    return rewrite(e, fn)


def _fits(i: Index) -> bool:
    lo, hi = i.bounds()
    return lo is not None and hi is not None and lo >= -2**31 and hi < 2**31


def _narrow(e: Expr) -> Expr:
    return e.args[0] if e.op == "cast" and e.args[0].dtype is torch.int32 else e
