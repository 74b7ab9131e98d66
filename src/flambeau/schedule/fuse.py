"""Horizontal and reduction fusion: nodes over the same points become one kernel.

A group has a full domain and, once a reduction has joined, a set of reduced axes; what is left are its outer points.
Members compute at every full point or once per outer point. A node joins if it is over the same points (up to a
regrouping of dimensions) and reads the group's results only at its own point, so that values are passed in registers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from flambeau.ir.expr import Expr, loads, walk
from flambeau.ir.index import ONE, ZERO, Index, Sym, as_index, volume
from flambeau.ir.nodes import Contract, Graph, Node, Partial, Pointwise, Reduce, Segment

from .streams.needs import Needs

MOST_MEMBERS = 48
MOST_BUFFERS = 48
MOST_NEAR = 64  # groups examined for each buffer that they share with a node
SMALL = 1 << 14  # points of a reduction that costs nothing extra in the kernel of another

Mapping = dict[Sym, Index]


@dataclass
class Member:
    node: Node
    level: str  # "full" or "outer"
    mapping: Mapping


@dataclass
class Group:
    position: int
    fine: tuple[Index, ...]  # sizes of the full domain, no ones
    axes: frozenset[int] | None = None
    members: list[Member] = field(default_factory=list)
    written: dict[str, tuple[tuple[Index, ...], str]] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    segment: Segment | None = None

    @property
    def vars(self) -> tuple[Sym, ...]:
        return tuple(Sym(f"g{i}", n) for i, n in enumerate(self.fine))

    @property
    def nodes(self) -> list[Node]:
        return [m.node for m in self.members]

    @property
    def is_contract(self) -> bool:
        return bool(self.members) and isinstance(self.members[0].node, Contract)


@dataclass
class Single:
    """A node that becomes a separate kernel or call."""

    position: int
    node: Node

    @property
    def nodes(self) -> list[Node]:
        return [self.node]


def fuse(graph: Graph) -> list[Group | Single]:
    """The groups of a graph, in an order that respects every dependency."""
    groups: list[Group | Single] = []
    home: dict[str, int] = {}  # buffer -> position of the group that computes it
    sizes = {name: b.numel for name, b in graph.buffers.items()}
    needs = Needs(graph)
    near: dict[str, list[int]] = {}  # buffer -> positions of the groups that read or write it
    for n in graph.nodes:
        reads = n.reads()
        first = max((home[r] for r in needs.of(n) if r in home), default=-1)
        place = None
        if isinstance(n, (Pointwise, Reduce)) and not isinstance(n, Contract):
            # Of the many groups that read a common value, such as a learning rate, only the latest are candidates.
            known = {q for r in reads for q in (*near.get(r, ())[-MOST_NEAR:], home.get(r, -1)) if q >= max(first, 0)}
            beside = {q for r in reads if r in home for m in groups[home[r]].nodes for name in m.names
                      for q in near[name][-MOST_NEAR:] if q >= max(first, 0)} if is_small(n.vars, n) else set()
            place = _find(groups, n, reads, sorted(known | beside), sizes, beside)
        if place is None and isinstance(n, Partial):
            n = n.plain
            reads = n.reads()
        if place is None:
            if isinstance(n, (Pointwise, Reduce)):
                g = Group(len(groups), tuple(v.size for v in n.vars if v.size is not ONE))
                joined = _join(g, n)
                assert joined is not None, f"a node must fit its own group: {n}"
                _commit(g, n, reads, joined)
                groups.append(g)
            else:
                groups.append(Single(len(groups), n))
            place = len(groups) - 1
        for name in n.names:
            home[name] = place
        for name in (*reads, *n.names):
            if not (there := near.setdefault(name, [])) or there[-1] != place:
                there.append(place)
    return groups


def is_small(vars: Iterable[Sym], n: Node) -> bool:
    """Whether n is a reduction that takes longer to launch than to compute."""
    points = volume(vars)
    return isinstance(n, Reduce) and points.is_const and points.const <= SMALL


def _find(groups: list[Group | Single], n: Node, reads: set[str], where: list[int], sizes: dict[str, Index],
          beside: set[int]) -> int | None:
    """Add n to the best of the groups at `where` and return its position; None if it can join none. `beside`: groups
    that read results of a group that n reads from too; a small reduction costs nothing extra there, even if it shares
    no buffer with them."""
    best: tuple[int, int, bool] | None = None
    chosen = None
    for position in where:
        g = groups[position]
        if not isinstance(g, Group) or len(g.members) >= MOST_MEMBERS:
            continue
        shared = (reads & g.reads) | (reads & g.written.keys())
        if not (shared or position in beside) or len(g.reads | reads) + len(g.written) > MOST_BUFFERS:
            continue
        joined = _join(g, n)
        if joined is None:
            continue
        if joined.fine != g.fine:
            shared &= _read_together(g, n, joined)
        # Prefer the group that writes most of what n reads, then the one that shares most of its reads; then maps with
        # maps and reductions with reductions; later groups on ties.
        score = (sum(_weight(sizes[r]) for r in reads & g.written.keys()), sum(_weight(sizes[r]) for r in shared),
                 isinstance(n, Reduce) == (g.axes is not None))
        if not any(score[:2]) and not (position in beside and g.axes is not None and is_small(g.vars, n)):
            continue
        if best is None or score >= best:
            best, chosen = score, (position, joined)
    if chosen is None:
        return None
    position, joined = chosen
    g = groups[position]
    assert isinstance(g, Group)
    _commit(g, n, reads, joined)
    return position


def _read_together(g: Group, n: Node, j: Joined) -> set[str]:
    """The buffers that the group writes, or that both read at the same address at each point. After the domain was
    regrouped for both, points with the same number may be far apart in memory."""
    def places(exprs: Iterable[Expr], mapping: Mapping) -> set[tuple[str, tuple[Index, ...]]]:
        return {(e.attr[0], tuple(i.subs(mapping) for i in e.attr[1])) for e in loads(*exprs)}

    regroup = _regrouping(g, j.fine)
    theirs = set(g.written)
    mine = places(n.exprs(), j.mapping)
    for m in g.members:
        theirs |= {name for name, _ in mine & places(member_exprs(m), regroup)}
    return theirs


def has_windows(n: Node) -> bool:
    """Whether a map reads windows. Its neighbouring points share reads in the tiles of its own loop form, which the row
    of a reduction does not have."""
    return isinstance(n, Pointwise) and has_fold(n.body)


@lru_cache(1024)
def has_fold(body: Expr) -> bool:
    return any(e.op == "fold" for e in walk(body))


def _weight(size: Index) -> int:
    return size.const if size.is_const else 1 << 20


# ---- matching domains ----------------------------------------------------------------------------------


def refine(a: tuple[Index, ...], b: tuple[Index, ...]) -> tuple[Index, ...] | None:
    """The coarsest sizes of which both a and b are groupings; None if there are none."""
    if a == b:
        return a
    if not all(x.is_const for x in (*a, *b)):
        return None
    cuts = set()
    totals = []
    for sizes in (a, b):
        n = 1
        for s in reversed(sizes):
            cuts.add(n)
            n *= s.const
        totals.append(n)
    if totals[0] != totals[1] or totals[0] == 0:
        return None
    edges = [*sorted(cuts), totals[0]]
    out = []
    for small, big in zip(edges, edges[1:], strict=False):
        if big % small:
            return None
        if big != small:
            out.append(as_index(big // small))
    return tuple(reversed(out))


def positions(sizes: tuple[Index, ...], fine: tuple[Index, ...]) -> list[list[int]] | None:
    """For each size, the consecutive fine dimensions whose product it is; None if the sizes do not match."""
    out: list[list[int]] = []
    at = 0
    for n in sizes:
        taken: list[int] = []
        have = ONE
        while have is not n:
            if at >= len(fine):
                return None
            have = have * fine[at]
            taken.append(at)
            at += 1
            if have.is_const and n.is_const and have.const > n.const:
                return None
        out.append(taken)
    return out if at == len(fine) else None


@dataclass
class Joined:
    fine: tuple[Index, ...]
    axes: frozenset[int] | None
    level: str
    mapping: Mapping


def _map(sizes: tuple[Index, ...], vars: list[Sym], fine: tuple[Index, ...], targets: list[int],
         ) -> Mapping | None:
    """Variables of these sizes as indices over the group variables at `targets`."""
    where = positions(sizes, tuple(fine[t] for t in targets))
    if where is None:
        return None
    out: Mapping = {}
    for v, spots in zip(vars, where, strict=True):
        at = ZERO
        for s in spots:
            t = targets[s]
            at = at * fine[t] + Sym(f"g{t}", fine[t])
        out[v] = at
    return out


def _join(g: Group, n: Node) -> Joined | None:
    """How n would join the group, or None. Changes nothing yet."""
    assert isinstance(n, (Pointwise, Reduce))
    if (g.segment is not None or g.is_contract) and not isinstance(n, (Pointwise, Partial)) \
            or isinstance(n, Partial) and not g.is_contract:
        return None
    if any(map(has_windows, g.nodes)) if isinstance(n, Reduce) else g.axes is not None and has_windows(n):
        return None
    real = [v for v in n.vars if v.size is not ONE]
    sizes = tuple(v.size for v in real)
    if isinstance(n, Segment):
        if g.members:
            return None
        return _try(g, n, real, sizes, g.fine, frozenset(real.index(v) for v in n.reduced if v in real), "full")
    if isinstance(n, Reduce) and not isinstance(n, Partial):
        fine = refine(g.fine, sizes)
        if fine is None:
            return None
        where = positions(sizes, fine)
        assert where is not None
        axes = frozenset(p for v, spots in zip(real, where, strict=True) if v in n.reduced for p in spots)
        old = _refined_axes(g, fine)
        if old is not None and old != axes:
            return None
        return _try(g, n, real, sizes, fine, axes, "full")
    if g.is_contract:
        fine = _refined_outside(g, sizes)
        return _try(g, n, real, sizes, fine, _refined_axes(g, fine), "outer")
    fine = refine(g.fine, sizes)
    if fine is not None and g.segment is None:
        return _try(g, n, real, sizes, fine, _refined_axes(g, fine), "full")
    if g.axes is not None:
        return _try(g, n, real, sizes, g.fine, g.axes, "outer")
    return None


def _refined_outside(g: Group, sizes: tuple[Index, ...]) -> tuple[Index, ...]:
    """The group's sizes, with its kept dimensions (which come first) regrouped to match these sizes, if possible."""
    assert g.axes is not None
    kept = len(g.fine) - len(g.axes)
    outside = refine(g.fine[:kept], sizes)
    return g.fine if outside is None else (*outside, *g.fine[kept:])


def _refined_axes(g: Group, fine: tuple[Index, ...]) -> frozenset[int] | None:
    if g.axes is None:
        return None
    where = positions(g.fine, fine)
    assert where is not None
    return frozenset(p for k, spots in enumerate(where) if k in g.axes for p in spots)


def _try(g: Group, n: Node, real: list[Sym], sizes: tuple[Index, ...], fine: tuple[Index, ...],
         axes: frozenset[int] | None, level: str) -> Joined | None:
    targets = list(range(len(fine)))
    if level == "outer":
        assert axes is not None
        targets = [t for t in targets if t not in axes]
    mapping = _map(sizes, real, fine, targets)
    if mapping is None:
        return None
    written = g.written if fine == g.fine else _rewritten(g, fine)
    own = frozenset(mapping)
    for e in loads(*n.exprs()):
        if e.attr[0] not in written:
            continue
        expected, made_at = written[e.attr[0]]
        if made_at == "full" and level == "outer":
            return None
        at = tuple(i.subs(mapping) for i in e.attr[1])
        if at != expected or not frozenset().union(*(i.symbols() for i in e.attr[1])) <= own:
            return None
    return Joined(fine, axes, level, mapping)


def _regrouping(g: Group, fine: tuple[Index, ...]) -> Mapping:
    """The group's variables as indices over those of a finer domain."""
    mapping = _map(g.fine, list(g.vars), fine, list(range(len(fine))))
    assert mapping is not None
    return mapping


def _rewritten(g: Group, fine: tuple[Index, ...]) -> dict[str, tuple[tuple[Index, ...], str]]:
    """The places that the group writes, in the variables of a finer domain."""
    mapping = _regrouping(g, fine)
    return {name: (tuple(i.subs(mapping) for i in at), level) for name, (at, level) in g.written.items()}


def _commit(g: Group, n: Node, reads: set[str], j: Joined) -> None:
    if j.fine != g.fine:
        g.written = _rewritten(g, j.fine)
        regroup = _regrouping(g, j.fine)
        for m in g.members:
            m.mapping = {v: i.subs(regroup) for v, i in m.mapping.items()}
        g.fine = j.fine
    g.axes = j.axes
    g.members.append(Member(n, j.level, j.mapping))
    g.reads |= reads
    if isinstance(n, Segment):
        g.segment = n
    kept = n.kept if isinstance(n, Reduce) and not isinstance(n, Partial) else n.vars  # type: ignore[attr-defined]
    slots = n.reduced if isinstance(n, Partial) else ()
    at = tuple(ZERO if v.size is ONE or v in slots else j.mapping[v] for v in kept)
    level = "outer" if isinstance(n, Reduce) else j.level
    for name in n.names:
        g.written[name] = (at, level)


def reads_elsewhere(groups: list[Group | Single], graph_reads: set[str]) -> dict[str, set[int]]:
    """The positions of the groups that read each buffer from another group; -1 for buffers in `graph_reads`."""
    made: dict[str, int] = {}
    out: dict[str, set[int]] = {name: {-1} for name in graph_reads}
    for g in groups:
        for n in g.nodes:
            for name in n.names:
                made[name] = g.position
    for g in groups:
        for n in g.nodes:
            for r in n.reads():
                if made.get(r) != g.position:
                    out.setdefault(r, set()).add(g.position)
    return out


def member_exprs(m: Member) -> tuple[Expr, ...]:
    """The member's expressions in the group's variables."""
    n = m.node
    assert isinstance(n, (Pointwise, Reduce))
    exprs = n.inputs if isinstance(n, Reduce) else (n.body,)
    ones = {v: ZERO for v in n.vars if v.size is ONE}
    return tuple(e.subs({**ones, **m.mapping}) for e in exprs)
