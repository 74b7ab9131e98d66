"""Shapes contractions into kernels: which are tiled, how deep ones are split, and the roles of their variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import Expr, const, index_value, loads, masked, where
from flambeau.ir.index import ONE, Index, Sym, about, as_index, ceildiv, volume
from flambeau.ir.lines import is_deep
from flambeau.ir.nodes import (
    Buffer,
    Contract,
    Graph,
    Node,
    Partial,
    Ragged,
    Reduce,
    as_indices,
    contiguous_strides,
    dim_vars,
    unscaled,
)
from flambeau.ir.program import ContractKernel, Product, RaggedRole, TileReduction
from flambeau.ir.tuning import Tuning

from .contraction_tails import join_products, reduce_by_tiles
from .fusion.fuse import Group, Member, member_exprs
from .loop_nests import (
    NestDraft,
    draft_group,
    linear,
    merge,
    order,
    params_of,
    sizes_of,
    split_dims,
    typical_sizes,
)


def prepare_contractions(graph: Graph, caps: Capabilities) -> None:
    """Turn contractions that cannot be tiled into ordinary reductions, and split long sums with few results."""
    nodes: list[Node] = []
    for n in graph.nodes:
        if isinstance(n, Contract) and n.ragged is not None:
            nodes.append(n)
        elif isinstance(n, Contract) and n.is_tiled and is_multiplied(n, caps):
            nodes += [n] if caps.shares else in_pieces(graph, n, caps)
        elif isinstance(n, Contract):
            nodes.append(Reduce(n.names, n.vars, n.axes, n.combine, n.inputs, origin=n.origin, inlined=n.inlined))
        else:
            nodes.append(n)
    graph.nodes = nodes
    if caps.tile_tails:
        join_products(graph)
        reduce_by_tiles(graph)


def is_multiplied(n: Contract, caps: Capabilities) -> bool:
    """Whether the machine can multiply the factors' dtypes, before they are widened for the sum."""
    assert n.factors is not None
    kinds = [unscaled(f)[0].dtype for f in n.factors]
    return caps.multiplies is None or all(f.dtype in caps.multiplies for f in n.factors) or (
        kinds[0] is kinds[1] and kinds[0] in caps.multiplies)


# ---- splitting long sums ---------------------------------------------------------------------------------


def in_pieces(graph: Graph, n: Contract, caps: Capabilities) -> list[Node]:
    """Split a contraction over parts of one summed variable, and add the parts in order. The variable with the most
    parts is chosen; if it is contiguous in a factor, parts should be whole cache lines. Returns [n] if splitting does
    not pay.

    The number of parts follows from the sizes seen at capture, the length of a part from the actual sizes."""
    assert n.factors is not None
    if graph.policy.exact and not all(v.size.is_const for v in n.vars):
        return [n]  # otherwise rounding would depend on the sizes seen first

    def many(vars: Sequence[Sym]) -> int:
        return about(volume(vars), graph.typical, 0)

    if any(scale is not None for e in n.factors for scale in unscaled(e)[1:]):
        return [n]  # scales are per block, and a part must not read beyond its blocks
    left, right = (e.symbols() for e in n.factors)
    rows, columns = (many([v for v in n.kept if v in one and v not in other])
                     for one, other in ((left, right), (right, left)))
    batch = many([v for v in n.kept if (v in left) == (v in right)])
    itemsize = min(e.args[0].dtype.itemsize if e.op == "cast" else e.dtype.itemsize for e in n.factors)
    wanted = caps.tuning.pieces(rows, columns, many(n.reduced), batch, itemsize, caps.programs)
    even = caps.tuning.product_even
    lines = {v for e in loads(*n.factors) for v in n.reduced if any(i.coefficient(v) is ONE for i in e.attr[1][-1:])}
    longest = max(n.reduced, key=lambda v: (min(many([v]) // (even if v in lines else 1), wanted), many([v])))
    most = min(wanted, many([longest]))
    if most < 2:
        return [n]
    size = longest.size
    pieces, length = as_index(most), ceildiv(size, as_index(most))
    if many([longest]) >= even * most:  # so that wide loads can start at each part
        length = ceildiv(length, as_index(even)) * even
    if size.is_const:
        pieces = ceildiv(size, length)
    kept = [v.size for v in n.kept]
    vars = dim_vars((pieces, *kept, *(length if v is longest else v.size for v in n.reduced)))
    index = as_indices(vars)
    mapping: dict[Sym, Index] = dict(zip((*n.kept, *n.reduced), index[1:], strict=True))
    place = index[0] * length + mapping[longest]
    mapping[longest] = place
    factors = [e.subs(mapping) for e in n.factors]
    if pieces * length is not size:
        there = index_value(place) < index_value(size)
        factors = [ended(e, there) for e in factors]
    dtype, = n.combine.dtypes
    shape = (pieces, *kept)
    b = graph.add_buffer(shape, dtype, strides=contiguous_strides(shape))
    partial = Contract((b.name,), vars, frozenset(range(len(shape), len(vars))), n.combine,
                       (Expr("mul", dtype, tuple(factors)),), origin=n.origin, inlined=n.inlined, tf32=n.tf32,
                       promoted=n.promoted)
    final_vars = dim_vars(shape)
    total = Reduce(n.names, final_vars, frozenset((0,)), n.combine, (graph.whole(b.name).load(as_indices(final_vars)),),
                   origin=n.origin)
    return [partial, total] if partial.is_tiled else [n]


def ended(e: Expr, there: Expr) -> Expr:
    """A factor masked to zero beyond the end. The mask goes below a widening cast, because machines multiply the narrow
    dtype."""
    if e.op == "cast":
        return Expr("cast", e.dtype, (ended(e.args[0], there),))
    return where(there, masked(e, there), const(0, e.dtype))


def size_of(vars: Sequence[Sym], unknown: int = 1) -> int:
    n = volume(vars)
    return n.const if n.is_const else unknown


# ---- the kernel ------------------------------------------------------------------------------------------


def shape_contract(g: Group, buffers: dict[str, Buffer], stored: set[str], t: Tuning, typical: dict[Sym, int],
                   shares: bool) -> ContractKernel:
    d, node = draft_group(g, buffers, stored), g.members[0].node
    assert isinstance(node, Contract)
    d.typical = typical
    first, *rest = d.items
    d.items = [replace(first, exprs=tuple(f for e in first.exprs for f in e.args)), *rest]
    rows, columns, batch = roles(d, member_exprs(g.members[0])[0])
    over = [tile_sides(m, rows, columns, buffers) for m in g.members if isinstance(m.node, Partial)]
    depth, ragged = d.inner, None
    if node.ragged is not None:
        ragged = ragged_role(node.ragged, g.members[0], rows, columns)
        d.bounds = (linear(ragged.ends, buffers, lambda _: False),) * 2
    else:
        split_dims(d, [batch, rows, columns, depth])
        batch, rows, columns = (merge(order(vars, d, None), d) for vars in (batch, rows, columns))
        depth = merge(inside_first(depth, d), d)
    # NestDraft.substitute has renamed the merged variables, so read the factors again.
    factors, items = list(d.items[0].exprs), [i for i in d.items[1:] if i.combine is None]
    if ragged is None and cost(d, factors[1], rows, columns, depth, t) > cost(d, factors[0], columns, rows, depth, t):
        factors[::2], factors[1::2], rows, columns = factors[1::2], factors[::2], columns, rows
        over = [(steps[1], steps[0]) for steps in over]
    d.outer, d.inner = [*batch, *rows, *columns, *(() if ragged is None else (ragged.part,))], depth
    params = params_of(d.accesses(), buffers)
    sizes = sizes_of(d, params)
    if ragged is not None and d.bounds is not None:
        ragged = replace(ragged, ends=d.bounds[0])
    reductions = [TileReduction(i, *steps, tuple(d.stores[name] for name in i.names))
                  for i, steps in zip((i for i in d.items[1:] if i.combine is not None), over, strict=True)]
    slots = {name for r in reductions for name in r.item.names}
    products = [Product(name, *factors[2 * k:2 * k + 2]) for k, name in enumerate(first.names)]
    return ContractKernel(tuple(batch), tuple(rows), tuple(columns), tuple(depth), *products[0][1:], products[0].name,
                          tuple(items), tuple((name, at) for name, at in d.stores.items() if name not in slots), params,
                          sizes, tuple(dict.fromkeys(o for m in g.members for o in m.node.origins)),
                          typical_sizes(sizes, typical), node.tf32, ragged, shares, node.promoted, tuple(products[1:]),
                          tuple(reductions))


def tile_sides(m: Member, rows: Sequence[Sym], columns: Sequence[Sym], buffers: dict[str, Buffer]
               ) -> tuple[Index | None, Index | None]:
    """The strides between slots of rows and of columns in a partial reduction's buffer; None for a side not reduced."""
    n, steps = m.node, buffers[m.node.names[0]].strides
    assert isinstance(n, Partial) and steps is not None
    found = {frozenset(m.mapping[v].symbols()): steps[d] for d, v in enumerate(n.vars) if d in n.axes}
    return found.get(frozenset(rows)), found.get(frozenset(columns))


def ragged_role(r: Ragged, m: Member, rows: Sequence[Sym], columns: Sequence[Sym]) -> RaggedRole:
    """Which side of the product is ragged. Its variables keep their order, because together they index into a part."""
    of = m.mapping[r.var].symbols()
    along = "rows" if of & {*rows} else "columns" if of & {*columns} else "depth"
    part = m.mapping[r.part].atom() if r.part in m.mapping else r.part
    assert isinstance(part, Sym), f"{part} are no parts"
    return RaggedRole(along, part, r.ends.subs(m.mapping))


def roles(d: NestDraft, asked: Expr) -> tuple[list[Sym], list[Sym], list[Sym]]:
    """Classify variables as rows, columns and batch. A factor with stride zero along a variable does not depend on it.
    If neither factor does, the product as originally written (`asked`) decides."""
    left, right = (e.symbols() for e in d.items[0].exprs[:2])
    before, after = (e.symbols() for e in asked.args)
    rows: list[Sym] = []
    columns: list[Sym] = []
    batch: list[Sym] = []
    for v in d.outer:
        one, other = (left, right) if v in left or v in right else (before, after)
        (batch if (v in one) == (v in other) else rows if v in one else columns).append(v)
    return rows, columns, batch


def inside_first(depth: list[Sym], d: NestDraft) -> list[Sym]:
    """Order the summed variables: those that are contiguous in a factor go innermost, so that whole lines are read at
    once; the last one is that of the first factor that has one."""
    found = {v: None for e in loads(*d.items[0].exprs) for v in depth if e.attr[1][0].coefficient(v) is ONE}
    return [*(v for v in depth if v not in found), *reversed(found)]


def cost(d: NestDraft, right: Expr, rows: Sequence[Sym], columns: Sequence[Sym], depth: Sequence[Sym], t: Tuning
         ) -> int:
    """The cost of a kernel whose columns, which become vectors, are these: they should be many and contiguous."""
    high, wide, deep = (size_of(vars, 1024) for vars in (rows, columns, depth))
    work = -(-high // t.tile_high) * t.tile_high * (-(-wide // t.tile_wide) * t.tile_wide) * deep
    if is_deep(right, columns, depth):
        work += t.transposed_factor * wide * deep * -(-high // t.block_rows)
    if not any(a.coefficient(v) is ONE for a in d.stores.values() for v in columns):
        work += t.scattered_result * high * wide
    return work
