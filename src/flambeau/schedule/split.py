"""Reductions with few results and many points, cut into pieces: a machine of many cores reduces the pieces side by
side, and then their results.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import const, index_value, loads, masked, where
from flambeau.ir.index import ONE, Index, Sym, as_index, volume
from flambeau.ir.nodes import Contract, Graph, Node, Reduce, Segment, as_indices, contiguous_strides, dim_vars

PIECE = 4096  # points below which a piece is not worth its own result
EVEN = 64  # lengths are multiples of it, so that every piece starts where wide reads can
SIDE = 64  # results next to each other that one program computes where they are what is contiguous


def split_reductions(graph: Graph, caps: Capabilities) -> None:
    if caps.programs <= 1:
        return
    nodes: list[Node] = []
    for n in graph.nodes:
        nodes += split(graph, n, caps) if isinstance(n, Reduce) and not isinstance(n, (Contract, Segment)) else [n]
    graph.nodes = nodes


def split(graph: Graph, n: Reduce, caps: Capabilities) -> list[Node]:
    if not all(v.size.is_const for v in n.vars):
        return [n]
    points = int(volume(n.reduced))
    results = int(volume(n.kept))
    rows = reduces_contiguous(graph, n)
    programs = results if rows else -(-results // SIDE)
    least = PIECE if rows else PIECE // SIDE
    if programs * 2 > caps.programs or points < 4 * least:
        return [n]
    longest = max(n.reduced, key=lambda v: v.size.const)
    size = longest.size.const
    pieces = min(caps.programs // programs, points // least, size)
    if pieces < 2:
        return [n]
    length = -(-size // pieces)
    length += -length % EVEN if length > EVEN else 0
    pieces = -(-size // length)
    # The pieces stand where results next to each other stay so.
    kept = list(n.kept)
    shape = [v.size for v in kept]
    at = len(kept) if rows else 0
    shape.insert(at, as_index(pieces))
    inner = [as_index(length) if v is longest else v.size for v in n.reduced]
    vars = dim_vars((*shape, *inner))
    index = as_indices(vars)
    others = [i for k, i in enumerate(index[: len(shape)]) if k != at]
    place = index[at] * length + index[len(shape) + n.reduced.index(longest)]
    mapping: dict[Sym, Index] = dict(zip(kept, others, strict=True))
    mapping.update(zip(n.reduced, index[len(shape):], strict=True))
    mapping[longest] = place
    inputs = tuple(e.subs(mapping) for e in n.inputs)
    if pieces * length != size:
        there = index_value(place) < const(size, torch.int64)
        inputs = tuple(where(there, masked(e, there), start)
                       for e, start in zip(inputs, n.combine.identity, strict=True))
    partial = Reduce(tuple(graph.add_buffer(shape, d).name for d in n.combine.dtypes), vars,
                     frozenset(range(len(shape), len(vars))), n.combine, inputs, origin=n.origin, inlined=n.inlined)
    for name in partial.names:
        graph.buffers[name].strides = contiguous_strides(shape)
    final_vars = dim_vars(shape)
    read = tuple(graph.whole(name).load(as_indices(final_vars)) for name in partial.names)
    final = replace(n, vars=final_vars, axes=frozenset((at,)), inputs=read)
    return [partial, final]


def reduces_contiguous(graph: Graph, n: Reduce) -> bool:
    """Whether what is read next to each other is reduced together, in what is read at the most points."""
    places = []
    for e in loads(*n.inputs):
        name, index = e.attr
        strides = graph.buffers[name].strides
        if strides is not None:
            places.append(sum((i * s for i, s in zip(index, strides, strict=True)), as_index(0)))
    own = frozenset(v for v in n.vars if v.size is not ONE)
    depths = [len(own & place.symbols()) for place in places]
    score = 0
    for place, depth in zip(places, depths, strict=True):
        for v in own if depth == max(depths) else ():
            if place.coefficient(v) is ONE:
                score += 1 if v in n.reduced else -1
    return score >= 0
