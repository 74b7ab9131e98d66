"""Shapes attention nodes into kernels, and extracts bounds on rows and columns from their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from flambeau.ir.attention import Attention, Gradient
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import Expr, conjuncts, loads, walk
from flambeau.ir.index import ONE, ZERO, Dyn, Index, Sym, as_index, from_atom
from flambeau.ir.nodes import Buffer, as_indices, dim_vars
from flambeau.ir.program import AttentionKernel, Limit

from .loop_nests import linear, params_of, typical_sizes

INTEGERS = (torch.int64, torch.int32)


def shape_attention(n: Attention, buffers: dict[str, Buffer], stored: set[str], caps: Capabilities,
                    typical: Mapping[Sym, int]) -> list[AttentionKernel]:
    """The kernels that compute a node, in order."""
    ones = {v: ZERO for v in (*n.batch, n.group) if v.size is ONE}

    def fix(e: Expr) -> Expr:
        return linear(e.subs(ones), buffers, lambda _: False)

    node = replace(n.mapped(fix), batch=tuple(v for v in n.batch if v not in ones))
    places = {name: buffers[name].place(index) for name, index in zip(n.names, node.places, strict=True)
              if name in stored}
    below, since, rest = limits(node)

    def kernel(role: str, *names: str) -> AttentionKernel:
        stores = tuple((name, places[name]) for name in names if name in places)
        body = replace(node, gradient=asked_of(node, stores))
        accesses = [*((e.attr[0], e.attr[1][0], False) for e in loads(*body.exprs())), *((*s, True) for s in stores)]
        params = params_of(accesses, buffers)
        # Buffers that are accumulated into start as zero, and so do those that are only written where the mask holds.
        cleared = tuple(start_of(name, buffers[name]) for name, _ in stores if name in n.names[3:])
        sizes = sizes_of(body, [a for _, a in stores] + [v.size for c in cleared for v in c[1]], below + since)
        return AttentionKernel(role, body, below, since, rest, stores, cleared, params, sizes,
                               typical_sizes(sizes, typical))

    if n.gradient is None:
        return [kernel("out", *n.names)]
    query, *others = n.names
    roles = [("keys", others), ("queries", [query])]
    return [kernel(role, *names) for role, names in roles if any(name in places for name in names)]


def asked_of(n: Attention, stores: Sequence[tuple[str, Index]]) -> Gradient | None:
    """The gradient, restricted to the captured values that are stored."""
    if n.gradient is None:
        return None
    names = {name for name, _ in stores}
    captured = tuple(e for name, e in zip(n.names[3:], n.gradient.captured, strict=True) if name in names)
    return replace(n.gradient, captured=captured)


def start_of(name: str, b: Buffer) -> tuple[str, tuple[Sym, ...], Index]:
    """A buffer to clear, with the variables of its elements and their position in it."""
    vars = dim_vars(b.shape, "z")
    return name, vars, b.place(as_indices(vars))


def sizes_of(n: Attention, stores: Sequence[Index], limited: Sequence[Limit]) -> tuple[Sym, ...]:
    """The run-time sizes that the kernel needs."""
    indices = [*stores, *(x.offset for x in limited), *(i for e in walk(*n.exprs()) for i in e.own_indices())]
    indices += [v.size for v in n.vars]
    free = frozenset[Sym]().union(*(i.symbols() for i in indices))
    return tuple(sorted((s for s in free if s.extent is None), key=lambda s: s.name))


# ---- masks -----------------------------------------------------------------------------------------------


def limits(n: Attention) -> tuple[tuple[Limit, ...], tuple[Limit, ...], Expr | None]:
    """Split the mask: upper bounds of the column, lower bounds, and the remaining condition. A bound is constant or
    moves with the row, so blocks beyond it can be skipped without evaluating the mask. If there is a list of blocks to
    compute, the list covers all bounds."""
    below: list[Limit] = []
    since: list[Limit] = []
    rest: Expr | None = None
    for c in conjuncts(n.mask) if n.mask is not None else ():
        found = None if n.lists is not None else limit(c, n)
        if found is None:
            rest = c if rest is None else rest & c
        else:
            (below if found[0] else since).append(found[1])
    return tuple(dict.fromkeys(below)), tuple(dict.fromkeys(since)), rest


def limit(c: Expr, n: Attention) -> tuple[bool, Limit] | None:
    """A condition as `column < limit` (True) or `column >= limit` (False); None if it is not one."""
    if c.op not in ("lt", "le", "gt", "ge") or c.args[0].dtype not in INTEGERS:
        return None
    a, b = (plain(x, n) for x in c.args)
    if a is None or b is None:
        return None
    # All cases are brought into the form: rest >= 0.
    rest = b - a if c.op in ("lt", "le") else a - b
    rest = rest - 1 if c.op in ("lt", "gt") else rest
    along, down = rest.coefficient(n.column), rest.coefficient(n.row)
    if along is None or down is None or not along.is_const or not down.is_const or abs(along.const) != 1:
        return None
    offset = rest - along * n.column - down * n.row
    step = -along.const * down.const
    if step not in (0, 1) or not offset.symbols().isdisjoint((n.row, n.column)):
        return None
    return (True, Limit(step, offset + 1)) if along.const < 0 else (False, Limit(step, -offset))


def plain(e: Expr, n: Attention) -> Index | None:
    """An integer expression as an index over variables and values that are the same for all rows and columns."""
    inner = e.args[0] if e.op == "cast" and e.args[0].dtype in INTEGERS else e
    if inner.op == "index":
        return as_index(inner.attr)
    if inner.op == "const":
        return as_index(inner.attr)
    if inner.op in ("add", "sub"):
        a, b = (plain(x, n) for x in inner.args)
        return None if a is None or b is None else a + b if inner.op == "add" else a - b
    if inner.op == "neg":
        a = plain(inner.args[0], n)
        return None if a is None else -a
    if inner.symbols().isdisjoint((n.row, n.column)):
        return from_atom(Dyn(e if e.dtype is torch.int64 else Expr("cast", torch.int64, (e,)), None, None))
    return None
