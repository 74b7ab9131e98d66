"""Rows whose elements each test for the end: the end is computed once instead, so that only the last tile has masks.

A long row is cut into pieces of equal length, of which the last one has fewer elements. If every element tests whether
it exists, memory is accessed element by element, in all pieces. It is enough that a program knows how many elements its
piece has: whole tiles need no mask then.
"""

from __future__ import annotations

from flambeau.ir.expr import Expr, load, walk
from flambeau.ir.index import Index, as_index, minimum
from flambeau.ir.lines import is_line
from flambeau.ir.program import LoopKernel
from flambeau.ir.tuning import BLOCKS


def ended(k: LoopKernel) -> tuple[LoopKernel, Index | None]:
    """Removes the condition under which reduced elements exist; returns the kernel and the number of elements that meet
    the condition, or the kernel unchanged and None."""
    if len(k.inner) != 1 or k.vector is not k.inner[0] or any(i.combine is None and i.level == "full" for i in k.items):
        return k, None
    v, = k.inner
    reduced = [e for i in k.items if i.combine is not None for e in i.exprs]
    there = reduced[0].args[0] if reduced[0].op == "where" else None
    if there is None or there.op != "lt" or any(a.op not in ("index", "const") for a in there.args):
        return k, None
    at, end = (as_index(a.attr) for a in there.args)
    same = all(e.op == "where" and e.args[0] is there for e in reduced) and all(
        e.args[2] is start for i in k.items if i.combine is not None
        for e, start in zip(i.exprs, i.combine.identity, strict=True))
    if not same or v in (at - v).symbols() or v in end.symbols():
        return k, None

    def free(e: Expr) -> Expr:
        if e.op == "where" and e.args[0] is there:
            return e.args[1]
        if e.op == "load" and e.args and e.args[0] is there:
            return load(e.attr[0], e.attr[1], e.dtype)
        return e

    made = k.rewritten(free)
    if any(e is there for e in walk(*made.everything())):
        return k, None
    return made, minimum(end - (at - v), v.size)


def is_wide(k: LoopKernel) -> bool:
    """Whether some load is wider than one element where there is no mask."""
    v = k.vector
    return v is not None and any(is_line(e.attr[1][0], v, BLOCKS.access) for e in walk(*k.everything())
                                 if e.op == "load" and v in e.symbols())
