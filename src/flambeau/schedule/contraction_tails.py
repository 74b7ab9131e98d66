"""Fuses more than maps into a contraction's kernel: a second product with a common factor, and reductions of results.

Two products with a common factor that one map reads together, as in a gated unit, become one contraction of two sums. A
reduction of results is done tile by tile: `Partial` produces one value for each `SLOT` rows or columns, and a later
kernel reduces those. If it does not end up in the contraction's kernel, it is an ordinary split reduction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flambeau.ir.build import make_combine
from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, Index, Sym, as_index, ceildiv, flat, unflat, volume
from flambeau.ir.nodes import (
    Contract,
    Graph,
    Node,
    Partial,
    Pointwise,
    Reduce,
    Segment,
    as_indices,
    dim_vars,
)

from .split_reductions import cut

SLOT = 64  # rows or columns per value: every tile size is a multiple of it


# ---- two products ----------------------------------------------------------------------------------------


def join_products(graph: Graph) -> None:
    """Merge contractions that share a factor and are read by the same map into one node."""
    made = {name: n for n in graph.nodes if isinstance(n, Contract) for name in n.names}
    readers = Counter(name for n in graph.nodes for name in n.reads() & made.keys())
    for reader in [n for n in graph.nodes if isinstance(n, Pointwise)]:
        pair = list(dict.fromkeys(made[name] for name in sorted(reader.reads() & made.keys()) if readers[name] == 1))
        if len(pair) == 2 and (both := joined(*sorted(pair, key=graph.nodes.index))) is not None:
            first, second = sorted(pair, key=graph.nodes.index)
            graph.nodes[graph.nodes.index(second)] = both
            graph.nodes.remove(first)
            made |= dict.fromkeys(both.names, both)


def joined(a: Contract, b: Contract) -> Contract | None:
    """Both as one contraction; None unless they have the same points, share a factor, and b does not depend on a."""
    if a.factors is None or b.factors is None or a.axes != b.axes or set(a.names) & b.reads() \
            or [v.size for v in a.vars] != [v.size for v in b.vars] or a.combine != b.combine \
            or (a.tf32, a.promoted, a.ragged, b.ragged) != (b.tf32, b.promoted, None, None):
        return None
    mine = tuple(e.subs(dict(zip(b.vars, as_indices(a.vars), strict=True))) for e in b.inputs)
    if not {*a.inputs[0].args} & {*mine[0].args} or mine[0].op != "mul":
        return None
    (dtype,) = a.combine.dtypes
    both = make_combine("sums", (dtype, dtype), (0, 0), lambda x, y: (x[0] + y[0], x[1] + y[1]))
    origins = dict.fromkeys((*a.origins, *b.origins))
    return replace(a, names=(*a.names, *b.names), inputs=(*a.inputs, *mine), combine=both, origin=b.origin,
                   inlined=tuple(o for o in origins if o != b.origin))


# ---- reductions ------------------------------------------------------------------------------------------

Place = tuple[Contract, tuple[Sym, ...], tuple[Index, ...]]  # a value's contraction, variables, and point in it


def reduce_by_tiles(graph: Graph) -> None:
    """Reduce over all rows or columns of a contraction's results, or of maps of them, tile by tile."""
    places: dict[str, Place] = {}
    nodes: list[Node] = []
    for n in graph.nodes:
        if isinstance(n, Contract) and n.is_tiled and n.ragged is None:
            places |= dict.fromkeys(n.names, (n, n.kept, as_indices(n.kept)))
        elif isinstance(n, Pointwise) and (found := place_of(n, places)) is not None:
            places[n.names[0]] = (found[0], n.vars, found[1])
        elif isinstance(n, Reduce) and not isinstance(n, (Contract, Segment)) \
                and (found := place_of(n, places)) is not None and (made := by_tiles(graph, n, *found)) is not None:
            nodes += made
            continue
        nodes.append(n)
    graph.nodes = nodes


def place_of(n: Pointwise | Reduce, places: dict[str, Place]) -> tuple[Contract, tuple[Index, ...]] | None:
    """The contraction that a node reads at exactly one point for each of its own; None if it reads otherwise."""
    found = set()
    for e in loads(*n.exprs()):
        if e.attr[0] in places:
            contract, vars, at = places[e.attr[0]]
            found.add((contract, tuple(i.subs(dict(zip(vars, e.attr[1], strict=True))) for i in at)))
    return found.pop() if len(found) == 1 else None


def by_tiles(graph: Graph, n: Reduce, contract: Contract, at: tuple[Index, ...]) -> list[Node] | None:
    """Split a reduction into two steps, the first of which may be fused into the contraction's kernel."""
    parts = [[v for v in n.vars if v in i.symbols()] for i in at]
    placed = zip(parts, at, contract.kept, strict=True)
    if any(flat(vars) is not i or volume(vars) is not k.size for vars, i, k in placed) \
            or sorted(v.name for vars in parts for v in vars) != sorted(v.name for v in n.vars if v.size is not ONE):
        return None
    reduced = [bool(vars) and all(v in n.reduced for v in vars) for vars in parts]
    if any(v in n.reduced for vars, all_of in zip(parts, reduced, strict=True) if not all_of for v in vars):
        return None
    assert contract.factors is not None
    left, right = (e.symbols() for e in contract.factors)
    sides = [[k for k in contract.kept if k.size is not ONE and k in one and k not in other]
             for one, other in ((left, right), (right, left))]
    if any(len(side) != 1 for side in sides):
        return None  # rows are several variables: their slots would not match those of a tile
    # Over the contraction's points: rows and columns in slots of SLOT, batch variables unsplit.
    vars = dim_vars([k.size for k in contract.kept])
    ones = {v: as_index(0) for v in n.vars if v.size is ONE}
    mapping = ones | {v: i for w, of in zip(vars, parts, strict=True)
                      for v, i in zip(of, unflat(as_index(w), [v.size for v in of]), strict=True)}
    axes = frozenset(d for d, whole in enumerate(reduced) if whole)
    own = {side[0] for side in sides}
    cuts = {vars[d]: (ceildiv(k.size, SLOT), as_index(SLOT)) if k in own else (k.size, ONE)
            for d, k in enumerate(contract.kept) if d in axes}
    if not any(k in own for d, k in enumerate(contract.kept) if d in axes):
        return None
    over = replace(n, names=("",) * len(n.names), vars=vars, axes=axes, inputs=tuple(e.subs(mapping) for e in n.inputs))
    plain, _ = cut(graph, over, cuts, rows=True)
    assert isinstance(plain, Reduce)
    tiled = Partial(plain.names, vars, frozenset(d for d in axes if contract.kept[d] in own), n.combine, over.inputs,
                    plain, origin=n.origin, inlined=n.inlined)
    # The second step produces the original results.
    final = dim_vars([*(v.size for v in n.kept), *(cuts[vars[d]][0] for d in sorted(axes))])
    kept, pieces = dict(zip(n.kept, as_indices(final), strict=False)), iter(as_indices(final[len(n.kept):]))
    index = [next(pieces) if d in axes else flat(of).subs(kept) for d, of in enumerate(parts)]
    read = tuple(graph.whole(name).load(index) for name in plain.names)
    return [tiled, replace(n, vars=final, axes=frozenset(range(len(n.kept), len(final))), inputs=read, inlined=())]
