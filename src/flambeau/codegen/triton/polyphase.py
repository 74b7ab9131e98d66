"""Phases: one point of a map computes several adjacent elements, which share their loads.

Which windows of stride 2 contain a position depends on whether it is even or odd. Written out for both cases, the test
disappears, and the two share loads: in the gradient of a 3x3x3 pooling eight elements need eight windows, where each
alone would look at eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as points_of

from flambeau.ir.expr import CHECKED, Expr, index_value, load, rewrite, walk
from flambeau.ir.index import ONE, ZERO, Dyn, Index, Sym, as_index
from flambeau.ir.program import Item, LoopKernel
from flambeau.ir.tuning import BLOCKS

from ..writer import Writer
from .blocks import power

Limits = dict[Sym, Expr]  # phase variable -> condition under which its element exists


@dataclass(frozen=True)
class Phases:
    kernel: LoopKernel  # without the variables that were written out; each element has names of its own
    buffers: dict[str, str]  # name of an element's value -> buffer it is stored in
    holds: dict[str, Expr]  # conditions for the stores of elements
    joined: tuple[tuple[str, ...], ...]  # elements that are adjacent in memory
    neighbours: bool = False  # these are not phases, but neighbouring windows
    rows: bool = False  # these are not phases, but the rows of a reduction


def written_out(k: LoopKernel) -> Phases | None:
    """Returns the kernel with its phases written out, or None if it has none."""
    exprs = k.everything()
    if k.inner or k.tile is not None or any(e.op == "fold" for e in walk(*exprs)):
        return None
    limits: Limits = {}
    checked = any(e.op in CHECKED for e in walk(*exprs))
    for v, n in sorted(set(divided(k)), key=lambda vn: (-k.outer.index(vn[0]), vn[1])):
        if v not in k.outer:
            continue
        split, low, limit = halved(k, v, n)
        more = limits if limit is None else {**limits, low: limit}
        if {low, *more}.issubset(phase_variables(split)) and not (more and checked):
            k, limits = split, more
    chosen = phase_variables(k)
    if chosen or BLOCKS.neighbours == 1 or checked:
        return unrolled(k, chosen, limits) if chosen else None
    k, chosen, limits = side_by_side(k)
    return replace(unrolled(k, chosen, limits), neighbours=True) if chosen else None


def side_by_side(k: LoopKernel) -> tuple[LoopKernel, list[Sym], Limits]:
    """Splits variables of neighbouring windows, which share most of their loads and so have more of them in flight."""
    lows: list[Sym] = []
    limits: Limits = {}
    near = [v for v in overlapping(k.everything(), k.outer) if v is not k.outer[-1]]
    most = BLOCKS.neighbours
    for v, n in [(v, most) for v in near] if len(near) == 1 else [(v, 2) for v in near[::-1][:most // 2]]:
        if v.size.const > n:
            k, low, limit = halved(k, v, n)
            lows.append(low)
            limits |= {} if limit is None else {low: limit}
    return k, lows, limits


def spelled(k: LoopKernel) -> LoopKernel:
    """Writes out the steps of windows of constant size, so that their loads become visible."""
    done: dict[object, tuple[Expr, ...]] = {}

    def put(e: Expr) -> Expr:
        if e.op != "fold" or e.attr.steps > BLOCKS.unroll:
            return e
        n = len(e.attr.carries)
        key = (e.args, e.attr.loops)
        if key not in done:
            done[key] = Writer._unroll(e.attr, e.args[:n], e.args[n:])
        which: int = e.attr.which
        return done[key][which]

    return k.rewritten(put)


def divided(k: LoopKernel) -> Iterator[tuple[Sym, int]]:
    """Yields variables that some index divides by a small number, each with that number."""
    for e in walk(*k.everything()):
        yield from ((v, n) for i in e.own_indices() for v, n in i.divisions()
                    if v in k.outer and n <= BLOCKS.phase_values)


def halved(k: LoopKernel, v: Sym, n: int) -> tuple[LoopKernel, Sym, Expr | None]:
    """Replaces v by n * high + low; also returns low, and the condition for being inside if n does not divide the
    size."""
    size = v.size.const
    high, low = Sym(f"{v.name}o", -(-size // n)), Sym(f"{v.name}i", n)
    both = as_index(high) * n + low
    at = k.outer.index(v)
    new = replace(k.rewritten(lambda x: x, {v: both}), outer=(*k.outer[:at], high, low, *k.outer[at + 1:]),
                  vector=high if k.vector is v else k.vector)
    return new, low, None if size % n == 0 else index_value(both) < size


def phase_variables(k: LoopKernel) -> list[Sym]:
    """Small variables that most loads do not depend on: all or nearly all loads are the same for each of their
    values."""
    outer = frozenset(k.outer)
    reads = {e.attr[1][0] for e in walk(*k.everything()) if e.op == "load"}
    followed = [a for a in reads if not outer.isdisjoint(a.symbols())]
    chosen: list[Sym] = []
    count = 1
    for v in reversed(k.outer):
        if not v.size.is_const or not 1 < v.size.const <= BLOCKS.phase_values or count * v.size.const > BLOCKS.phases:
            continue
        beside = any(a.coefficient(v) is ONE for _, a in k.stores)
        if beside and v.size.const == 3 and len(followed) <= BLOCKS.phase_reads:
            continue  # three adjacent results are three accesses, which cost more than the loads
        shared = sum(not follows(a, v) for a in followed)
        if shared and shared >= 4 * (len(followed) - shared):
            chosen.append(v)
            count *= v.size.const
    return chosen if len(chosen) < len(k.outer) else []


def follows(address: Index, v: Sym) -> bool:
    """Whether an address moves with v at every step, or depends on v only through data."""
    c = address.coefficient(v)
    if c is not None:
        return c is not ZERO
    return any(isinstance(a, Dyn) and v in a.symbols() for a in address.atoms())


def unrolled(k: LoopKernel, chosen: list[Sym], limits: Limits) -> Phases:
    vars = [v for v in k.outer if v in chosen]
    addresses = dict(k.stores)
    versions: dict[Expr, list[frozenset[Sym]]] = {}
    items: list[Item] = []
    stores: list[tuple[str, Index]] = []
    buffers: dict[str, str] = {}
    holds: dict[str, Expr] = {}
    groups: dict[tuple[object, ...], list[str]] = {}
    for values in points_of(*(range(v.size.const) for v in vars)):
        point = {v: as_index(n) for v, n in zip(vars, values, strict=True)}
        # The first of the elements exists wherever the point does.
        bound = frozenset(v for v in limits if values[vars.index(v)])
        memo: dict[Expr, Expr] = {}

        def of(name: str, values: tuple[int, ...] = values) -> str:
            return f"{name}@{'.'.join(map(str, values))}"

        def put(e: Expr, bound: frozenset[Sym] = bound, point: dict[Sym, Index] = point) -> Expr:
            if e.op == "local":
                return Expr("local", e.dtype, (), of(e.attr))
            if e.op != "load" or not limits:
                return e
            # A load is executed only if its element exists, or another one that reads the same.
            known = versions.setdefault(e, [])
            need = next((s for s in known if s <= bound), None)
            if need is None:
                known.append(need := bound)
            for v in sorted(need, key=lambda v: v.name):
                limit = rewrite(limits[v], lambda x: x, point)
                e = load(e.attr[0], e.attr[1], e.dtype, e.args[0] & limit if e.args else limit)
            return e

        for i in k.items:
            items.append(Item(tuple(map(of, i.names)), i.level,
                              tuple(rewrite(rewrite(e, lambda x: x, point), put, None, memo) for e in i.exprs),
                              i.combine))
            for name in (n for n in i.names if n in addresses):
                address = addresses[name].subs(point)
                stores.append((of(name), address))
                buffers[of(name)] = name
                # a fixed order, or every process would write a different text
                for v in sorted(bound, key=lambda v: v.name):
                    limit = rewrite(limits[v], lambda x: x, point)
                    holds[of(name)] = holds[of(name)] & limit if of(name) in holds else limit
                beside = next((v for v in vars if v not in limits and addresses[name].coefficient(v) is ONE
                               and v.size.const in (2, 4)), None)
                key = (name, *(n for v, n in zip(vars, values, strict=True) if v is not beside))
                groups.setdefault(key, []).append(of(name))
    left = tuple(v for v in k.outer if v not in chosen)
    new = replace(k, outer=left, stages=(tuple(items),), stores=tuple(stores),
                  vector=k.vector if k.vector in left else left[-1])
    return Phases(new, buffers, holds, tuple(tuple(g) for g in groups.values()))


# ---- the tile of a window --------------------------------------------------------------------------------


def overlapping(exprs: Iterable[Expr], vars: Sequence[Sym]) -> list[Sym]:
    """Variables along which neighbouring points read some of the same elements, as the windows of a pooling do."""
    read: dict[str, set[Index]] = {}
    for e in walk(*exprs):
        if e.op == "load":
            read.setdefault(e.attr[0], set()).add(e.attr[1][0])
    middle = {v: as_index(v.size.const // 2) for v in vars if v.size.is_const}
    out = []
    for v in middle:
        beside = {**middle, v: middle[v] + 1}
        for addresses in read.values():
            here, there = ({a.subs(at) for a in addresses} for at in (middle, beside))
            if len(addresses) > 2 and here != there and here & there:
                out.append(v)
                break
    return out


def compact(vars: Sequence[Sym], near: Sequence[Sym], room: int) -> dict[Sym, int]:
    """Returns a compact tile, long in no direction: elements that neighbours share are read once if one program has
    both."""
    last = vars[-1]
    most = {v: power(v.size.const) for v in vars if v.size.is_const}
    out = {last: min(BLOCKS.warp_line, room, most.get(last, BLOCKS.warp_line))}
    room //= out[last]
    growing = [v for v in reversed(near) if v is not last]
    while room > 1 and growing:
        v = growing.pop(0)
        if out.get(v, 1) < most[v]:
            out[v] = out.get(v, 1) * 2
            room //= 2
            growing.append(v)
    if room > 1 and out[last] < most.get(last, room):
        out[last] *= min(room, most.get(last, room) // out[last])
    for v in reversed(vars):
        if room > 1 and v not in out:
            out[v] = min(room, most.get(v, room))
            room //= out[v]
    return {v: out[v] for v in vars if out.get(v, 1) > 1}

