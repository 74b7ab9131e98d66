"""Converts functions of single numbers, which are subgraphs in a captured graph, to scalar expressions.

    points = [score, index_value(row, torch.int32)]            # expressions
    result, = expressions(function, points, [table])           # the function of values, lowered; tables are values

The function is lowered like any other graph, on 0-dim values. Then every intermediate value is substituted where it is
read, which leaves one expression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.expr import Expr, cast, held, masked, rewrite
from flambeau.ir.index import Index, as_index
from flambeau.ir.nodes import Node, Pointwise, Scatter, Value, as_indices

Formula = Callable[..., Sequence[Any]]  # from values to its results; None for a result that is absent


class NotAnExpression(Exception):
    """Raised if a function does more than compute a number from numbers."""


@dataclass(frozen=True)
class Added:
    """A value that a function adds to one element of a tensor that starts as zero."""

    shape: tuple[Index, ...]
    index: tuple[Index, ...]
    value: Expr


def expressions(function: Formula, points: Sequence[Expr], others: Sequence[Any]) -> list[Expr | list[Added] | None]:
    """The results of a function of numbers, each as an expression, a list of additions to a tensor, or None."""
    g = build.graph()
    before = len(g.nodes)
    given = {g.add_buffer((), e.dtype).name: e for e in points}
    results = function(*(g.whole(name) for name in given), *others)
    made, g.nodes[before:] = g.nodes[before:], []
    bodies = {n.names[0]: n for n in made if isinstance(n, (Pointwise, Scatter))}
    if any(n.names[0] not in bodies for n in made):
        raise NotAnExpression
    memo: dict[Expr, Expr] = {}
    narrowed = {e for e in points if e.op == "cast" and e.args[0].op == "index"}  # positions as 32-bit integers

    def put(e: Expr) -> Expr:
        if e.op == "cast" and e.dtype is torch.int64 and e.args[0] in narrowed:
            return e.args[0].args[0]
        if e.op != "load":
            return e
        name, index = e.attr
        if name in given:
            return given[name]
        n = bodies.get(name)
        if n is None:
            return e
        if not isinstance(n, Pointwise):
            raise NotAnExpression
        body = rewrite(n.body.subs(dict(zip(n.vars, index, strict=True))), put, None, memo)
        return held(masked(body, e.args[0]) if e.args else body, index, e.args)

    def whole(e: Expr) -> Expr:
        return rewrite(e, put, None, memo)

    return [None if v is None else added if (added := added_to(v, bodies, whole)) else whole(v.load(())) if not v.shape
            else refused() for v in results]


def refused() -> Expr:
    raise NotAnExpression


def added_to(v: Value, bodies: dict[str, Any], whole: Callable[[Expr], Expr]) -> list[Added]:
    """The additions to single elements that a sum of scatters consists of; empty if it is no such sum."""
    n: Node | None = bodies.get(v.buffer)
    if isinstance(n, Scatter):
        if n.mode != "add" or n.vars or n.init.op != "const" or n.init.attr != 0:
            raise NotAnExpression
        return [Added(v.shape, tuple(moved(t, whole) for t in n.target), whole(n.value))]
    if not isinstance(n, Pointwise) or not v.shape:
        return []
    return summed(n.body, as_indices(n.vars), bodies, v.shape, whole)


def summed(e: Expr, at: tuple[Index, ...], bodies: dict[str, Any], shape: tuple[Index, ...],
           whole: Callable[[Expr], Expr]) -> list[Added]:
    if e.op == "cast":
        return summed(e.args[0], at, bodies, shape, whole)
    if e.op == "add":
        return [x for a in e.args for x in summed(a, at, bodies, shape, whole)]
    if e.op == "load" and e.attr[1] == at and not e.args:
        name = e.attr[0]
        return added_to(Value(name, shape, e.dtype, at), bodies, whole)
    raise NotAnExpression


def moved(i: Index, whole: Callable[[Expr], Expr]) -> Index:
    """An index with its computed values expressed in terms of the function's inputs."""
    if i.is_const:
        return i
    e = whole(Expr("index", torch.int64, (), i))
    return e.attr if e.op == "index" else as_index(cast(e, torch.int64).attr)
