"""Widens sums of few columns: several rows side by side fill the lanes of a vector.

The rows of a table with 13 columns, summed one after the other, fill no vector, and each addition waits for the one
before it. So the rows are dealt out to several turns, and each turn has sums of its own; a second reduction adds the
turns' results. This is done if every access walks rows and columns as one, and if the number of turns divides the
number of rows.
"""

from __future__ import annotations

from dataclasses import replace

from flambeau.ir.expr import walk
from flambeau.ir.index import Index, Sym, as_index, walks_as_one
from flambeau.ir.nodes import Contract, Graph, Node, Partial, Reduce, Segment, as_indices, contiguous_strides, dim_vars
from flambeau.ir.tuning import CpuTuning

from ..split_reductions import is_staged, places


def widen_columns(graph: Graph, t: CpuTuning) -> None:
    if not graph.policy.exact:
        graph.nodes = [made for n in graph.nodes for made in widened(graph, n, t)]


def widened(graph: Graph, n: Node, t: CpuTuning) -> list[Node]:
    if not isinstance(n, Reduce) or isinstance(n, (Contract, Partial, Segment)) \
            or not all(v.size.is_const for v in n.vars) or is_staged(graph, n):
        return [n]
    at = places(graph, n)
    itemsize = max(e.dtype.itemsize for e in walk(*n.inputs))
    for column in n.kept:
        if column.size.const > 1 and t.is_ragged(column.size.const, itemsize):
            for row in n.reduced:
                turns = t.turns(row.size.const, column.size.const)
                if turns > 1 and any(row in i.symbols() for i in at) and all(walks_as_one(i, row, column) for i in at):
                    return in_turns(graph, n, row, column, turns)
    return [n]


def in_turns(graph: Graph, n: Reduce, row: Sym, column: Sym, turns: int) -> list[Node]:
    """The two reductions. Each turn sums the rows with one remainder: row = round * turns + turn. The results of turns
    are adjacent in memory, as the rows are."""
    sizes = [(v, size) for v in n.vars for size in
             ((as_index(row.size.const // turns), as_index(turns)) if v is row else (v.size,))]
    vars = dim_vars([size for _, size in sizes])
    spots: dict[Sym, list[Sym]] = {}
    for (v, _), new in zip(sizes, vars, strict=True):
        spots.setdefault(v, []).append(new)
    mapping: dict[Sym, Index] = {v: as_index(new[0]) if len(new) == 1 else as_index(new[0]) * turns + new[1]
                                 for v, new in spots.items()}
    turn = spots[row][1]
    kept = [k for k, ((v, _), new) in enumerate(zip(sizes, vars, strict=True)) if new is turn or v in n.kept]
    shape = [vars[k].size for k in kept]
    names = tuple(graph.add_buffer(shape, d).name for d in n.combine.dtypes)
    lines = [vars[k] for k in kept if vars[k] not in (turn, spots[column][0])] + [turn, spots[column][0]]
    strides = dict(zip(lines, contiguous_strides([v.size for v in lines]), strict=True))
    for name in names:
        graph.buffers[name].strides = tuple(strides[vars[k]] for k in kept)
    partial = Reduce(names, vars, frozenset(range(len(vars))) - frozenset(kept), n.combine,
                     tuple(e.subs(mapping) for e in n.inputs), origin=n.origin, inlined=n.inlined)
    last = dim_vars(shape)
    final = replace(n, vars=last, axes=frozenset((kept.index(vars.index(turn)),)),
                    inputs=tuple(graph.whole(name).load(as_indices(last)) for name in names))
    return [partial, final]
