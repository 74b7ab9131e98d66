"""Reductions with few results and many points, cut into pieces: a machine of many cores reduces the pieces side by
side, and then their results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import const, index_value, loads, masked, walk, where
from flambeau.ir.index import ONE, Index, Sym, as_index, volume
from flambeau.ir.nodes import Contract, Graph, Node, Reduce, Segment, as_indices, contiguous_strides, dim_vars
from flambeau.ir.program import CHUNK

FEWEST = 4  # launches that are worth a table
PIECE = 4096  # points below which a piece is not worth its own result
EVEN = 64  # lengths are multiples of it, so that every piece starts where wide reads can
SIDE = 64  # results next to each other that one program computes where they are what is contiguous


def split_reductions(graph: Graph, caps: Capabilities) -> None:
    alike = Counter(filter(None, (whole_row(graph, n) for n in graph.nodes))) if caps.tables else Counter()
    nodes: list[Node] = []
    for n in graph.nodes:
        if not isinstance(n, Reduce) or isinstance(n, (Contract, Segment)):
            nodes.append(n)
        elif alike and alike[whole_row(graph, n)] >= FEWEST:
            nodes += in_blocks(graph, n)
        else:
            nodes += split(graph, n, caps) if caps.programs > 1 else [n]
    graph.nodes = nodes


def whole_row(graph: Graph, n: Node) -> Hashable:
    """What a reduction of all elements of tensors in one order does to them; None if it is something else."""
    if not isinstance(n, Reduce) or isinstance(n, (Contract, Segment)) or graph.policy.exact \
            or not all(v.size.is_const for v in n.vars):
        return None
    if any(v.size is not ONE for v in n.kept) or int(volume(n.reduced)) > CHUNK**2:
        return None
    place = linear(n.reduced)
    for e in loads(*n.inputs):
        name, index = e.attr
        strides = graph.buffers[name].strides
        at = None if strides is None else sum((i * s for i, s in zip(index, strides, strict=True)), as_index(0))
        if at is None or not (at is place or at.is_const):
            return None
    return n.combine, tuple((e.op, e.dtype) for e in walk(*n.inputs))


def linear(vars: Sequence[Sym]) -> Index:
    """The place of a point among all of them."""
    at = as_index(0)
    for v in vars:
        at = at * v.size + v
    return at


def in_blocks(graph: Graph, n: Reduce) -> list[Node]:
    """Cut into pieces of as many elements as a block of a table has."""
    points = int(volume(n.reduced))
    if points <= CHUNK:
        return [n]
    vars = dim_vars((*(v.size for v in n.kept), as_index(points)))
    mapping: dict[Sym, Index] = dict(zip(n.kept, as_indices(vars), strict=False))
    rest = as_index(vars[-1])
    for v in reversed(n.reduced):
        mapping[v], rest = rest % v.size, rest // v.size
    row = replace(n, vars=vars, axes=frozenset((len(n.kept),)), inputs=tuple(e.subs(mapping) for e in n.inputs))
    return cut(graph, row, vars[-1], CHUNK, len(n.kept))


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
    # The pieces stand where results next to each other stay so.
    return cut(graph, n, longest, length, len(n.kept) if rows else 0)


def cut(graph: Graph, n: Reduce, longest: Sym, length: int, at: int) -> list[Node]:
    """Reduce pieces of one variable's points, of this length, and then what they come to; they are dimension `at`."""
    size = longest.size.const
    pieces = -(-size // length)
    kept = list(n.kept)
    shape = [v.size for v in kept]
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
