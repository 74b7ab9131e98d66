"""Merges kernels of the same form into one over a table: the same map or reduction of many tensors.

A map over dense memory does not depend on the memory's length or name. Without those, the kernels of an optimizer step
over two hundred parameters are one kernel, and those of as many norms are two: one for blocks of each tensor, and one
that combines the blocks' results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from flambeau.ir.expr import Expr, const, index_value, rewrite, walk
from flambeau.ir.index import ONE, WORD, ZERO, Index, Sym, as_index
from flambeau.ir.program import CHUNK, AnyKernel, Launch, LoopKernel, Param, Program, Step, TableKernel, exprs_of

from .memory import ProgramDraft, plan_memory

LENGTH = Sym("length")
PLACE = Sym("v", LENGTH)


@dataclass(frozen=True)
class Rows:
    """A launch as a row of a table: the kernel that it shares with others, its pointers, numbers and length."""

    kernel: TableKernel
    args: tuple[str, ...]
    numbers: tuple[Sym, ...]
    length: Index


def as_row(k: AnyKernel, args: Sequence[str]) -> Rows | None:
    """A launch in the form that it shares with others; None unless it is a map or a reduction of whole tensors."""
    if not isinstance(k, LoopKernel) or k.bounds is not None or k.scratch or len(k.outer) > 1 or len(k.inner) > 1:
        return None
    k, length, own = whole_pieces(k) if k.outer and k.inner else (k, *row_of(k))
    if (k.inner and not reduces_at_once(k, length)) or not is_plain(k, own):
        return None
    mapping = dict.fromkeys(k.outer, ZERO) | dict.fromkeys(k.inner or k.outer, as_index(PLACE))
    # In the order of use, because the order by name may differ between launches.
    numbers = tuple(dict.fromkeys(s for e in walk(*exprs_of(k.items)) if e.op == "index" for s in e.symbols()))
    own_numbers = tuple(Sym(f"{WORD}{at}", lo=None) for at in range(len(numbers)))
    mapping |= {s: as_index(mine) for s, mine in zip(numbers, own_numbers)}
    # A buffer that is updated in place is one pointer here, because all its reads come before the write.
    columns = tuple(dict.fromkeys(args))
    names = {p.name: f"r{columns.index(a)}" for p, a in zip(k.params, args, strict=True)}
    written = {names[p.name] for p in k.params if p.written}
    dtypes = {names[p.name]: p.dtype for p in k.params}
    for i in k.items:
        for name in i.names:
            names.setdefault(name, f"t{len(names)}")

    def rename(e: Expr) -> Expr:
        if e.op == "load":
            return Expr("load", e.dtype, e.args, (names[e.attr[0]], e.attr[1]))
        return Expr("local", e.dtype, (), names[e.attr]) if e.op == "local" else e

    memo: dict[Expr, Expr] = {}
    stages = tuple(tuple(replace(i, names=tuple(names[n] for n in i.names),
                                 exprs=tuple(rewrite(e, rename, mapping, memo) for e in i.exprs))
                         for i in items) for items in k.stages)
    vars = (PLACE,) if k.outer or k.inner else ()
    body = LoopKernel(
        outer=() if k.inner else vars, inner=vars if k.inner else (), vector=PLACE if vars else None, stages=stages,
        stores=tuple((names[name], at.subs(mapping)) for name, at in k.stores), scratch=frozenset(),
        params=tuple(Param(r, dtypes[r], r in written) for r in (f"r{at}" for at in range(len(columns)))),
        sizes=own_numbers)
    return Rows(TableKernel(body), columns, numbers, length)


def row_of(k: LoopKernel) -> tuple[Index, Index | None]:
    """The number of points of a kernel with at most one variable, and the point's index."""
    for v in (*k.outer, *k.inner):
        return v.size, as_index(v)
    return ONE, None


def whole_pieces(k: LoopKernel) -> tuple[LoopKernel, Index, Index | None]:
    """A reduction that was split into blocks, as one over the whole row; it no longer needs to check the row's end."""
    (piece,), (v,) = k.outer, k.inner
    own, length = as_index(piece) * CHUNK + v, piece.size * CHUNK
    first = k.stages[0][0].exprs[0]
    if first.op == "where" and first.args[0].op == "lt" and first.args[0].args[1].op == "const":
        size = first.args[0].args[1].attr
        there = index_value(own) < const(size, torch.int64)

        def known(e: Expr) -> Expr:
            if e.op == "where" and e.args[0] is there:
                return e.args[1]
            return Expr("load", e.dtype, (), e.attr) if e.op == "load" and e.args == (there,) else e

        stages = tuple(tuple(replace(i, exprs=tuple(rewrite(e, known) for e in i.exprs)) for i in items)
                       for items in k.stages)
        k, length = replace(k, stages=stages), as_index(size)
    return k, length, own if v.size is as_index(CHUNK) else None


def reduces_at_once(k: LoopKernel, length: Index) -> bool:
    """Whether one block holds the whole reduction, passes over it once, and then only has single values left."""
    first, *rest = k.stages
    whole = length.is_const and length.const > 0 and (bool(k.outer) or length.const <= CHUNK)
    return whole and all(i.level == "full" for i in first) and all(
        i.level == "outer" and i.combine is None for items in rest for i in items)


def is_plain(k: LoopKernel, own: Index | None) -> bool:
    """Whether it accesses every tensor at its own point or at one fixed place, and computes with no index except
    run-time numbers."""
    result = as_index(k.outer[0]) if k.outer and k.inner else None  # the place of a block's result
    made = dict(k.stores)
    places: dict[str, Index] = {}
    for name, at in k.accesses():
        if not (at is own or at.is_const or (at is result and name in made)) or places.setdefault(name, at) is not at:
            return False
    everything, numbers = walk(*exprs_of(k.items)), {index_value(s) for s in k.sizes}
    return all(e.op == "load" or e in numbers or (e.op not in ("check", "require", "fold") and not e.own_indices())
               for e in everything)


# ---- launches of a program -------------------------------------------------------------------------------


def join_launches(p: ProgramDraft, fewest: int) -> None:
    """Merge launches of one form that are independent of each other, if there are at least `fewest`. Nothing moves
    across a call."""
    rows = {id(s): as_row(p.kernels[s.kernel], s.args) for s in p.steps if isinstance(s, Launch)}
    places: dict[TableKernel, int] = {}
    steps: list[Step] = []
    segment: list[Launch] = []
    for s in (*p.steps, None):
        if isinstance(s, Launch):
            segment.append(s)
            continue
        steps += _joined(p, segment, rows, places, fewest)
        segment = []
        if s is not None:
            steps.append(s)
    p.steps = steps


def _joined(p: ProgramDraft, segment: list[Launch], rows: dict[int, Rows | None], places: dict[TableKernel, int],
            fewest: int) -> list[Step]:
    """The launches between two calls, merged where possible and sorted by the number of launches they depend on."""
    groups: dict[tuple[int, TableKernel, tuple[Sym, ...]], list[Launch]] = {}
    ranks = ranks_of(p, segment)
    for s, rank in zip(segment, ranks, strict=True):
        row = rows[id(s)]
        if row is not None and row.length.is_const:
            groups.setdefault((rank, row.kernel, row.numbers), []).append(s)
    # A tensor of one element counts as one of length one.
    for rank, kernel, numbers in [key for key in groups if key[1].body.outer]:
        groups[rank, kernel, numbers] += groups.pop((rank, at_one_place(kernel), numbers), [])
    groups = {key: found for key, found in groups.items() if len(found) >= fewest}
    if not groups:
        return list(segment)
    taken = {id(s) for found in groups.values() for s in found}
    ordered: list[tuple[int, Step]] = [(rank, s) for s, rank in zip(segment, ranks, strict=True) if id(s) not in taken]
    for (rank, kernel, numbers), found in groups.items():
        if kernel not in places:
            places[kernel] = len(p.kernels)
            p.kernels.append(kernel)
        mine = [row for s in found if (row := rows[id(s)]) is not None]
        args = tuple(a for column in zip(*(row.args for row in mine), strict=True) for a in column)
        origins = tuple(dict.fromkeys(o for s in found for o in s.origins))
        lengths = tuple(row.length.const for row in mine)
        ordered.append((rank, Launch(places[kernel], args, origins, lengths, numbers)))
    return [s for _, s in sorted(ordered, key=lambda rs: rs[0])]


def at_one_place(k: TableKernel) -> TableKernel:
    """The form that the kernel has for tensors of one element."""
    return TableKernel(replace(k.body.rewritten(lambda x: x, {PLACE: ZERO}), outer=(), vector=None))


def ranks_of(p: ProgramDraft, segment: list[Launch]) -> list[int]:
    """For each launch, the length of the longest chain of launches in the segment that must precede it."""
    written: dict[str, int] = {}  # by buffer: rank of the last launch that writes it, and of the last that reads it
    read: dict[str, int] = {}
    ranks = []
    for s in segment:
        params = p.kernels[s.kernel].params
        writes = {a for a, x in zip(s.args, params, strict=True) if x.written}
        rank = max((written.get(a, -1) for a in s.args), default=-1)
        rank = 1 + max((rank, *(read.get(a, -1) for a in writes)))
        ranks.append(rank)
        for a in s.args:
            read[a] = max(read.get(a, -1), rank)
        for a in writes:
            written[a] = max(written.get(a, -1), rank)
    return ranks


# ---- lists of tensors ------------------------------------------------------------------------------------


def along_lists(p: Program, launches: Sequence[Rows], lists: Collection[str], lengths: Sequence[int]) -> Program:
    """Extend the program of one row to rows of these lengths, for some of its launches. Inputs in `lists` become lists
    of tensors, other inputs are read by all rows; an intermediate between launches has one element per row."""
    draft = ProgramDraft([row.kernel for row in launches], [], [])
    for k, row in enumerate(launches):
        own = tuple(lengths) if row.kernel.body.outer else (1,) * len(lengths)
        if any(own):
            draft.steps.append(Launch(k, row.args, lengths=own, numbers=row.numbers))
    for b in p.buffers:
        if any(b.name in row.args for row in launches):
            between = replace(b, shape=(as_index(len(lengths)),), strides=(ONE,), place="arena")
            given = replace(b, place="list") if b.name in lists else b
            draft.buffers[b.name] = given if b.place == "input" else between
    plan_memory(draft)
    numbers = tuple((s, h) for s, h in p.numbers if h.needs.isdisjoint(p.inputs))
    return draft.finished(replace(p, numbers=numbers))
