"""Decides for each saved tensor of a forward: keep it on the device, recompute it, or send it to the host and back.

    torch.compile(model, backend="flambeau", options={"offload": "4GiB"})     # so much less at the peak
    options={"offload": 0.3}                                                  # that part of the peak
    options={"offload": "auto"}                                               # what the device's memory is short of

One time model decides for all saved tensors. If the link to the host is free until the forward ends, and the copy back
completes before the tensor is used, then sending costs only the launches of the copies. Otherwise it costs the time of
the copy. Recomputing costs the time of its operators. So the link takes tensors that are expensive to compute, and the
rest of the request is met by recomputing cheap ones. The speed of the link is measured once per machine and stored on
disk.

The joint graph is partitioned again after each choice, because recomputation changes what has to be saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from flambeau.ir.tuning import Tuning
from flambeau.ops.facts import facts
from flambeau.runtime.placement import flat
from flambeau.runtime.streams.host_copies import NOTES, fetch, send
from flambeau.torch_compat.aot import must_recompute
from flambeau.torch_compat.fake import detect_fake_mode
from flambeau.torch_compat.ops import OpOverload

from .offload_times import Machine, base_of, is_view, size_of, views_of
from .offload_wish import bytes_of

LEAST = 1 << 20  # bytes: smaller tensors are not worth a copy
LONGEST_WAY = 64  # at most this many operators are recomputed for one saved tensor
MARGIN = 0.9  # the share of the device's memory that "auto" lets a program use
ROUNDS = 3  # choices of what is recomputed
COPIES = 16  # launches that cost the host as much as a copy there and back, with its memory and its waits
UNCHECKED = "saved_tensor_with_no_vc_check"  # a key in the meta of a saved tensor: torch saves these after the others
Wish = str | float


# ---- saved tensors and their costs -----------------------------------------------------------------------------


@dataclass
class Saved:
    """A memory block that the forward saves: the node that makes it, and the saved tensors that lie in it."""

    node: fx.Node
    bytes: int
    made: float  # nanoseconds from the forward's start until it is made
    again: float  # nanoseconds to recompute it; infinite if recomputing could give another result
    way: list[str]  # names of the nodes that are recomputed for it
    results: list[fx.Node] = field(default_factory=list)
    used: float = 0.0  # nanoseconds from the backward's start until it is read


@dataclass(frozen=True)
class Offload:
    """The requested saving, and the facts about the machine that decide how to meet it."""

    wish: Wish
    tuning: Tuning
    rate: float  # bytes per nanosecond to the host
    memory: Callable[[], int]  # total bytes of device memory
    part: bool = False  # one piece of a larger model: copies may continue while later pieces run


def saved_by(forward: fx.Graph, backward: fx.Graph, results: int, machine: Machine) -> tuple[list[Saved], float]:
    """The memory blocks that could be sent, in the order in which they are made, and the duration of the forward."""
    outputs = list(forward.output_node().args[0])  # type: ignore[arg-type]
    returned = {base_of(n) for n in outputs[:results] if isinstance(n, fx.Node)}
    now, made = 0.0, dict[fx.Node, float]()
    for n in forward.nodes:
        now += machine.time(n)
        made[n] = now
    used, there = dict[str, float](), 0.0
    for n in backward.nodes:
        for a in n.all_input_nodes if n.op == "call_function" else ():
            used.setdefault(a.name, there)
        there += machine.time(n)
    kept = {x for n in outputs[results:] if isinstance(n, fx.Node) for x in (n, base_of(n))}
    found: dict[fx.Node, Saved] = {}
    for n in outputs[results:]:
        base = base_of(n) if isinstance(n, fx.Node) else None
        if base is None or base.op != "call_function" or base in returned or not movable(base):
            continue
        if base not in found:
            found[base] = Saved(base, size_of(base.meta["val"]), made[base], *again(base, kept, machine))
        found[base].results.append(n)
    for s in found.values():
        s.used = min(used.get(x.name, 0.0) for x in s.results)
    if ends(forward, results):  # what is needed sooner than it could be back stays
        found = {n: s for n, s in found.items()
                 if now - s.made + s.used >= min(s.again, 2 * s.bytes / machine.rate)}
    return sorted(found.values(), key=lambda s: s.made), now


def ends(forward: fx.Graph, results: int) -> bool:
    """Whether a model ends here, with a loss: then the backward follows at once."""
    outputs: list[Any] = list(forward.output_node().args[0])  # type: ignore[arg-type]
    return sum(size_of(n.meta.get("val")) for n in outputs[:results] if isinstance(n, fx.Node)) < LEAST


def movable(n: fx.Node) -> bool:
    """Whether the value is dense device memory of known size, large enough to copy. A scalar copied to the host would
    be read there as a number, before the copy is complete."""
    t = n.meta.get("val")
    return (isinstance(t, torch.Tensor) and t.dim() > 0 and t.layout is torch.strided and t.device.type != "cpu"
            and size_of(t) >= LEAST and torch.ops.aten.is_non_overlapping_and_dense(t))


def again(n: fx.Node, kept: set[fx.Node], machine: Machine) -> tuple[float, list[str]]:
    """The cost of recomputing a node from values that are kept or recomputed anyway, and the names of the nodes that
    are recomputed for it."""
    way, todo, cost = [n], [n], 0.0
    while todo:
        x = todo.pop()
        op = x.target
        pure = op is operator.getitem or (
            isinstance(op, OpOverload) and not facts(op).random and not op._schema.is_mutable)
        if not pure or "recompute" in x.meta or len(way) > LONGEST_WAY:
            return float("inf"), []
        cost += machine.time(x)
        new = [a for a in x.all_input_nodes if a.op == "call_function" and a not in kept and a not in way
               and not must_recompute(a)]
        way += new
        todo += new
    return cost, [x.name for x in way]


# ---- the decision ----------------------------------------------------------------------------------------------


def held_by(forward: fx.Graph) -> int:
    """The bytes of a forward's inputs, results and saved tensors."""
    return sum(sizes_of(base_of(n) for n in (*forward.find_nodes(op="placeholder"),
                                             *forward.output_node().all_input_nodes)).values())


def sizes_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    return {n: sum(map(size_of, flat(n.meta.get("val")))) for n in nodes}


def peak_of(forward: fx.Graph, backward: fx.Graph) -> int:
    """The peak memory in bytes, if every result lives until its last use, and the graph's inputs and results stay."""
    given = {n.name: size for n, size in sizes_of(forward.find_nodes(op="placeholder")).items()}
    saved = sizes_of(n for n in backward.find_nodes(op="placeholder") if n.name not in given)
    return sum(given.values()) + max(live(forward, set()), live(backward, saved.keys()))


def live(graph: fx.Graph, inputs: Set[fx.Node]) -> int:
    """The peak bytes of a graph's own values, without what stays. `inputs` are freed after their last use."""
    last: dict[fx.Node, int] = {}
    nodes = list(graph.nodes)
    for k, n in enumerate(nodes):
        for a in n.all_input_nodes:
            last[base_of(a)] = k
    makes = [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem and not is_view(n)]
    sizes = sizes_of((*makes, *inputs))
    ends: dict[int, int] = {}
    for n, size in sizes.items():
        k = max([last.get(n, 0), *(last.get(u, 0) for u in n.users if u.target is operator.getitem)])
        ends[k] = ends.get(k, 0) + size
    now = most = sum(sizes[n] for n in inputs)
    for k, n in enumerate(nodes):
        now += 0 if n in inputs else sizes.get(n, 0)
        most = max(most, now)
        now -= ends.get(k, 0)
    return most


def wanted_bytes(forward: fx.Graph, backward: fx.Graph, given: Offload) -> float:
    wish = given.wish
    if isinstance(wish, str) and wish != "auto":
        return float(bytes_of(wish))
    # What a piece of a larger model adds to the peak is what it holds, whatever else it needs while it runs.
    peak = held_by(forward) if given.part else peak_of(forward, backward)
    return peak * wish if isinstance(wish, float) else max(peak - MARGIN * given.memory(), 0.0)


def choose_again(forward: fx.Graph, backward: fx.Graph, results: int, given: Offload, left: float) -> set[str]:
    """The nodes to recompute: those that cost least for the bytes that are still to go, unless a copy costs less."""
    found, end = saved_by(forward, backward, results, Machine(given.tuning, given.rate))
    free = {s.node for s in beside(sorted(found, key=lambda s: (-s.again / s.bytes, s.made)), end, given)}
    names: set[str] = set()

    def cost(s: Saved) -> float:
        return min(s.again, given.tuning.launch * COPIES if s.node in free else s.bytes / given.rate)

    taken: list[Saved] = []
    while found and left > 0:
        taken.append(min(found, key=lambda s: cost(s) / min(s.bytes, left)))
        found.remove(taken[-1])
        left -= taken[-1].bytes
    for s in sorted(taken, key=cost, reverse=True):  # later choices may have made earlier ones unnecessary
        if s.bytes <= -left:
            taken.remove(s)
            left += s.bytes
        elif s.again <= cost(s):
            names.update(s.way, (n.name for r in s.results for n in views_of(r)))
    return names


def choose_sent(forward: fx.Graph, backward: fx.Graph, results: int, given: Offload, wanted: float
                ) -> tuple[list[str], str]:
    """The nodes whose memory is sent, and a note for the report. Early values go first: they are needed last."""
    found, end = saved_by(forward, backward, results, Machine(given.tuning, given.rate))
    sent: list[Saved] = []
    free = beside(found, end, given)
    for s in (*free, *(s for s in found if s not in free)):
        if sum(x.bytes for x in sent) >= wanted:
            break
        sent.append(s)
    total, hidden = (sum(s.bytes for s in sent if s in some) for some in (found, free))
    return [s.node.name for s in sent], (
        f"of {mebi(sum(s.bytes for s in found))} that the backward needs, {mebi(hidden)} are copied to the host while "
        f"kernels run, and {mebi(total - hidden)} while they wait ({given.rate:.1f} GB/s)")


def beside(found: Iterable[Saved], end: float, given: Offload) -> list[Saved]:
    """The blocks, selected greedily in the given order, whose copies overlap fully with computation."""
    out: list[Saved] = []
    for s in found:
        if sent_in_time([*out, s], end, given) and fetched_in_time([*out, s], given.rate):
            out.append(s)
    return out


def sent_in_time(sent: Sequence[Saved], end: float, given: Offload) -> bool:
    """Whether copies to the host, one after another, complete before the forward ends."""
    if given.part:
        return sum(s.bytes for s in sent) / given.rate <= end
    busy = 0.0
    for s in sorted(sent, key=lambda s: s.made):
        busy = max(busy, s.made) + s.bytes / given.rate
    return busy <= end


def fetched_in_time(sent: Sequence[Saved], rate: float) -> bool:
    """Whether copies back, one after another, each complete before the tensor is used."""
    due = 0.0
    for s in sorted(sent, key=lambda s: s.used):
        due += s.bytes / rate
        if due > s.used:
            return False
    return True


def mebi(n: float) -> str:
    return f"{n / (1 << 20):.0f} MiB"


# ---- rewriting the graphs --------------------------------------------------------------------------------------


def keep_elsewhere(joint: fx.GraphModule, cut: Callable[[fx.GraphModule], tuple[fx.GraphModule, fx.GraphModule]],
                   results: int, given: Offload) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph into forward and backward so that less device memory is held between them."""
    forward, backward = cut(copied(joint))
    if given.part and ends(forward.graph, results):  # it runs at the peak, with all that it saves
        return forward, backward
    held, wanted = held_by(forward.graph), wanted_bytes(forward.graph, backward.graph, given)
    notes = [f"of {mebi(peak_of(forward.graph, backward.graph))} at the peak, {mebi(wanted)} are to go"]
    names: set[str] = set()
    for _ in range(ROUNDS):  # what is recomputed changes what is saved, and when it is used
        less = held - held_by(forward.graph)
        more = choose_again(forward.graph, backward.graph, results, given, wanted - less) - names
        if not more:
            break
        names |= more
        for n in joint.graph.nodes:
            if n.name in names:
                n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        forward, backward = cut(copied(joint))
    less = held - held_by(forward.graph)
    if names:
        notes.append(f"{mebi(less)} are computed again in the backward ({len(names)} operators)")
    wanted -= less
    sent, note = choose_sent(forward.graph, backward.graph, results, given, wanted)
    send_saved(forward, backward, results, sent)
    forward.meta[NOTES] = [*notes, note]
    return forward, backward


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(gm.graph, known)
    output = graph.output(results)
    output.meta.update(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def send_saved(forward: fx.GraphModule, backward: fx.GraphModule, results: int, names: Iterable[str]) -> int:
    """Save on the host all saved tensors that lie in these nodes' memory; returns their number. Their views are
    recreated in the backward."""
    wanted, count, gone = set(names), 0, set[int]()
    output = forward.graph.output_node()
    outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    placeholders = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    here = backward.graph
    first = next(x for x in here.nodes if x.op != "placeholder")
    there: dict[fx.Node, fx.Node] = {}  # a block's node in the forward, and its fetched copy in the backward
    mode = detect_fake_mode([n.meta.get("val") for n in forward.graph.nodes]) or nullcontext()
    for k, n in list(enumerate(outs))[results:]:
        base = base_of(n) if isinstance(n, fx.Node) else None
        given = placeholders.get(n.name) if base is not None else None
        if base is None or base.name not in wanted or given is None or not replayable(n):
            continue
        if base not in there:
            val = base.meta["val"]
            with mode:
                host = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
            with forward.graph.inserting_before(output):
                outs[k] = forward.graph.call_function(send, (base,))
            outs[k].meta.update(val=host, **{key: n.meta[key] for key in (UNCHECKED,) if key in n.meta})
            with here.inserting_before(given):
                taken = here.placeholder(outs[k].name)
            taken.meta["val"] = host
            with here.inserting_before(first):
                there[base] = here.call_function(fetch, (taken, val.device))
            there[base].meta["val"] = val
        else:
            gone.add(k)
        given.replace_all_uses_with(viewed(here, n, base, there[base], first))
        here.erase_node(given)
        count += 1
    if desc := output.meta.get("desc"):
        output.meta["desc"] = [d for k, d in enumerate(desc) if k not in gone]
    output.args = (tuple(o for k, o in enumerate(outs) if k not in gone),)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    backward.recompile()
    return count


def replayable(n: fx.Node) -> bool:
    """Whether each view between a saved tensor and its memory reads nothing else."""
    base = base_of(n)
    while n is not base:
        if len(n.all_input_nodes) != 1:
            return False
        n = n.all_input_nodes[0]
    return True


def viewed(graph: fx.Graph, n: fx.Node, base: fx.Node, made: fx.Node, before: fx.Node) -> fx.Node:
    """Recreate in the backward a view from the forward, on top of the memory block `made`."""
    if n is base:
        return made
    source = viewed(graph, n.all_input_nodes[0], base, made, before)
    with graph.inserting_before(before):
        return graph.node_copy(n, lambda _: source)
