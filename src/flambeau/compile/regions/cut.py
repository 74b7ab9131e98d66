"""Cuts Dynamo's graph into pieces. Equal pieces are compiled once and called many times.

A deep model repeats one layer many times. The repetition is found here, before AOTAutograd, so a repeated layer is
traced, lowered and compiled once; each call passes its own parameters and has its own place in autograd. Pieces are
contiguous stretches of the graph in its own order (`schedule/repeats.py` says where they end). Two pieces are equal if
their keys are equal: operators, arguments, connections, what is known of every value, which inputs share memory, and
which values are read outside of the piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from flambeau.config import config
from flambeau.schedule.repeats import NEVER, Region, find_regions

from .nodes import (
    INSTANCE,
    Refused,
    ambient_states,
    check_plain,
    frozen,
    held_by,
    is_heavy,
    is_number,
    is_state,
    memory,
    mutated,
    name_of,
    operators_in,
    size_in_bytes,
    storage,
    subgraph,
    value,
    value_key,
)

# The cost of a cut itself, in bytes of memory traffic: one call ends, another begins, and tensors are passed between.
CUT = 256 << 10
# The cost of each value that crosses a cut: a fixed number of bytes, and a multiple of its own size.
APART = 16 << 10, 1.0  # its writer and its readers would be in different kernels anyway
NEXT_TO_A_CALL = 64 << 10, 2.0  # one is a library call; but the value must be saved, and could have been recomputed
SPLIT = 1 << 20, 6.0  # one fused kernel becomes two, and the value between them is rounded
VIEW = 1 << 20, 12.0  # autograd has to track the view


@dataclass
class Piece:
    """A stretch of the graph as a function."""

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    key: Any = None
    region: int | None = None  # index of the region that it is an instance of


@dataclass
class Pieces:
    """A graph cut into pieces. Without regions it is one piece, and `why` says what prevented a cut."""

    gm: fx.GraphModule
    pieces: list[Piece] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    why: str = ""
    ambient: dict[fx.Node, Any] = field(default_factory=dict)  # autocast and grad modes in effect at each node
    search: float = 0.0  # seconds spent on the search
    seconds: dict[Any, float] = field(default_factory=dict)  # seconds to compile each key, kernels excluded

    def groups(self) -> list[list[list[fx.Node]]]:
        """The nodes of each instance of each region whose instances are equal."""
        found: dict[Any, list[list[fx.Node]]] = {}
        for p in self.pieces:
            if p.region is not None:
                found.setdefault(p.key, []).append(p.nodes)
        return [instances for instances in found.values() if len(instances) > 1]


def cut(gm: fx.GraphModule, inputs: Sequence[Any]) -> Pieces:
    """Cut a graph into pieces at its repeated regions."""
    start = time.perf_counter()
    try:
        body = _Body(gm, inputs)
        regions = find_regions(body.tokens(), [operators_in(gm, n) for n in body.nodes], body.costs(),
                               config.region_count)
    except Refused as reason:
        return Pieces(gm, why=str(reason))
    why = "" if regions else "nothing repeats often enough"
    return Pieces(gm, body.pieces(regions), regions, why, body.ambient, time.perf_counter() - start)


OBSERVERS: list[Callable[[Pieces], None]] = []  # called with every graph that was searched; see flambeau.debug


class _Body:
    """The nodes that compute something, with the facts that the search needs about each."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        check_plain(gm, inputs)
        self.gm = gm
        self.ambient = ambient_states(gm.graph)
        self.sizes: set[fx.Node] = set()  # nodes computed only from sizes and numbers among the arguments
        for n in gm.graph.nodes:
            computed = n.op not in ("output", "get_attr") and is_number(value(n)) and not n.kwargs
            if n.op == "placeholder" or (computed and all(a in self.sizes for a in n.all_input_nodes)):
                self.sizes.add(n)
            returned = any(u.op == "output" for u in n.users)
            if returned and not isinstance(value(n), (torch.Tensor, torch.SymInt) if n in self.sizes else torch.Tensor):
                raise Refused(f"{n.name} is returned and is no tensor")
        outside = ("placeholder", "output", "get_attr")
        self.nodes = [n for n in gm.graph.nodes
                      if n.op not in outside and not is_state(n) and n not in self.sizes]
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self.keys: dict[fx.Node, Any] = {}

    def key(self, n: fx.Node) -> Any:
        """What is known of a node's value, in hashable form."""
        if n not in self.keys:
            body = subgraph(self.gm, n)
            self.keys[n] = value_key(value(n) if n.op != "get_attr" else held_by(self.gm, n)) if body is None \
                else graph_key(body)
        return self.keys[n]

    def tokens(self) -> list[int]:
        numbers: dict[Any, int] = {}
        texts = [(self.shell(n), frozen((n.args, n.kwargs), self.key)) for n in self.nodes]
        return [numbers.setdefault(text, len(numbers)) for text in texts]

    def shell(self, n: fx.Node) -> Any:
        """Everything that identifies a node except its arguments."""
        return n.op, n.target, len(n.users), self.key(n), self.ambient[n], frozen(n.meta.get("custom"), self.key)

    # ---- costs -----------------------------------------------------------------------------------------

    def costs(self) -> list[float]:
        """The cost of a cut before each node, and after the last one."""
        count = len(self.nodes)
        change = [0.0] * (count + 2)  # change of the crossing cost at each position
        forbidden = [0] * (count + 2)
        depth, heavy, views = self.kernels()
        for i, n in enumerate(self.nodes):
            readers = sorted(self.at[u] for u in n.users if u in self.at)
            if readers and readers[-1] > i and not isinstance(value(n), torch.Tensor):
                forbidden[i + 1] += 1
                forbidden[readers[-1] + 1] -= 1
            elif readers and readers[-1] > i:
                # Price each stretch between readers by the readers behind a cut there: ever fewer share a kernel.
                size, start = size_in_bytes(value(n)), i
                for k, r in enumerate(readers):
                    if r > start:
                        rest = [self.nodes[x] for x in readers[k:]]
                        fixed, times = VIEW if n in views else max(self.price(n, u, depth, heavy) for u in rest)
                        change[start + 1] += (price := fixed + times * size)
                        change[r + 1] -= price
                        start = r
        for first, last in self.written():
            forbidden[first + 1] += 1
            forbidden[last + 1] -= 1
        costs, crossing, held = [], 0.0, 0
        for i in range(count + 1):
            crossing += change[i]
            held += forbidden[i]
            costs.append(NEVER if held else CUT + max(crossing, 0.0))
        return costs

    def kernels(self) -> tuple[dict[fx.Node, int], set[fx.Node], set[fx.Node]]:
        """For each node the largest number of library calls before its value; the nodes that lead to one; the views."""
        depth: dict[fx.Node, int] = {}
        views: set[fx.Node] = set()
        seen = {memory(n) for n in self.gm.graph.nodes if n.op == "placeholder"}
        for n in self.nodes:
            depth[n] = max((depth.get(a, 0) for a in n.all_input_nodes), default=0) + is_heavy(n)
            at = memory(n)
            if at is not None and at in seen:
                views.add(n)
            seen.add(at)
        heavy: set[fx.Node] = set()
        for n in reversed(self.nodes):
            readers = [u for u in n.users if u in self.at]
            if is_heavy(n) or (n in views and readers and all(u in heavy for u in readers)):
                heavy.add(n)
        return depth, heavy, views

    @staticmethod
    def price(n: fx.Node, reader: fx.Node, depth: dict[fx.Node, int], heavy: set[fx.Node]) -> tuple[int, float]:
        if is_heavy(n) or reader in heavy:
            return APART if is_heavy(n) and reader in heavy else NEXT_TO_A_CALL
        return APART if depth[reader] > depth[n] else SPLIT

    def written(self) -> Iterable[tuple[int, int]]:
        """For each memory that is written to, the first and last position that touches it: these stay in one piece."""
        touched: dict[Any, tuple[int, int]] = {}
        changed: set[Any] = set()
        for i, n in enumerate(self.nodes):
            for x in (n, *n.all_input_nodes):
                if (at := self.memory(x)) is not None:
                    touched[at] = (touched.get(at, (i, i))[0], i)
            changed.update(m for x in mutated(self.gm, n) if (m := self.memory(x)) is not None)
        return [touched[m] for m in changed if m in touched]

    def memory(self, n: fx.Node) -> Any:
        return memory(n) if n.op != "get_attr" else storage(held_by(self.gm, n))

    # ---- pieces ----------------------------------------------------------------------------------------

    def pieces(self, regions: Sequence[Region]) -> list[Piece]:
        spans = sorted((a, b, k) for k, region in enumerate(regions) for a, b in region.spans())
        out: list[Piece] = []
        at = 0
        for start, stop, number in (*spans, (len(self.nodes), len(self.nodes), None)):
            if start > at:
                out.append(Piece(self.nodes[at:start]))
            if stop > start:
                out.append(Piece(self.nodes[start:stop], region=number))
            at = stop
        for p in out:
            self.wire(p)
        return out

    def wire(self, p: Piece) -> None:
        """Set the inputs, outputs and key of a piece."""
        inside = {n: i for i, n in enumerate(p.nodes)}
        taken: dict[fx.Node, int] = {}

        def reference(x: fx.Node) -> Any:
            if subgraph(self.gm, x) is not None:
                return self.key(x)
            if x in inside:
                return "inside", inside[x]
            if isinstance(value(x), int):
                return frozen(value(x), reference)
            if x in self.sizes and x.op != "placeholder" and not isinstance(value(x), torch.SymInt):
                # A number that is not a size cannot be an argument of a graph, so each piece computes it itself.
                return x.target, frozen(x.args, reference)
            return "given", taken.setdefault(x, len(taken))

        lines = [(self.shell(n), frozen((n.args, n.kwargs), reference)) for n in p.nodes]
        p.inputs = list(taken)
        p.outputs = [n for n in p.nodes if any(u not in inside for u in n.users)]
        shared: dict[Any, list[int]] = {}
        for k, x in enumerate(p.inputs):
            if (at := self.memory(x)) is not None:
                shared.setdefault(("memory", at), []).append(k)
                shared.setdefault(("tensor", x.meta.get(INSTANCE), id(value(x))), []).append(k)
        p.key = (tuple(lines), tuple(self.key(x) for x in p.inputs), tuple(inside[n] for n in p.outputs),
                 tuple(x.op for x in p.inputs), tuple(tuple(g) for g in shared.values() if len(g) > 1))


def graph_key(gm: fx.GraphModule) -> Any:
    """The key of the body of a higher-order operator."""
    numbers = {n: i for i, n in enumerate(gm.graph.nodes)}

    def reference(n: fx.Node) -> Any:
        return numbers[n]

    def target(n: fx.Node) -> Any:
        if n.op == "placeholder":
            return None
        body = subgraph(gm, n)
        return graph_key(body) if body is not None else id(held_by(gm, n)) if n.op == "get_attr" else n.target

    meta = frozen({k: v for k, v in gm.meta.items() if k.startswith("_checkpoint")}, reference)
    return meta, tuple((n.op, target(n), frozen((n.args, n.kwargs), reference), value_key(value(n)))
                       for n in gm.graph.nodes)


# ---- why two pieces differ ---------------------------------------------------------------------------------

PARTS = ("operator", "operator", "number of readers", "result", "mode", "mark")  # the parts of a shell
WHOLE = ("operators", "inputs", "results that others read", "kinds of inputs", "inputs that share memory")  # of a key


def difference(a: Piece, b: Piece) -> str:
    """The first thing in which two pieces differ, and so why the second is not an instance of the first."""
    for m, n, line, other in zip(a.nodes, b.nodes, a.key[0], b.key[0]):
        if line == other:
            continue
        for part, x, y in zip(PARTS, line[0], other[0]):
            if x != y:
                what = f"calls {name_of(n)}, not {name_of(m)}" if part == "operator" else f"has another {part}"
                return f"{n.name} {what}" + (f": {shown(n)}, not {shown(m)}" if part == "result" else "")
        return f"{n.name} has other arguments than {m.name}"
    if len(a.nodes) != len(b.nodes):
        more, piece = ("ends", b) if len(b.nodes) < len(a.nodes) else ("goes on", a)
        return f"it {more} after {piece.nodes[-1].name}"
    return next((f"other {what}" for what, x, y in zip(WHOLE, a.key, b.key) if x != y), "")


def shown(n: fx.Node) -> str:
    v = value(n)
    if not isinstance(v, torch.Tensor):
        return type(v).__name__
    grad = ", with gradient" if v.requires_grad else ""
    return f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)} {list(v.stride())}{grad}"
