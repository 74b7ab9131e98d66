"""Turns large windows into reductions, for machines whose work-items can share them.

A window inside an expression is a loop of one work-item, which is right for small windows. A window of hundreds of
elements (a pooling of 16 x 16, a gradient that gathers as many) would be walked element by element, although work-items
could share it. Such loops compute sums, or largest elements with their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from flambeau.ir.build import make_combine, simple_combine
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import DType, highest, is_float, lowest
from flambeau.ir.expr import Expr, binary, index_value, rewrite, unary, walk, where
from flambeau.ir.index import Index, Sym, about, as_index
from flambeau.ir.nodes import Combine, Graph, Pointwise, Reduce, Segment, as_indices, dim_vars
from flambeau.ir.tuning import PointTuning

Loops = Sequence[tuple[Sym, Index, Index]]


def share_windows(graph: Graph, caps: Capabilities) -> None:
    if not isinstance(caps.tuning, PointTuning) or graph.policy.exact:
        return
    nodes, graph.nodes = graph.nodes, []
    for n in nodes:
        if isinstance(n, Pointwise):
            for e in [e for e in walk(n.body) if e.op == "fold" and is_large(e, n, graph, caps.tuning.short_row)]:
                n = shared(graph, n, e)
        graph.nodes.append(n)


def is_large(e: Expr, n: Pointwise, graph: Graph, most: int) -> bool:
    """Whether a loop has more steps than one work-item should make (at a point in the middle), contains no other loop,
    and has constant counts if it has several variables."""
    middle = {v: as_index(about(v.size, graph.typical, 0) // 2) for v in n.vars}
    steps = 1
    for v, _, count in e.attr.loops:
        steps *= about(count.subs(middle), graph.typical, v.hi + 1 if v.hi is not None else 0)
    inside = e.args[len(e.attr.carries):]
    return steps > most and not any(x.op == "fold" for x in walk(*inside)) and \
        (len(e.attr.loops) == 1 or all(count.is_const for _, _, count in e.attr.loops))


@dataclass(frozen=True)
class LoopAsReduction:
    """A loop as a reduction: how values are combined, the values, and the loop's results computed from its results."""

    combine: Combine
    inputs: tuple[Expr, ...]
    results: tuple[Expr, ...]  # over the combine's left components


def shared(graph: Graph, n: Pointwise, e: Expr) -> Pointwise:
    """The node with the loop replaced by a read of a reduction's result; the reduction is added before it."""
    form = sum_of(e) or largest_of(e)
    if form is None:
        return n
    loops: Loops = e.attr.loops
    several = all(count.is_const for _, _, count in loops)
    sizes = [count if count.is_const else v.size for v, _, count in loops] if several or loops[0][0].extent else None
    if sizes is None:
        return n
    vars = dim_vars((*(v.size for v in n.vars), *sizes))
    places = as_indices(vars)
    mapping: dict[Sym, Index] = dict(zip((*n.vars, *(v for v, _, _ in loops)), places, strict=True))
    inputs = tuple(rewrite(x, lambda y: y, mapping) for x in form.inputs)
    shape = [v.size for v in n.vars]
    names = tuple(graph.add_buffer(shape, d).name for d in form.combine.dtypes)
    axes = frozenset(range(len(shape), len(vars)))
    if several:
        graph.nodes.append(Reduce(names, vars, axes, form.combine, inputs, origin=n.origin, inlined=n.inlined))
    else:
        ends = (index_value(i.subs(mapping)) for i in loops[0][1:])
        graph.nodes.append(Segment(names, vars, axes, form.combine, inputs, *ends, origin=n.origin, inlined=n.inlined))
    reads: Mapping[Expr, Expr] = {left: graph.whole(name).load(as_indices(n.vars))
                                  for left, name in zip(form.combine.left, names, strict=True)}
    results = [rewrite(x, lambda y: reads.get(y, y)) for x in form.results]

    def put(x: Expr) -> Expr:
        same = x.op == "fold" and x.args == e.args and x.attr.loops == loops
        return results[x.attr.which] if same else x

    return Pointwise(n.names, n.vars, rewrite(n.body, put), n.laid, origin=n.origin, inlined=n.inlined)


def sum_of(e: Expr) -> LoopAsReduction | None:
    """A loop that adds to a start value, as a reduction; None if it is none."""
    if len(e.attr.carries) != 1 or e.args[1].op != "add":
        return None
    (carry,), (start, update) = e.attr.carries, e.args
    terms = [a for a in update.args if a is not carry]
    if len(terms) != 1 or carry in set(walk(terms[0])):
        return None
    combine = simple_combine("sum", carry.dtype)
    return LoopAsReduction(combine, (terms[0],), (start + combine.left[0],))


def largest_of(e: Expr) -> LoopAsReduction | None:
    """A loop that finds the largest element and its place, as a reduction; None if it is none. Of equal elements the
    first counts, of NaNs the last."""
    if len(e.attr.carries) != 2 or any(u.op != "where" for u in e.args[2:]):
        return None
    (best, at), (start, first, *updates) = e.attr.carries, e.args
    (take, value, kept), (take_too, place, place_kept) = (u.args for u in updates)
    better = value > best
    takes = better | unary("isnan", value) if is_float(value.dtype) else better
    if take is not take_too or take is not takes or kept is not best or place_kept is not at \
            or {best, at} & set(walk(value, place)):
        return None
    combine = _largest(value.dtype, place.dtype)
    top, where_ = combine.left
    none = binary("eq", top, start)  # nothing was larger
    return LoopAsReduction(combine, (value, place), (top, where(none, first, where_)))


@cache
def _largest(dtype: DType, position: DType) -> Combine:
    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (av, ai), (bv, bi) = a, b
        take = (bv > av) | (binary("eq", av, bv) & (bi < ai))
        if is_float(dtype):
            a_nan, b_nan = unary("isnan", av), unary("isnan", bv)
            take = (b_nan & (~a_nan | (bi > ai))) | (~a_nan & take)
        return where(take, bv, av), where(take, bi, ai)

    return make_combine("largest", (dtype, position), (lowest(dtype), highest(position)), fn)
