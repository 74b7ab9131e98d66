"""Splits reductions with few results and many points: pieces are reduced in parallel, and then the pieces' results."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import index_value, loads, masked, walk, where
from flambeau.ir.index import ONE, ZERO, Index, Sym, about, as_index, ceildiv, flat, unflat, volume, walks_as_one
from flambeau.ir.lines import is_line
from flambeau.ir.nodes import (
    Contract,
    Graph,
    Node,
    Partial,
    Pointwise,
    Reduce,
    Segment,
    as_indices,
    contiguous_strides,
    dim_vars,
)
from flambeau.ir.program import CHUNK
from flambeau.ir.tuning import BlockTuning, Tuning

from .forms import held_columns
from .loop_nests import FLOAT, distance
from .rewrites.one_pass import sum_of, with_sum_below

WIDE = 4  # elements of a wide, aligned access


def split_reductions(graph: Graph, caps: Capabilities) -> None:
    alike = Counter(filter(None, (whole_row(graph, n) for n in graph.nodes))) if caps.tables else Counter()
    nodes: list[Node] = []
    done: set[str] = set()
    for n in graph.nodes:
        if not isinstance(n, Reduce) or isinstance(n, (Contract, Partial, Segment)):
            nodes.append(n)
        elif alike and alike[whole_row(graph, n)] >= caps.tuning.table_launches:
            nodes += in_blocks(graph, n)
        elif caps.programs > 1 and n.names[0] not in done:
            both = sums_and_largest(graph, n, caps) or split(graph, n, caps)
            done |= {name for m in both for name in m.names}
            nodes += both
        elif n.names[0] not in done:
            nodes.append(n)
    graph.nodes = nodes


def sums_and_largest(graph: Graph, n: Reduce, caps: Capabilities) -> list[Node]:
    """Split a softmax's maximum together with its sum, so that rows are read once for both. Returns no nodes if n is
    not such a maximum, or is not split."""
    found = None if graph.policy.exact else with_sum_below(n, graph.nodes)
    if found is None:
        return []
    both, total = found
    largest = graph.buffers[n.names[0]]
    graph.add_buffer(largest.shape, both.combine.dtypes[1], both.names[1], largest.strides)
    parts = split(graph, both, caps)
    if len(parts) == 1:
        del graph.buffers[both.names[1]]
        return []
    return [*parts, sum_of(total, both, graph)]


def whole_row(graph: Graph, n: Node) -> Hashable:
    """A key of what a reduction computes, if it is over all elements of tensors of the same memory order; else None."""
    if not isinstance(n, Reduce) or isinstance(n, (Contract, Partial, Segment)) or graph.policy.exact \
            or not all(v.size.is_const for v in n.vars):
        return None
    if any(v.size is not ONE for v in n.kept) or int(volume(n.reduced)) > CHUNK**2:
        return None
    place = flat(n.reduced)
    for e in loads(*n.inputs):
        name, index = e.attr
        at = graph.buffers[name].place(index) if graph.buffers[name].strides is not None else None
        if at is None or not (at is place or at.is_const):
            return None
    return n.combine, tuple((e.op, e.dtype) for e in walk(*n.inputs))


def in_blocks(graph: Graph, n: Reduce) -> list[Node]:
    """Cut a reduction into pieces of as many elements as a block of a table has."""
    points = int(volume(n.reduced))
    if points <= CHUNK:
        return [n]
    vars = dim_vars((*(v.size for v in n.kept), as_index(points)))
    mapping: dict[Sym, Index] = dict(zip(n.kept, as_indices(vars), strict=False))
    mapping.update(zip(n.reduced, unflat(as_index(vars[-1]), [v.size for v in n.reduced]), strict=True))
    row = replace(n, vars=vars, axes=frozenset((len(n.kept),)), inputs=tuple(e.subs(mapping) for e in n.inputs))
    return cut(graph, row, {vars[-1]: (ceildiv(points, CHUNK), as_index(CHUNK))}, rows=True)


def split(graph: Graph, n: Reduce, caps: Capabilities) -> list[Node]:
    """Split a reduction into enough pieces to occupy the machine; [n] if it need not be split. Run-time sizes count as
    at capture: they decide the number of pieces, but not their length."""
    if graph.policy.exact and not all(v.size.is_const for v in n.vars):
        return [n]
    points, results = (about(volume(vars), graph.typical, 0) for vars in (n.reduced, n.kept))
    t = caps.tuning
    short = None if graph.policy.exact else short_line(graph, n, t)
    if short is not None:  # each of its elements is a column, next to those of the kept variable that continues lines
        points, results = points // short.size.const, results * short.size.const
    rows = short is None and reduces_contiguous(graph, n)
    # In Triton, a map that writes across rows is a kernel of its own (`fusion/crossings.py`).
    across = rows and not isinstance(t, BlockTuning) and written_across(graph, n, t.vector_least)
    if is_staged(graph, n) and is_held(n, points, rows, caps):
        return [n]
    mixed = rows and not across and reads_across(graph, n, t)
    side = t.split_columns if across or not rows else t.split_across if mixed else 1
    programs = -(-results // side)
    least = t.split_piece // side if side > 1 else t.split_row
    halves = 1 if rows else halves_apart(graph, n)
    if not 0 < programs * (2 if side > 1 else 4) <= caps.programs * halves or points < 4 * least:
        return [n]
    # Rows whose map writes across them would be few columns of one kernel: they are reduced first, then written in
    # tiles. If there are few columns, one program takes those of several pieces.
    beside = 1 if rows else max(1, min(4, t.split_columns // max(results, 1)))
    wanted = max(2, min(caps.programs // results, points // t.split_piece)) if across else \
        min(caps.programs * halves * beside // programs, points // least)
    alone: dict[Sym, Cut] = {} if short is None else {short: (short.size, ONE)}
    more = t.split_more if side > 1 else 2
    cuts = pieces_of(graph, n, wanted, more, t, alone)
    fixed = all(v.size.is_const for v in n.vars)
    mapped = fixed or any(isinstance(m, Pointwise) and volume(m.vars) is volume(n.vars) for m in graph.nodes)
    # If no map has the same points, the reduced variables may be merged.
    if short is None and not (mapped and all(is_even(v, c) for v, c in cuts.items())):
        n = joined(graph, n)
        cuts = pieces_of(graph, n, wanted, more, t, alone)
    if len(cuts) == len(alone):
        return [n]
    return cut(graph, n, cuts, rows and not mixed, alone)


Cut = tuple[Index, Index]  # the number of pieces, and the length of each


def pieces_of(graph: Graph, n: Reduce, wanted: int, more: int, t: Tuning, alone: dict[Sym, Cut]) -> dict[Sym, Cut]:
    """The cuts of a reduction's variables. The one with the largest step is cut first, so that pieces are stretches of
    memory; but data that is read in two directions is cut where its pieces are no shorter than cache lines. `more`: the
    fewest pieces of a second variable; `alone`: cuts that are already made."""
    cuts = dict(alone)
    at, main = places(graph, n), main_places(graph, n)  # values read once per row do not decide the direction
    lines = [v for v in n.reduced if any(i.coefficient(v) is ONE for i in main)]
    whole = [i for i in at if all(i.coefficient(v) is not ZERO for v in n.reduced if v.size is not ONE)]

    def order(v: Sym) -> tuple[bool, int]:
        short = about(v.size, graph.typical, 0) < wanted * t.line_bytes // FLOAT
        far = max((distance(i.coefficient(v), graph.typical) for i in at), default=0)
        return short and any(i.coefficient(v) is ONE for i in whole), -far

    for v in sorted(n.reduced, key=order):
        pieces = min(wanted, about(v.size, graph.typical, 0))
        if len(lines) > 1 and v in lines:  # contiguous in some reads, crossed by others: pieces stay whole lines
            pieces = min(pieces, -(-about(v.size, graph.typical, 0) // t.split_even))
        if v not in alone and pieces >= (more if len(cuts) > len(alone) else 2):
            length = ONE if pieces == about(v.size, graph.typical, 0) else ceildiv(v.size, pieces)
            if about(length, graph.typical, 0) > t.split_even and v in lines:
                length = as_index(t.even(length.const)) if length.is_const else \
                    ceildiv(length, t.split_even) * t.split_even
            cuts[v] = (ceildiv(v.size, length) if v.size.is_const or length is ONE else as_index(pieces), length)
            wanted //= pieces
    return cuts


def is_even(v: Sym, c: Cut) -> bool:
    return c[0] * c[1] is v.size


def joined(graph: Graph, n: Reduce) -> Reduce:
    """Merge reduced variables that every read walks as one: a piece of the result ends anywhere and needs no
    division."""
    found = next(((a, b) for a, b in permutations([v for v in n.reduced if v.size is not ONE], 2)
                  if all(walks_as_one(i, a, b) for i in places(graph, n))), None)
    if found is None:
        return n
    a, b = found
    both = Sym(f"{a.name}{b.name}", a.size * b.size)
    vars = tuple(both if v is a else v for v in n.vars if v is not b)
    mapping = {a: as_index(both) // b.size, b: as_index(both) % b.size}
    return joined(graph, replace(n, vars=vars, axes=frozenset(k for k, v in enumerate(vars) if v not in n.kept),
                                 inputs=tuple(e.subs(mapping) for e in n.inputs)))


def places(graph: Graph, n: Reduce) -> list[Index]:
    """The addresses of a reduction's reads, and all other indices that it computes with."""
    out: list[Index] = []
    for e in walk(*n.inputs):
        b = graph.buffers[e.attr[0]] if e.op == "load" else None
        out += e.own_indices() if b is None or b.strides is None else [b.place(e.attr[1])]
    return out


def cut(graph: Graph, n: Reduce, cuts: dict[Sym, Cut], rows: bool, alone: Collection[Sym] = ()) -> list[Node]:
    """Reduce pieces of variables' points, and then the pieces' results. The order of points stays, so that maps over
    the same points can be fused. Adjacent in memory are the results of one piece (and of elements of `alone`); with
    `rows`, the pieces of one row."""
    # Variables, and whether the new variable counts pieces or points within one.
    order = [(v, piece) for v in n.vars for piece in ((True, False) if v in cuts else (False,))]
    vars = dim_vars([cuts[v][0] if piece else cuts[v][1] if v in cuts else v.size for v, piece in order])
    at = dict(zip(order, as_indices(vars), strict=True))
    mapping = {v: at[v, False] for v in n.vars}
    inside = []
    for v, (count, length) in cuts.items():
        mapping[v] = at[v, True] * length + at[v, False]
        if not is_even(v, (count, length)):
            inside.append(index_value(mapping[v]) < index_value(v.size))
    inputs = tuple(e.subs(mapping) for e in n.inputs)
    if inside:
        there = functools.reduce(operator.and_, inside)
        # Loads that are the same for all points of a row need no mask.
        moving = frozenset(vars[k] for k, (v, _) in enumerate(order) if v in cuts)
        inputs = tuple(where(there, masked(e, there, moving), start)
                       for e, start in zip(inputs, n.combine.identity, strict=True))
    kept = [k for k, (v, piece) in enumerate(order) if piece or v in n.kept]
    shape = [vars[k].size for k in kept]
    partial = Reduce(tuple(graph.add_buffer(shape, d).name for d in n.combine.dtypes), vars,
                     frozenset(range(len(vars))) - frozenset(kept), n.combine, inputs, origin=n.origin,
                     inlined=n.inlined)
    pieces = [k for k, t in enumerate(kept) if order[t][1]]
    apart = {k for k in pieces if order[kept[k]][0] not in alone}
    outer = sorted(range(len(shape)), key=lambda k: (k in apart) is rows)
    dense = dict(zip(outer, contiguous_strides([shape[k] for k in outer]), strict=True))
    for name in partial.names:
        graph.buffers[name].strides = tuple(dense[k] for k in range(len(shape)))
    final_vars = dim_vars(shape)
    read = tuple(graph.whole(name).load(as_indices(final_vars)) for name in partial.names)
    final = replace(n, vars=final_vars, axes=frozenset(pieces), inputs=read)
    return [partial, final]


def main_places(graph: Graph, n: Reduce) -> list[Index]:
    """The addresses of the reads that depend on the most variables."""
    own = frozenset(v for v in n.vars if v.size is not ONE)
    found = [b.place(e.attr[1]) for e in loads(*n.inputs) if (b := graph.buffers[e.attr[0]]).strides is not None]
    depths = [len(own & place.symbols()) for place in found]
    return [place for place, depth in zip(found, depths, strict=True) if depth == max(depths)]


def reduces_contiguous(graph: Graph, n: Reduce) -> bool:
    """Whether adjacent elements in memory are reduced together, in at least half of the main reads that change along a
    row."""
    score = 0
    for place in main_places(graph, n):
        if place.symbols().isdisjoint(n.reduced):
            continue
        steps = {v: first_step(place, v, n.vars, graph.typical) for v in n.vars if v.size is not ONE}
        near = min((v for v in steps if steps[v]), key=steps.__getitem__, default=None)
        if near is not None:
            score += 1 if near in n.reduced else -1
    return score >= 0


def first_step(place: Index, v: Sym, vars: Sequence[Sym], typical: Mapping[Sym, int]) -> int:
    """The distance from a variable's first point to its second; later points may be anywhere, after a division."""
    start: dict[Sym, Index] = dict.fromkeys(vars, ZERO)
    return distance(place.subs({**start, v: ONE}) - place.subs(start), typical)


def short_line(graph: Graph, n: Reduce, t: Tuning) -> Sym | None:
    """A reduced variable that is the short end of lines that continue along a kept variable, as the channels of one
    group are followed by those of the next; None if there is none."""
    at, itemsize = main_places(graph, n), max((e.dtype.itemsize for e in loads(*n.inputs)), default=1)
    for v in n.reduced:
        short = v.size.is_const and (v.size.const < t.vector_least or v.size.const * itemsize < t.line_bytes)
        if short and v.size.const > 1 and at and all(
                i.coefficient(v) is ONE and any(i.coefficient(w) is v.size for w in n.kept) for i in at):
            return v
    return None


def halves_apart(graph: Graph, n: Reduce) -> int:
    """The factor by which more programs are needed to keep memory busy, if columns are read element by element, as in
    rows of odd lengths: with half-precision elements, half as many bytes are in flight."""
    wide = all(any(is_line(at, v, WIDE) for v in n.kept) for at in main_places(graph, n))
    return 1 if wide else max(1, 4 // max((e.dtype.itemsize for e in loads(*n.inputs)), default=4))


def reads_across(graph: Graph, n: Reduce, t: Tuning) -> bool:
    """Whether a reduction of rows also reads data that is contiguous across them: pieces of several rows share its
    lines, and are neighbours."""
    return t.split_across > 1 and any(first_step(at, v, n.vars, graph.typical) == 1
               and about(v.size, graph.typical, t.vector_least) >= t.vector_least
               for at in main_places(graph, n) for v in n.kept)


def is_staged(graph: Graph, n: Reduce) -> bool:
    """Whether another node over as many points waits for this reduction, or it for the other: they are one kernel if
    neither is split. They may read a map of its results, such as a mean."""
    points, results = volume(n.vars), volume(n.kept)
    before, after = set[str](), {*n.names}
    for m in graph.nodes:
        if isinstance(m, Reduce) and volume(m.vars) is points:
            if m.reads() & after:
                return True
            before |= {*m.names}
            if m is n and n.reads() & before:
                return True
        elif isinstance(m, Pointwise):
            if volume(m.vars) is points and m.reads() & after:
                return True
            if volume(m.vars) is results:
                before |= {*m.names} if m.reads() & before else set()
                after |= {*m.names} if m.reads() & after else set()
    return False


def is_held(n: Reduce, points: int, rows: bool, caps: Capabilities) -> bool:
    """Whether one program holds all elements that it reduces, so that later stages do not read them again."""
    if not volume(n.reduced).is_const:
        return False
    if rows:
        return caps.row_elements is not None and points <= caps.row_elements
    return held_columns(points, [e.dtype.itemsize for e in loads(*n.inputs)], caps.tuning) > 0


def written_across(graph: Graph, n: Reduce, least: int) -> bool:
    """Whether a map over the same points that reads the results writes elements of at least `least` different rows side
    by side."""
    shape = [v.size for v in n.vars]
    for m in graph.nodes:
        if isinstance(m, Pointwise) and [v.size for v in m.vars] == shape and set(n.names) & m.reads():
            strides = graph.buffers[m.names[0]].strides or ()
            if any(s is ONE and v in n.kept and about(v.size, graph.typical, least) >= least
                   for v, s in zip(n.vars, strides, strict=False)):
                return True
    return False
