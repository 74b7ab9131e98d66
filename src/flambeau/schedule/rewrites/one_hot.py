"""Replaces sums in which only one element counts by that element.

A loss picks one class of each row, so the gradient that comes back is zero everywhere else, and softmax's gradient sums
it over all classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import and_

from flambeau.ir.dtypes import is_bool
from flambeau.ir.expr import Expr, cast, chosen, conjuncts, index_value, where
from flambeau.ir.index import Index, Sym
from flambeau.ir.nodes import Contract, Node, Pointwise, Reduce, Segment, as_indices, dim_vars

LEAST = 4096  # points of a loop whose removal is worth a separate launch
Maps = Callable[[str], Pointwise | None]  # the map that computes a buffer, if it is one


def picked(n: Node, maps: Maps) -> Node:
    """The node without the loop over a variable of which only one value contributes to the sum."""
    if not isinstance(n, Reduce) or isinstance(n, (Contract, Segment)) or n.combine.name != "sum" \
            or is_bool(n.combine.dtypes[0]):
        return n
    found = chosen(computed(n.inputs[0], maps))
    if found is None:
        return n
    conditions, value = list(conjuncts(found[0])), found[1]
    for c in conditions:
        for v, place in equations(c):
            others = [x for x in conditions if x is not c]
            small = v.size.is_const and v.size.const < LEAST
            if v not in n.reduced or small or any(v in e.symbols() for e in (place, value, *others)):
                continue
            inside = (place >= 0) & (place < index_value(v.size, place.dtype))
            left = [w for w in n.vars if w is not v]
            vars = dim_vars([w.size for w in left])
            mapping: dict[Sym, Index] = dict(zip(left, as_indices(vars), strict=True))
            body = where(reduce(and_, others, inside), value, 0).subs(mapping)
            axes = frozenset(k for k, w in enumerate(left) if w in n.reduced)
            if axes:
                return Reduce(n.names, vars, axes, n.combine, (body,), origin=n.origin, inlined=n.inlined)
            return Pointwise(n.names, vars, body, origin=n.origin, inlined=n.inlined)
    return n


def computed(e: Expr, maps: Maps) -> Expr:
    """The expression, with a read of a map's result replaced by what the map computes."""
    if e.op == "cast":
        return cast(computed(e.args[0], maps), e.dtype)
    if e.op == "load" and not e.args and (made := maps(e.attr[0])) is not None:
        return made.body.subs(dict(zip(made.vars, e.attr[1], strict=True)))
    return e


def equations(e: Expr) -> Iterator[tuple[Sym, Expr]]:
    """Yields the variables whose value a condition determines, with that value."""
    if e.op == "eq":
        for a, b in (e.args, e.args[::-1]):
            if a.op == "index" and isinstance(v := a.attr.atom(), Sym):
                yield v, b
