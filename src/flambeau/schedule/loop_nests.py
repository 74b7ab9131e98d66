"""Turns a group of nodes into a loop nest: stages, addresses, and the shape of the loops.

Dimensions are split where an index divides them, ordered so that memory is walked in order, and merged where every
access walks two of them as one. The variable that is contiguous in most accesses is vectorised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import DType, is_float
from flambeau.ir.expr import Expr, const, cost_of, held, index_value, loads, rewrite, walk
from flambeau.ir.index import (
    ONE,
    ZERO,
    Dyn,
    Index,
    Sym,
    about,
    as_index,
    is_positive,
    volume,
    walks_as_one,
)
from flambeau.ir.lines import apart
from flambeau.ir.nodes import Buffer, Combine, Reduce, Scan, Scatter
from flambeau.ir.program import Item, LoopKernel, Param, ScanKernel, ScatterKernel, exprs_of
from flambeau.ir.tuning import BlockTuning, CpuTuning, PointTuning, Tuning

from .forms import held_columns, is_shared, leaves_cache, points_beside, widest_float
from .fusion.fuse import Group, member_exprs
from .rewrites.one_pass import alive, exponentials_at_once

_INT64 = torch.int64
FLOAT = 4  # bytes of an element of the most common dtype, where an estimate is enough
# What an access adds to the score of a variable as the innermost one, if its elements are adjacent, the same, apart, or
# at unknown places. The score is weighted by how often the access happens, and by the factors that follow.
NEXT, SAME, APART, UNKNOWN = 2.0, 0.25, -1.0, -0.5
STORED = 2.0  # a cache line is loaded before it is stored to
CACHED = 0.1  # accesses to small tables, or accesses that do not depend on the inner variables
SHORT = 6.0  # accesses: the penalty of a loop that is too short for a vector
LATER = 0.01  # of equally good variables, the last wins
_LARGE = 1 << 10  # elements: assumed for a run-time size when steps are compared


def linear(e: Expr, buffers: dict[str, Buffer], local: Callable[[str], bool]) -> Expr:
    """The expression with reads at memory addresses; reads of values that the kernel computes become locals."""

    def fn(x: Expr) -> Expr:
        if x.op != "load":
            return x
        name, index = x.attr
        if local(name):
            return Expr("local", x.dtype, (), name)
        there = has_elements(buffers[name], index)
        mask = x.args if there is None else (there & x.args[0] if x.args else there,)
        read = Expr("load", x.dtype, mask, (name, (buffers[name].place(index),)))
        return held(read, index)  # a stride of zero removes an index from the address, but its check must stay

    return rewrite(e, fn)


def is_empty(b: Buffer) -> bool:
    return any(n is ZERO for n in b.shape)


def has_elements(b: Buffer, index: Sequence[Index]) -> Expr | None:
    """The condition that a buffer has elements; None if it need not be tested. A buffer without elements can only be
    accessed at an index that fails its check (and is zero then). The check stays, the access is masked out."""
    checked = any(e.op == "check" for i in index for a in i.atoms() if isinstance(a, Dyn) for e in walk(a.expr))
    if is_empty(b):
        return const(False, torch.bool)
    return index_value(b.numel) > 0 if checked and not is_positive(b.numel) else None


@dataclass
class NestDraft:
    """A kernel while its loops are being shaped."""

    outer: list[Sym]
    inner: list[Sym]
    items: list[Item]
    stores: dict[str, Index]
    stage_of: dict[str, int] = field(default_factory=dict)
    bounds: tuple[Expr, Expr] | None = None
    typical: dict[Sym, int] = field(default_factory=dict)  # typical values of run-time sizes

    def about(self, size: Index, unknown: int) -> int:
        return about(size, self.typical, unknown)

    def exprs(self) -> list[Expr]:
        out = exprs_of(self.items)
        return out + list(self.bounds) if self.bounds else out

    def substitute(self, mapping: dict[Sym, Index]) -> None:
        memo: dict[Expr, Expr] = {}

        def sub(e: Expr) -> Expr:
            return rewrite(e, lambda x: x, mapping, memo)

        self.items = [Item(i.names, i.level, tuple(map(sub, i.exprs)), i.combine) for i in self.items]
        self.stores = {n: a.subs(mapping) for n, a in self.stores.items()}
        if self.bounds:
            self.bounds = (sub(self.bounds[0]), sub(self.bounds[1]))

    def accesses(self) -> list[tuple[str, Index, bool]]:
        """(buffer, address, is a store) of every memory access."""
        out = [(e.attr[0], e.attr[1][0], False) for e in loads(*self.exprs())]
        return out + [(n, a, True) for n, a in self.stores.items()]

    def stages_that_read(self) -> dict[tuple[str, Index], int]:
        """The number of stages of a reduction that read each address, if each stage recomputes the point values that it
        needs."""
        points: dict[str, set[tuple[str, Index]]] = {}
        found: set[tuple[tuple[str, Index], int | None]] = set()
        for i in self.items:
            reads = {(e.attr[0], e.attr[1][0]) for e in loads(*i.exprs)}
            reads = reads.union(*(points.get(name, ()) for name in locals_in(i.exprs)))
            found |= {(read, self.stage_of.get(i.names[0])) for read in reads}
            if i.combine is None and i.level == "full":
                points[i.names[0]] = reads
        return Counter(read for read, _ in found)

    def is_plain(self, e: Expr) -> bool:
        """Whether an expression uses outer variables at most in the address of an unmasked load, and no data decide
        that address."""
        plain = e.op == "load" and not e.args and not any(isinstance(a, Dyn) for a in e.attr[1][0].atoms())
        return plain or all(i.symbols().isdisjoint(self.outer) for i in e.own_indices())

    def indices(self) -> list[Index]:
        return [i for e in walk(*self.exprs()) for i in e.own_indices()] + list(self.stores.values())


def draft_group(g: Group, buffers: dict[str, Buffer], stored: set[str]) -> NestDraft:
    # Everything stays in the order in which it was made, so that equal layers get equal text in every process.
    made = dict.fromkeys(n for m in g.members for n in m.node.names)
    items: list[Item] = []
    axes = g.axes if g.axes is not None else frozenset()
    for m in g.members:
        exprs = tuple(linear(e, buffers, made.__contains__) for e in member_exprs(m))
        combine: Combine | None = m.node.combine if isinstance(m.node, Reduce) else None
        if combine is not None and not axes and g.segment is None:  # reduces one element: its components as they are
            items += [Item((name,), m.level, (e,)) for name, e in zip(m.node.names, exprs, strict=True)]
        else:
            items.append(Item(m.node.names, m.level, exprs, combine))
    vars = g.vars
    stores = {name: buffers[name].place(g.written[name][0]) for name in made if name in stored}
    d = NestDraft([v for i, v in enumerate(vars) if i not in axes], [v for i, v in enumerate(vars) if i in axes], items,
              stores)
    if g.segment is not None:
        m = g.members[0]
        ones = {v: ZERO for v in g.segment.vars if v.size is ONE}
        lo, hi = (linear(e.subs({**ones, **m.mapping}), buffers, made.__contains__)
                  for e in (g.segment.lo, g.segment.hi))
        d.bounds = (lo, hi)
        if not d.inner:  # a segment over an axis of one element still runs from lo to hi
            axis = Sym("g99", 1)
            d.inner = [axis]
    return d


# ---- stages --------------------------------------------------------------------------------------------


def locals_in(exprs: Sequence[Expr]) -> set[str]:
    return {e.attr for e in walk(*exprs) if e.op == "local"}


def stage(d: NestDraft, g_has_axes: bool) -> None:
    """Assign each item to a stage: full stages are even, outer stages odd; a reduction is ready one stage later."""
    made: dict[str, tuple[int, str]] = {}
    for i in d.items:
        t = 1 if i.level == "outer" else 0
        if not g_has_axes:
            t = 0
        else:
            for name in locals_in(i.exprs):
                at, kind = made[name]
                if i.level == "full":
                    t = max(t, at + 2 if kind == "reduce" else at + 1 if kind == "outer" else at)
                else:
                    t = max(t, at + 1 if kind == "reduce" else at)
        kind = "reduce" if i.combine is not None else i.level
        for name in i.names:
            made[name] = (t, kind)
            d.stage_of[name] = t


def bring_forward(d: NestDraft, row: int | None, caps: Capabilities, dtype_of: dict[str, DType]
                  ) -> tuple[set[str], set[str]]:
    """Provide the full-level values that a later stage reads: computed again, kept in a scratch row, or stored.

    `row`: the number of elements that a worker holds in fast memory at once, if that is known. If this memory is
    registers, nothing is stored: values that do not fit are computed again, from inputs that are read again anyway.

    Returns (names for the scratch row, names that must be stored after all).
    """
    bodies = {i.names[0]: i for i in d.items if i.combine is None and i.level == "full"}
    scratch: set[str] = set()
    extra: set[str] = set()
    space = caps.scratch_bytes // 4
    words = read_words(d)

    def keep(n: str) -> bool:
        nonlocal space, words
        if row is None:
            return False
        if caps.row_registers:
            words += -(-dtype_of[n].itemsize // 4)
            return caps.holds(row, words)
        need = row * dtype_of[n].itemsize
        space -= need if (fits := need <= space and (caps.row_elements is None or row <= caps.row_elements)) else 0
        return fits

    for k, i in enumerate(d.items):
        t = d.stage_of[i.names[0]]
        again = {""}
        while again:
            late = {n for n in locals_in(d.items[k].exprs) if n in bodies and d.stage_of[n] < t and n not in d.stores}
            again = {n for n in late if n not in scratch and n not in extra
                     and cost_of(bodies[n].exprs) <= caps.tuning.recompute
                     and not bodies.keys() & locals_in(bodies[n].exprs)}  # recomputing it would recompute those too
            for n in sorted(late - again - scratch - extra):
                (scratch if keep(n) else again if caps.row_registers else extra).add(n)
            memo: dict[Expr, Expr] = {}

            def put(x: Expr, again: set[str] = again) -> Expr:
                return bodies[x.attr].exprs[0] if x.op == "local" and x.attr in again else x

            d.items[k] = replace(i, exprs=tuple(rewrite(e, put, None, memo) for e in d.items[k].exprs))
    return scratch, extra


def read_words(d: NestDraft) -> int:
    """The number of 32-bit words that an inner point reads."""
    inner = frozenset(d.inner)
    return sum(-(-e.dtype.itemsize // 4) for e in loads(*d.exprs()) if e.attr[1][0].symbols() & inner)


# ---- the shape of the loops ------------------------------------------------------------------------------


def split_dims(d: NestDraft, lists: Sequence[list[Sym]], whole: Sym | None = None) -> None:
    """Split each variable x of which an index uses x // k or x % k into two, if k divides its size and it is not
    `whole`."""
    for _ in range(16):
        found = next(((v, k) for i in d.indices() for v, k in i.quotients() if any(v in vs for vs in lists)
                      and v is not whole and k is not v.size and (v.size // k) * k is v.size), None)
        if found is None:
            return
        v, k = found
        big, small = Sym(f"{v.name}o", v.size // k), Sym(f"{v.name}i", k)
        d.substitute({v: as_index(big) * k + small})
        for vs in lists:
            if v in vs:
                at = vs.index(v)
                vs[at:at + 1] = [big, small]


def long_lines(d: NestDraft, t: Tuning) -> Sym | None:
    """The variable along which a transposition reads, if splitting it would make its lines too short for that; else
    None. An example is the channels of a normalisation whose statistics are shared by groups of channels."""
    vector = choose_vector(d, d.outer, t)
    tile = choose_tile(d, d.outer, vector, t)
    parts = [d.about(k, t.vector_least) for i in d.indices() for v, k in i.quotients() if v is tile]
    return tile if parts and min(parts) < t.vector_least else None


def choose_vector(d: NestDraft, candidates: Sequence[Sym], t: Tuning) -> Sym | None:
    """The variable that is contiguous in most accesses; stores count double, jumps count against.

    Accesses that a kernel makes once per outer point (the result of a row's reduction) hardly count, nor do reads of a
    table that a map reads again and again."""
    best: Sym | None = None
    best_score = 0.0
    inner = frozenset(d.inner)
    again = d.stages_that_read() if t.reads_again else {}
    points = 0 if inner else d.about(volume(d.outer), 0)

    def is_table(address: Index) -> bool:
        return 0 < d.about(volume(v for v in d.outer if v in address.symbols()), points) * t.table_reads <= points

    tables = {address for _, address, is_store in d.accesses() if not is_store and is_table(address)}
    for k, v in enumerate(candidates):
        score = 0.0
        for name, address, is_store in d.accesses():
            c = address.coefficient(v)
            weight = STORED if is_store else float(again.get((name, address), 1))
            if address in tables or (inner and inner.isdisjoint(address.symbols())):
                weight *= CACHED
            score += weight * (UNKNOWN if c is None else NEXT if c is ONE else SAME if c is ZERO else APART)
        length = span(v, d, t)
        if d.about(length, t.vector_least) < t.vector_least:
            score -= SHORT * max(again.values(), default=1)
        score += LATER * k
        if best is None or score > best_score:
            best, best_score = v, score
    return best


def span(v: Sym, d: NestDraft, t: Tuning, without: Sym | None = None) -> Index:
    """The extent of a variable together with the variables that the indices walk as one with it, except `without`. For
    an outer variable of a reduction, only indices at inner points count; for a map on a machine with `flat_maps`, only
    the stores."""
    left = [w for w in (d.inner if v in d.inner else d.outer) if w is not v and w is not without]
    length, inner = v.size, frozenset(d.inner)
    main = [i for i in d.indices() if inner & i.symbols()] if inner and v not in inner else list(d.indices())
    if t.flat_maps and not inner:
        main = list(d.stores.values())
    while (before := next((w for w in left if all(walks_as_one(i, w, v) for i in main)), None)) is not None:
        left.remove(before)
        length, v = length * before.size, before
    return length


def order(vars: list[Sym], d: NestDraft, vector: Sym | None, t: Tuning | None = None) -> list[Sym]:
    """Order variables: the largest step of the main access outermost, the vector variable innermost. The main access is
    a store or, if the tuning sets `row_lines`, the access whose cache lines are shared with the most other rows."""
    main = [a for _, a, _ in sorted(d.accesses(), key=lambda access: not access[2])]  # reads count if no store steps
    if t is not None and t.row_lines:
        main.sort(key=lambda a: lines_to_share(a, d, vector, t))
    steps = {v: next((c for a in main if (c := a.coefficient(v)) is not None and c is not ZERO), None) for v in vars}
    placed = list(vars)
    if None not in steps.values():
        placed.sort(key=lambda v: -distance(steps[v], d.typical))
    if vector in placed:
        placed.remove(vector)
        placed.append(vector)
    return placed


def lines_to_share(address: Index, d: NestDraft, vector: Sym | None, t: Tuning) -> int:
    """A sort key of an access: the smaller, the more of its cache lines are left to the neighbours of a row. Accesses
    made once per row come last; those that fill their lines by themselves, or fit in a cache, hardly count."""
    if d.inner and address.symbols().isdisjoint(d.inner):
        return 1
    points = d.about(volume(v for v in (*d.outer, *d.inner) if v in address.symbols()), t.row_lines)
    return -points if jumps(address, vector) and leaves_cache(points, 1, t) else 0


def jumps(address: Index, v: Sym | None) -> bool:
    """Whether points that are neighbours along a variable are not adjacent in memory."""
    return v is not None and address.coefficient(v) not in (ONE, ZERO)


def shortest_across(d: NestDraft, vector: Sym, candidates: Sequence[Sym], t: Tuning) -> Sym:
    """The variable to go innermost: `vector`, or a shorter one if `vector` is long and other accesses are contiguous
    along the shorter one. A short loop ends soon, so the rest of the cache lines of both is still in a cache."""
    jumping = [a for _, a, _ in d.accesses() if jumps(a, vector)]

    def leaves(v: Sym) -> bool:
        lines = sum(apart(a, FLOAT, {v, *d.inner}, t.line_bytes) for a in jumping)
        return d.about(v.size * volume(d.inner), t.row_lines) * lines > t.row_lines

    found = [v for v in candidates if v in d.outer and not leaves(v) and any(a.coefficient(v) is ONE for a in jumping)]
    return found[0] if found and leaves(vector) else vector


def distance(step: Index | None, typical: Mapping[Sym, int] | None = None) -> int:
    """The length of a step in elements, for comparing. Run-time sizes without a typical value count as large."""
    return 0 if step is None else abs(about(step, {**dict.fromkeys(step.symbols(), _LARGE), **(typical or {})}, 0))


def merge(vars: list[Sym], d: NestDraft) -> list[Sym]:
    """Merge neighbouring variables that every access walks as one."""
    for k in range(len(vars) - 2, -1, -1):
        a, b = vars[k], vars[k + 1]
        if mergeable(a, b, d):
            joint = Sym(f"{a.name}{b.name}", a.size * b.size)
            d.substitute({a: as_index(joint) // b.size, b: as_index(joint) % b.size})
            vars[k:k + 2] = [joint]
    return vars


def mergeable(a: Sym, b: Sym, d: NestDraft) -> bool:
    return all(walks_as_one(i, a, b) for i in d.indices())


def merged_size(v: Sym, vars: Sequence[Sym], d: NestDraft) -> Index:
    """The extent of a variable together with those before it that will be merged with it."""
    size, at = v.size, vars.index(v)
    while at and mergeable(vars[at - 1], vars[at], d):
        at -= 1
        size = size * vars[at].size
    return size


def choose_tile(d: NestDraft, vars: Sequence[Sym], vector: Sym | None, t: Tuning) -> Sym | None:
    """A second variable that is contiguous where the vector variable jumps (a transposition); None if there is none."""
    if vector is None:
        return None
    # Lines shorter than a vector: a tile is walked as one line, if all accesses that are not transposed allow it; or
    # lines that the results walk as one are.
    short = d.about(vector.size, t.transpose_least) < t.transpose_least
    if short and not (t.flat_tiles and vector.size.is_const or t.flat_maps):
        return None

    def is_long(v: Sym) -> bool:
        together = t.flat_maps and d.about(span(vector, d, t, without=v), t.transpose_least) >= t.transpose_least
        return together or t.flat_tiles and flat(d, v, vector)

    votes: dict[Sym, int] = {}
    for _, address, _ in d.accesses():
        c = address.coefficient(vector)
        # Quotients of the variable, as in a repeat, jump as well. Nothing is known about addresses that data decide,
        # except that they are contiguous along another variable.
        if c is ONE or c is ZERO or c is None and not t.flat_maps and any(isinstance(a, Dyn) for a in address.atoms()):
            continue
        for v in vars:
            if v is not vector and address.coefficient(v) is ONE \
                    and d.about(merged_size(v, vars, d), t.tile_least) >= t.tile_least \
                    and (not short or is_long(v)):
                votes[v] = votes.get(v, 0) + 1
    return max(votes, key=lambda v: votes[v]) if votes else None


def flat(d: NestDraft, tile: Sym, vector: Sym) -> bool:
    """Whether all indices except those of the reads that a tile transposes walk the two variables as one."""
    transposed = {a for e in loads(*d.exprs()) if not e.args and (a := e.attr[1][0]).coefficient(tile) is ONE
                  and a.coefficient(vector) not in (ONE, ZERO) and not any(isinstance(x, Dyn) for x in a.atoms())}
    return all(i in transposed or walks_as_one(i, tile, vector) for i in d.indices())


def crossing(d: NestDraft, vector: Sym, t: CpuTuning) -> Sym:
    """The variable to go innermost if the reduced data is contiguous along different variables. Only a block of its
    points is walked before the other variables advance, so that cache lines read across are still in the cache then."""
    across = [v for v in d.inner if any(a.coefficient(v) is ONE for _, a, _ in d.accesses() if vector in a.symbols())]
    if len(across) < 2 or not all(v.size.is_const for v in across):
        return vector
    widest = widest_float(d.exprs())

    def block(v: Sym) -> int:
        return max((k for k in range(t.vector_least, t.transpose_side + 1) if v.size.const % k == 0),
                   key=lambda k: (not t.is_ragged(k, widest), k), default=0)

    best = max(across, key=lambda v: (block(v) > 0 and not t.is_ragged(block(v), widest), block(v)))
    side = block(best)
    if not side or t.is_ragged(side, widest) and best is not vector:
        return vector
    d.inner.remove(best)
    if side == best.size.const:
        d.inner.append(best)
        return best
    outside, inside = Sym(f"{best.name}o", best.size // side), Sym(f"{best.name}i", side)
    d.substitute({best: as_index(outside) * side + inside})
    d.inner = [outside, *d.inner, inside]
    return inside


def wrapped(d: NestDraft, vector: Sym, t: CpuTuning) -> Sym | None:
    """A variable to walk as one with a short vector variable, as the stores do; None if that does not pay. Otherwise a
    compiler computes the elements left over after whole vectors one by one, in each line. Data that is read in another
    order is brought into this one first."""
    if not (len(d.outer) > 1 and d.outer[-1] is vector and vector.size.is_const and cost_of(d.exprs()) >= t.flat_work):
        return None
    if not t.is_ragged(vector.size.const, widest_float(d.exprs())) or not all(map(d.is_plain, walk(*d.exprs()))):
        return None
    at = len(d.outer) - 1
    while at and all(walks_as_one(i, *d.outer[at - 1:at + 1]) for i in d.stores.values()):
        at -= 1
    if not d.outer[at:-1]:
        return None
    first, *others = d.outer[at:-1]
    for v in others:
        joint = Sym(f"{first.name}{v.name}", first.size * v.size)
        d.substitute({first: as_index(joint) // v.size, v: as_index(joint) % v.size})
        first = joint
    d.outer[at:-1] = [first]
    apart_bytes = sum(e.dtype.itemsize for e in {*loads(*d.exprs())} if not walks_as_one(e.attr[1][0], first, vector))
    return first if 2 * apart_bytes * vector.size.const <= t.shared_bytes else None


def shape_group(g: Group, buffers: dict[str, Buffer], stored: set[str], caps: Capabilities, typical: dict[Sym, int],
                exact: bool = False) -> tuple[LoopKernel, set[str]]:
    """The kernel of a group, and the buffers it stores beyond those asked for. `typical`: values of run-time sizes;
    `exact`: results must have the bits of separate passes."""
    d = draft_group(g, buffers, stored)
    has_axes = g.axes is not None
    if not g.axes or caps.programs > 1:  # else a reduction's rounding would depend on the sizes that came first
        d.typical = typical
    stage(d, has_axes)
    lists = [d.outer, d.inner]
    split_dims(d, lists, None if has_axes or not d.outer else long_lines(d, caps.tuning))
    # A segment's bounds are read before its lanes run, so they must be the same for all lanes.
    tied = set().union(*(e.symbols() for e in d.bounds)) if d.bounds else set()
    candidates = [*d.outer, *d.inner] if g.segment is None else [v for v in d.outer if v not in tied]
    t = caps.tuning
    vector = choose_vector(d, candidates, t) if candidates else None
    if vector in d.outer and not d.typical:  # the choice among kept variables does not affect rounding
        vector = choose_vector(replace(d, typical=typical), [v for v in candidates if v in d.outer], t)
    d.outer, d.inner = (order(vars, d, vector) for vars in (d.outer, d.inner))
    tile = choose_tile(d, d.outer, vector, t) if not has_axes else None
    if t.row_lines and tile is None:
        if vector in d.outer:
            vector = shortest_across(d, vector, candidates, t)
        d.outer, d.inner = (order(vars, d, vector, t) for vars in (d.outer, d.inner))
    if isinstance(t, CpuTuning) and vector in d.inner and d.bounds is None:
        vector = crossing(d, vector, t)
    last_outer = d.outer[-1] if d.outer else None
    before = list(d.outer)
    d.outer = merge(d.outer, d)
    if tile is not None:  # merged with the variables before it, it is still contiguous
        ends = volume(before[before.index(tile) + 1:])
        tile = next((v for k, v in enumerate(d.outer)
                     if volume(d.outer[k + 1:]) is ends), None)
    if g.segment is None:
        d.inner = merge(d.inner, d)
    if vector is not None and vector not in (*d.outer, *d.inner):
        vector = d.outer[-1] if vector is last_outer else d.inner[-1]
    if tile is not None and (tile not in d.outer or vector not in d.outer):
        tile = None
    if tile is None and not has_axes and vector is not None and isinstance(t, CpuTuning):
        tile = wrapped(d, vector, t)
    dtype_of = {n: dtype for i in d.items for n, dtype in zip(i.names, i.dtypes, strict=True)}
    row: int | None = None
    if d.inner and d.bounds is None and all(v.size.is_const for v in d.inner):
        length = int(volume(d.inner))
        if isinstance(t, PointTuning):
            row = length * points_beside(length, vector in d.inner, t)
        elif is_held(d, vector, length, buffers, t):
            row = length
    scratch, extra = bring_forward(d, row, caps, dtype_of)
    if extra:
        return shape_group(g, buffers, stored | extra, caps, typical, exact)[0], extra
    stages: dict[int, list[Item]] = {}
    for i in d.items:
        stages.setdefault(d.stage_of[i.names[0]], []).append(i)
    # Items that nothing reads any more, because they are computed again elsewhere, are dropped.
    ordered = alive([tuple(stages[t]) for t in sorted(stages)], d.stores)
    if caps.row_registers and not caps.holds(row or d.about(volume(d.inner), 1), read_words(d)) or \
            isinstance(t, BlockTuning) and not exact and (row is None or row > t.row):
        ordered = exponentials_at_once(ordered, d.stores)
    params = params_of(d.accesses(), buffers)
    sizes = sizes_of(d, params)
    kernel = LoopKernel(tuple(d.outer), tuple(d.inner), vector, tuple(ordered), tuple(d.stores.items()),
                        frozenset(scratch), params, sizes, d.bounds, tile,
                        tuple(dict.fromkeys(o for m in g.members for o in m.node.origins)),
                        typical=typical_sizes(sizes, d.typical))
    return kernel, extra


def is_held(d: NestDraft, vector: Sym | None, length: int, buffers: dict[str, Buffer], t: Tuning) -> bool:
    """Whether a worker's fast memory holds all the data that it reduces, as far as the loop form decides that."""
    if vector in d.inner:
        return isinstance(t, BlockTuning) or not is_shared(volume(d.outer), as_index(length), t)
    read = {e.attr[0] for e in loads(*d.exprs())}
    return held_columns(length, [buffers[n].dtype.itemsize for n in read], t) > 0


def params_of(accesses: Sequence[tuple[str, Index, bool]], buffers: dict[str, Buffer]) -> tuple[Param, ...]:
    """Pointer arguments in order of first use, so that the text does not depend on buffer names."""
    written = {n for n, _, s in accesses if s}
    anywhere = {n for n, a, _ in accesses if any(isinstance(x, Dyn) and x.hi is None for x in a.atoms())}
    return tuple(Param(n, buffers[n].dtype, n in written, reach=reach_of(buffers[n]) if n in anywhere else None)
                 for n in dict.fromkeys(n for n, _, _ in accesses))


def reach_of(b: Buffer) -> Index:
    """The number of elements of memory from a buffer's first to its last, inclusive."""
    return b.place([n - 1 for n in b.shape]) + 1


def sizes_of(d: NestDraft, params: Sequence[Param]) -> tuple[Sym, ...]:
    """The run-time sizes that the kernel needs."""
    loop = {*d.outer, *d.inner}
    free: set[Sym] = {s for p in params if p.reach is not None for s in p.reach.symbols()}
    for i in d.indices():
        free |= i.symbols()
    for v in loop:
        free |= v.size.symbols()
    for e in walk(*d.exprs()):
        if e.op == "fold":
            loop |= {v for v, _, _ in e.attr.loops}
            for v, _, _ in e.attr.loops:
                free |= v.extent.symbols() if v.extent is not None else frozenset()
    return tuple(sorted((s for s in free if s not in loop), key=lambda s: s.name))


def typical_sizes(sizes: Sequence[Sym], typical: Mapping[Sym, int]) -> tuple[tuple[Sym, int], ...]:
    return tuple((s, typical[s]) for s in sizes if s in typical)


# ---- scans and scatters ------------------------------------------------------------------------------------


def shape_scan(n: Scan, buffers: dict[str, Buffer], stored: set[str], caps: Capabilities, typical: dict[Sym, int]
               ) -> ScanKernel:
    ones = {v: ZERO for v in n.vars if v.size is ONE and v is not n.vars[n.axis]}
    axis = n.vars[n.axis]
    exprs = tuple(linear(e.subs(ones), buffers, lambda _: False) for e in n.inputs)
    at = tuple(ones.get(v, as_index(v)) for v in n.vars)
    stores = {name: buffers[name].place(at) for name in n.names if name in stored}
    outer = [v for v in n.vars if v is not axis and v.size is not ONE]
    d = NestDraft(outer, [axis], [Item(n.names, "full", exprs, n.combine)], stores)
    if caps.programs > 1:
        d.typical = typical
    split_dims(d, [d.outer])
    vector = choose_vector(d, [*d.outer, axis], caps.tuning)
    row = vector is axis or vector is None
    d.outer = order(d.outer, d, axis if row else vector, caps.tuning)
    last = d.outer[-1] if d.outer else None
    d.outer = merge(d.outer, d)
    if not row and vector not in d.outer:
        vector = d.outer[-1] if vector is last else None
        row = vector is None
    needed = n.combine.needed([e for name, e in zip(n.names, n.finish, strict=True) if name in stored])
    simple, expensive = len(n.combine.chained(needed)) == 1, cost_of(n.combine.result) > caps.tuning.expensive_combine
    side = caps.tuning.scan_side_by_side
    if row and d.outer and d.about(d.outer[-1].size, side) >= side and (simple or expensive):
        vector, row = d.outer[-1], False  # rows side by side: one row alone waits for each step of its own chain
    ordered = caps.deterministic and any(map(is_float, n.combine.dtypes))
    params = params_of(d.accesses(), buffers)
    sizes = sizes_of(d, params)
    return ScanKernel(tuple(d.outer), axis, None if row else vector, n.combine, d.items[0].exprs, n.finish, n.names,
                      tuple(sorted(d.stores.items())), n.reverse, params, sizes,
                      n.origins, ordered, typical=typical_sizes(sizes, d.typical))


def shape_scatter(n: Scatter, buffers: dict[str, Buffer], typical: dict[Sym, int]) -> ScatterKernel:
    out = n.names[0]
    ones = {v: ZERO for v in (*n.vars, *n.out_vars) if v.size is ONE}

    def fix(e: Expr) -> Expr:
        return linear(e.subs(ones), buffers, lambda _: False)

    init, value = fix(n.init), fix(n.value)
    mask = None if n.mask is None else fix(n.mask)
    mode = n.mode
    if is_empty(buffers[out]):  # its indices are checked, and there is nothing to write to
        mask, mode = const(False, torch.bool), "set"
    target = []
    for t in n.target:
        probe = fix(Expr("index", _INT64, (), t)) if not t.is_const else None
        target.append(t if probe is None else probe.attr if probe.op == "index" else as_index(probe.attr))
    if not is_empty(buffers[out]) and (there := has_elements(buffers[out], target)) is not None:
        mask = there if mask is None else mask & there
    vars = [v for v in n.vars if v.size is not ONE]
    out_vars = [v for v in n.out_vars if v.size is not ONE]
    where = [as_index(v) if v in out_vars else ZERO for v in n.out_vars]
    # Variables that are an index of the target by themselves: points with different values of them never meet.
    free = {v for t in target if isinstance(v := t.atom(), Sym) and v in vars} if not n.unique else set(vars)
    owner = owners = None
    for k, t in enumerate(target):
        a = t.atom()
        if a is not None and not isinstance(a, Sym) and n.out_vars[k].size is not ONE:
            owner, owners = t, n.out_vars[k].size
            break
    b = buffers[out]
    address = b.place(target)
    init_address = b.place(where)
    # The free variable that walks the target contiguously goes innermost.
    assert b.strides is not None
    for t, step in zip(target, b.strides, strict=True):
        v = t.atom()
        if step is ONE and isinstance(v, Sym) and v in free:
            vars.remove(v)
            vars.append(v)
            break
    out_vars.sort(key=lambda v: -distance(init_address.coefficient(v)))
    reads = [init, value, *(() if mask is None else (mask,)),
             *(Expr("index", _INT64, (), t) for t in target if any(isinstance(a, Dyn) for a in t.atoms()))]
    d = NestDraft(vars, out_vars, [Item((out,), "full", tuple(reads))], {out: address, out + "'": init_address})
    if owner is not None:
        d.stores[out + "''"] = owner
    d.outer = []
    for alike, run in groupby(vars, frozenset(free).__contains__):
        merged = merge(list(run), d)
        d.outer += merged
        free = free | set(merged) if alike else free
    d.inner = merge(out_vars, d)
    init, value, *rest = d.items[0].exprs
    mask = None if mask is None else rest[0]
    address, init_address, *owned = d.stores.values()
    params = params_of([a for a in d.accesses() if a[0] in buffers], buffers)
    sizes = sizes_of(d, params)
    return ScatterKernel(tuple(d.inner), None if n.covers else init, init_address, tuple(d.outer),
                         frozenset(free & set(d.outer)), address, owned[0] if owned else None, owners, value, mode,
                         mask, out, params, sizes, n.origins, n.unique, typical_sizes(sizes, typical))
