"""Vertical fusion: inserts the body of a pointwise node into its consumers.

A producer is inlined where that costs nothing: its only consumer reads each element once, or it is so cheap that
computing it again beats a trip through memory (the limit differs between machines). Values that must be in memory
anyway (outputs, arguments of externs) are read from there, unless they are computed without reading anything. Every
decision to keep a value in memory leaves a note.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import torch

from flambeau.ir.attention import Attention
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import OPS, SIMPLE, Expr, cost_of, held, index_children, loads, masked, rewrite, walk
from flambeau.ir.index import ONE, Index, Op, Sym, about, as_index, volume
from flambeau.ir.nodes import Contract, Extern, Graph, Node, Pointwise, Reduce, Scan, Scatter, Segment, Value
from flambeau.ir.tuning import Tuning

from .rewrites.one_hot import picked
from .streams.needs import Needs

LARGEST = 600  # expressions in one body: beyond this compilers slow down more than fusion brings
DEEPEST = 120  # operations in a chain: expressions are walked by recursion
MOST_READS = 24
COMPARED = "compared: another kernel might compute it with other last bits"
SAMPLED = 64  # a value has at least this many points for each one that is computed again
EXACT = frozenset(("div", "sqrt", "floor", "ceil", "trunc", "round", "fmod", "copysign", "fmin", "fmax", "bitcast"))


@dataclass
class Body:
    node: Pointwise
    expr: Expr
    cost: int
    reads: int
    size: int
    depth: int
    divisions: int  # in its indices: loops with them do not vectorise
    points: int


def prune(graph: Graph) -> None:
    """Drop the nodes that no output, mutation or kept node needs."""
    needs = Needs(graph)
    needed = needs.of_results([*graph.outputs, *(v for _, v in graph.mutations)]) | {n for n, _ in graph.mutations}
    kept: list[Node] = []
    for n in reversed(graph.nodes):
        effect = isinstance(n, Extern) and has_effect(n)
        if effect or any(name in needed for name in n.names):
            kept.append(n)
            needed |= needs.of(n)
    graph.nodes = kept[::-1]


def has_effect(n: Extern) -> bool:
    """Whether an operator must run even if nothing reads its result."""
    schema = getattr(n.target, "_schema", None)
    if schema is None:
        return True
    return n.effect or bool(schema.is_mutable) or not n.names


def materialised(graph: Graph) -> dict[str, str]:
    """The buffers that must be in memory, with the reason."""
    out: dict[str, str] = {}
    for n in graph.nodes:
        if isinstance(n, Extern):
            for v in n.values():
                out.setdefault(v.buffer, f"argument of {n.target}")
        elif isinstance(n, Pointwise) and n.laid:
            out.setdefault(n.names[0], "read at the same places in this order")
        elif isinstance(n, Attention):
            for e in loads(*n.factors()):
                out.setdefault(e.attr[0], "read again and again by attention")
    for o in graph.outputs:
        if isinstance(o, Value):
            out.setdefault(o.buffer, "output")
    for name, v in graph.mutations:
        out.setdefault(v.buffer, f"new value of {name}")
    for name in compared(graph):
        out.setdefault(name, COMPARED)
    return out


def compared(graph: Graph) -> set[str]:
    """Values that are tested for equality and come from functions that are not correctly rounded: the lanes of a vector
    and the elements left over after whole vectors may be computed by different code."""
    rough: set[str] = set()
    out: set[str] = set()
    for n in graph.nodes:
        everything = list(walk(*n.exprs()))
        if isinstance(n, Pointwise) and any(is_rough(e) or e.op == "load" and e.attr[0] in rough for e in everything):
            rough.add(n.names[0])
        tested = [a for e in everything if e.op in ("eq", "ne") for a in e.args]
        reads = [a.args[0] if a.op == "cast" else a for a in tested]
        out |= {a.attr[0] for a in reads if a.op == "load" and a.attr[0] in rough}
    return out


def is_rough(e: Expr) -> bool:
    return e.op in OPS and e.op not in SIMPLE and e.op not in EXACT and is_float(e.dtype)


def inline(graph: Graph, notes: list[str], caps: Capabilities) -> None:
    prune(graph)
    hard = materialised(graph)
    uses, joined = consumers(graph), True
    while joined:
        why = _inline_once(graph, caps, uses, hard)
        prune(graph)
        before, uses = uses, consumers(graph)
        joined = any(before[name] > 1 == uses[name] for name in why)  # several consumers have become one
    alive = {x for n in graph.nodes for x in n.names}
    for name, reasons in why.items():
        if name in alive:
            notes.append(f"{name} is kept: {'; '.join(sorted(reasons))}")


def consumers(graph: Graph) -> Counter[str]:
    """How many nodes read each value, not counting those that read only few of its points."""
    uses: Counter[str] = Counter()
    points = {name: about(volume(n.vars), graph.typical, 0) for n in graph.nodes if isinstance(n, Pointwise)
              for name in n.names}
    for n in graph.nodes:
        for name in n.reads():
            uses[name] += not are_few(points.get(n.names[0], 0) if n.names else 0, points.get(name, 0))
    return uses


def _inline_once(graph: Graph, caps: Capabilities, uses: Counter[str], hard: dict[str, str]) -> dict[str, set[str]]:
    """Inlines once, in the order of the nodes. Returns the values that are kept, with the reasons."""
    bodies: dict[str, Body] = {}
    why: dict[str, set[str]] = defaultdict(set)
    nodes: list[Node] = []
    for n in graph.nodes:
        if not isinstance(n, Extern):
            n = picked(_inline_into(n, graph, caps, bodies, uses, hard, why),
                       lambda name: bodies[name].node if name in bodies else None)
        if isinstance(n, Pointwise):
            everything = list(walk(n.body))
            bodies[n.names[0]] = Body(n, n.body, cost_of([n.body]), sum(e.op == "load" for e in everything),
                                      len(everything), depth_of(everything), divisions_in(everything),
                                      about(volume(n.vars), graph.typical, 0))
        nodes.append(n)
    graph.nodes = nodes
    return why


def _inline_into(n: Node, graph: Graph, caps: Capabilities, bodies: dict[str, Body], uses: Counter[str],
                 hard: dict[str, str], why: dict[str, set[str]]) -> Node:
    seen: dict[str, set[tuple[Index, ...]]] = defaultdict(set)
    samples: Counter[str] = Counter()  # places where a value is computed at few of its points
    inner_only: dict[str, bool] = {}
    scores: set[str] = set()  # values as large as attention's scores: computed again, whatever that costs
    domains = domains_of(n)
    everything = list(walk(*n.exprs()))
    folded = {v for e in everything if e.op == "fold" for v, _, _ in e.attr.loops}
    for e in everything:
        if e.op == "load" and e.attr[0] in bodies:
            # Run-time sizes do not change from one point to the next.
            symbols = {v for i in e.attr[1] for v in i.symbols() if v.extent is not None or v in folded}
            new = e.attr[1] not in seen[e.attr[0]]
            seen[e.attr[0]].add(e.attr[1])
            if is_sample(symbols, n, bodies[e.attr[0]].points, graph.typical):
                samples[e.attr[0]] += new
                continue
            if isinstance(n, Attention) and {n.row, n.column} <= symbols:
                scores.add(e.attr[0])
            once = any(symbols <= d and all(v in symbols or v.size is ONE for v in d) for d in domains)
            repeated = not (once or is_factor(bodies[e.attr[0]], n, symbols, graph, caps.tuning))
            inner_only[e.attr[0]] = inner_only.get(e.attr[0], False) or repeated
    chosen: set[str] = set()
    budget, depth = len(everything), depth_of(everything)
    reads = sum(1 for e in everything if e.op == "load")
    for name, places in seen.items():
        b = bodies[name]
        rows = neighbour_rows(b.node, graph)
        count = len(places) - samples[name]
        verdict = hard.get(name) if name in scores else _decide(
            b, n, uses[name], hard.get(name), inner_only.get(name, False), count, rows, caps.tuning)
        if verdict is None and (budget + b.size * len(places) > LARGEST or reads + b.reads > MOST_READS) and b.cost > 1:
            verdict = "the fused body would be too large"
        if verdict is None and depth + b.depth > DEEPEST:
            verdict = "the fused body would be too deep"
        if verdict is None:
            chosen.add(name)
            budget += b.size * len(places)
            reads += b.reads * len(places)
        else:
            why[name].add(verdict)
    if not chosen:
        return n

    def put(e: Expr) -> Expr:
        if e.op != "load" or e.attr[0] not in chosen:
            return e
        b = bodies[e.attr[0]]
        mapping = dict(zip(b.node.vars, e.attr[1], strict=True))
        body = b.expr.subs(mapping)
        return held(masked(body, e.args[0]) if e.args else body, e.attr[1], e.args)

    memo: dict[Expr, Expr] = {}
    made = map_exprs(n, lambda e: rewrite(e, put, None, memo))
    origins = dict.fromkeys(o for name in seen if name in chosen for o in bodies[name].node.origins)
    return replace(made, inlined=(*origins, *n.inlined))


def is_factor(b: Body, n: Node, symbols: Set[Sym], graph: Graph, t: Tuning) -> bool:
    """Whether a factor of a product is better computed where it is read: few tiles read it, and it is computed from no
    more bytes than it has itself, as a dequantised weight is."""
    if not isinstance(n, Contract) or b.cost > t.cheap_beside_memory:
        return False
    again = about(volume(v for v in n.kept if v not in symbols), graph.typical, t.factor_again + 1)
    points = sum(e.dtype.itemsize for e in walk(b.expr) if e.op == "load" and is_sized(e, b.node))
    return again <= t.factor_again and points <= b.expr.dtype.itemsize


def is_sized(read: Expr, n: Pointwise) -> bool:
    """Whether a read loads a different element for each point."""
    return all(v in read.symbols() for v in n.vars if v.size is not ONE)


def are_few(asked: int, points: int) -> bool:
    """Whether so few points of a value are read that computing them again is better than writing the whole value."""
    return 0 < asked * SAMPLED <= points


def is_sample(symbols: Set[Sym], n: Node, points: int, typical: Mapping[Sym, int]) -> bool:
    """Whether a read needs few points of a value: the node is much smaller, or it is a reduction with few results that
    reads the value once per result."""
    if not isinstance(n, (Pointwise, Reduce)) or isinstance(n, Segment):
        return False
    vars = n.kept if isinstance(n, Reduce) and symbols <= frozenset(n.kept) else n.vars
    return are_few(about(volume(vars), typical, 0), points)


def depth_of(everything: list[Expr]) -> int:
    """The length of the longest chain of operations in the result of `walk`, where operands come before their users."""
    depth: dict[Expr, int] = {}
    for e in everything:
        depth[e] = 1 + max((depth[a] for a in (*e.args, *index_children(e))), default=0)
    return max(depth.values(), default=0)


def divisions_in(everything: list[Expr]) -> int:
    return sum(isinstance(a, Op) and a.kind in ("div", "mod") for e in everything for i in e.own_indices()
               for a in i.atoms())


def neighbour_rows(n: Pointwise, graph: Graph) -> float:
    """How many rows are read for one row of the result; infinite if there is no contiguous variable, or if it is part
    of a computed index."""
    b = graph.buffers[n.names[0]]
    row = next((v for v, step in zip(n.vars, b.strides or (), strict=False) if step is ONE and v.size is not ONE), None)
    if row is None:
        return math.inf
    rows = 0
    for e in walk(n.body):
        if e.op == "load" and any(row in i.symbols() for i in e.attr[1]):
            if not all(i.atom() is row or row not in i.symbols() for i in e.attr[1]):
                return math.inf
            rows += 1
    return rows


def _decide(b: Body, n: Node, uses: int, hard: str | None, repeated: bool, places: int, rows: float,
            t: Tuning) -> str | None:
    """The reason to keep the value in memory; None to inline it into n."""
    if b.reads == 0 and b.divisions and repeated:
        return "a table, with divisions"
    if b.reads == 0 and b.cost <= 2 * t.cheap:
        return None  # a constant or a function of the index
    if hard is not None:
        return hard
    if b.cost <= 1 and b.reads <= 1:
        return None  # only moves data
    beside = b.cost <= t.cheap_beside_memory
    written = places == 1 and isinstance(n, Pointwise)  # each time it is computed, one element is written
    if b.reads <= 1 and (b.cost <= t.cheap or (beside and written)):
        return None
    if uses == 1 and isinstance(n, Pointwise) and places * rows <= t.neighbour_rows and b.cost <= 3 * rows:
        # A weighted sum of rows: the rows are close together, and its tables are read once per row. Compared in rows of
        # n: inlined, its rows are read at each place; kept, they are read once, the value is written (which counts
        # twice) and read at each place.
        made, kept = volume(n.vars), volume(b.node.vars)
        share = kept.const / max(made.const, 1) if made.is_const and kept.is_const else 1
        if places * rows <= (rows + 2) * share + places:
            return None
    if places == 0:
        return None
    if repeated or places > 1:
        return "read more than once by one consumer"
    # Inlined, every consumer reads its inputs. Kept, these are read once, and the value is written and read by each.
    if uses == 1 or (beside and b.reads * uses <= b.reads + 1 + uses):
        return None
    return f"{uses} consumers and {b.cost} operations"


def domains_of(n: Node) -> list[frozenset[Sym]]:
    """The sets of variables over which a node's expressions are evaluated."""
    if isinstance(n, Scatter):
        return [frozenset(n.vars), frozenset(n.out_vars)]
    return [frozenset(n.vars)] if isinstance(n, (Pointwise, Reduce, Scan)) else []


def map_exprs(n: Node, fn) -> Node:  # type: ignore[no-untyped-def]
    """The node with `fn` applied to each of its expressions, including those inside a scatter's target."""
    if isinstance(n, Pointwise):
        return replace(n, body=fn(n.body))
    if isinstance(n, Segment):
        return replace(n, inputs=tuple(map(fn, n.inputs)), lo=fn(n.lo), hi=fn(n.hi))
    if isinstance(n, Contract) and n.ragged is not None:
        return replace(n, inputs=tuple(map(fn, n.inputs)), ragged=replace(n.ragged, ends=fn(n.ragged.ends)))
    if isinstance(n, (Reduce, Scan)):
        return replace(n, inputs=tuple(map(fn, n.inputs)))
    if isinstance(n, Attention):
        return n.mapped(fn)
    if isinstance(n, Scatter):

        def on_index(i: Index) -> Index:
            if i.is_const:
                return i
            e = fn(Expr("index", torch.int64, (), i))
            return e.attr if e.op == "index" else as_index(e.attr)

        return replace(n, init=fn(n.init), value=fn(n.value), target=tuple(on_index(t) for t in n.target),
                       mask=None if n.mask is None else fn(n.mask))
    return n
