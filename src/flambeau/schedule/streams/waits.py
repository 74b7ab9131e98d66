"""Schedules programs with several streams: one part after the other, with the missing waits added.

A section of nodes on one stream, without stream operations in between, is scheduled by itself: kernels do not cross
streams, and an event covers exactly the work before its record. Between sections, values are in memory. If one step
reads what another one writes, and the caller's events do not order them, a wait for an event of our own is added.
Memory is then planned by the order that is certain (`order.py`), and not by the list of steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from flambeau.ir.nodes import Graph, Node
from flambeau.ir.program import WORK, Copy, Fence, Keep, Program, Record, Step, StreamNumbers, Wait

from ..memory import ProgramDraft, lifetimes, plan_memory
from .needs import Needs
from .order import Cell, Clock, Clocks, Moment, accesses, check_order, count_streams, joined, roots

# ---- sections of a graph ---------------------------------------------------------------------------------


@dataclass
class Section:
    """A run of consecutive nodes on one stream, as a graph, and the stream operations before it."""

    graph: Graph
    stream: int = 0
    steps: tuple[Step, ...] = ()


def sections(graph: Graph) -> Iterator[Section]:
    """Split a graph into sections; a graph on one stream is its own section."""
    if not graph.turns:
        yield Section(graph)
        return
    ends = [*(t.at for t in graph.turns[1:]), len(graph.nodes)]
    parts = [graph.nodes[t.at : end] for t, end in zip(graph.turns, ends, strict=True)]
    needs = Needs(graph)
    needed = [needs.of_results([*graph.outputs, *(v for _, v in graph.mutations)])]
    for part in reversed(parts[1:]):
        needed.append(needed[-1].union(*map(needs.of, part)))
    before = [*graph.inputs]
    for turn, part, later in zip(graph.turns, parts, reversed(needed), strict=True):
        yield Section(stretch(graph, part, before, later), turn.stream, turn.steps)
        before += [name for n in part for name in n.names]


def stretch(graph: Graph, nodes: list[Node], before: list[str], later: set[str]) -> Graph:
    """A graph of some nodes of another graph; it returns the values that others read. Both share the buffer table."""
    made = copy.copy(graph)
    made.nodes, made.inputs, made.mutations, made.turns = list(nodes), list(before), [], []
    made.outputs = [graph.whole(name) for n in nodes for name in n.names if name in later]
    return made


def write_early(p: ProgramDraft, first: int) -> None:
    """Move the copies of new values into inputs (steps from `first` on) right behind the kernels that make the values,
    on their stream: the caller's events come after them, as in eager."""
    copies = [s for s in p.steps[first:] if isinstance(s, Copy)]
    p.steps = p.steps[:first]
    root = roots(p)
    for c in copies:
        users = [k for k, s in enumerate(p.steps) for name, writes in accesses(s, p.kernels).items()
                 if root.get(name) == root[c.dst] or (writes and root.get(name) == root[c.src.buffer])]
        made = [s.stream for s in p.steps if isinstance(s, WORK) and c.src.buffer in written(s, p)]
        p.steps.insert(max(users, default=-1) + 1, replace(c, stream=made[-1] if made else 0))


def written(s: Step, p: ProgramDraft) -> set[str]:
    return {name for name, writes in accesses(s, p.kernels).items() if writes}


# ---- waits -----------------------------------------------------------------------------------------------


def order_streams(p: ProgramDraft, graph: Graph, own: bool = False) -> None:
    """Add waits wherever two steps would use the same buffer in no defined order. `own`: only these steps run on the
    streams, so waits that order none of them are dropped."""
    root, cells, clocks = roots(p), dict[str, Cell](), Clocks(count_streams(p))
    events = max((s.event for s in p.steps if isinstance(s, Record)), default=-1) + 1
    waits: dict[int, dict[int, int]] = {}  # before a step: for each step to wait for, its event
    records: dict[int, Record] = {}  # records to insert after a step
    streams: dict[int, int] = {}
    idle: set[int] = set()

    def order(k: int, stream: int, uses: Iterable[tuple[str, bool]]) -> None:
        nonlocal events
        found = [(cells.setdefault(root.get(name, name), Cell()), writes) for name, writes in uses]
        now = Moment(k, stream, joined(clocks.now[stream], clocks.host))
        missing = {m for cell, writes in found for m in cell.conflicts(now, writes)}
        for m in sorted(missing, reverse=True):  # a later step may already have waited for an earlier one
            if clocks.now[stream][m.stream] < m.clock[m.stream]:
                if m.step not in records:
                    records[m.step] = Record(events, m.stream)
                    events += 1
                waits.setdefault(k, {})[m.step] = records[m.step].event
                streams[k] = stream
                clocks.wait(stream, m.clock)
        now = clocks.step(k, stream)
        for cell, writes in found:
            cell.use(now, writes)

    order(-1, 0, [(name, True) for name in (*graph.seeds, *graph.arriving)])
    for k, s in enumerate(p.steps):
        if isinstance(s, WORK):
            order(k, s.stream, accesses(s, p.kernels).items())
        else:
            known = clocks.now[s.stream or 0][:]
            clocks.pass_by(s)
            if own and isinstance(s, Wait) and clocks.now[s.stream] == known:
                idle.add(k)
    order(len(p.steps), 0, [(name, False) for name in graph.leaving])
    steps: list[Step] = [records[-1]] if -1 in records else []
    for k in range(len(p.steps) + 1):
        steps += (Wait(event, streams[k]) for event in waits.get(k, {}).values())
        if k < len(p.steps) and k not in idle:
            steps.append(p.steps[k])
        if k in records:
            steps.append(records[k])
    for k, there in sorted(waits.items()):
        p.notes += [f"stream {streams[k]} waits for step {j} of stream {records[j].stream}: it uses what that one does"
                    for j in there]
    waited = {s.event for s in steps if isinstance(s, Wait)}
    p.steps = [s for s in steps if not (own and isinstance(s, Record) and s.event not in waited)]


# ---- memory ----------------------------------------------------------------------------------------------


def plan_streams(p: ProgramDraft, graph: Graph, most: int | None, first: int) -> None:
    """Plan waits and memory of a draft in which inputs are updated by copies from step `first` on."""
    drop_lost_keeps(p)
    write_early(p, first)
    order_streams(p, graph)
    plan_places(p, graph, most)


def plan_overlap(p: ProgramDraft, graph: Graph) -> None:
    """Plan waits and memory of a draft whose steps were put on the program's own streams."""
    p.steps = forked(p.steps, len(graph.streams))
    order_streams(p, graph, own=True)
    plan_places(p, graph, None)


def plan_places(p: ProgramDraft, graph: Graph, most: int | None) -> None:
    """Plan the memory of steps whose order is settled."""
    uses = Uses(p, graph.leaving)
    for b in list(p.buffers.values()):
        if b.place == "arena" and not uses.within(b.name):
            p.buffers[b.name] = replace(b, place="alloc")
    plan_memory(p, most, uses.apart)
    release(p, graph)


def forked(steps: Sequence[Step], sides: int) -> list[Step]:
    """Make the program's own streams begin after stream 0 and end before it, so that they are idle outside of a run."""
    event = 1 + max((s.event for s in steps if isinstance(s, Record)), default=-1)
    begin: list[Step] = [Record(event), *(Wait(event, k) for k in range(1, sides + 1))]
    end: list[Step] = [x for k in range(1, sides + 1) for x in (Record(event + k, k), Wait(event + k))]
    return [*begin, *steps, *end]


class Uses:
    """When each buffer's memory is certain to be in use: which buffers may share memory, and when it may be freed."""

    def __init__(self, p: ProgramDraft, leaving: Iterable[str]) -> None:
        self.root, clocks = roots(p), Clocks(count_streams(p))
        self.start = clocks.step(-1, 0)
        self.first: dict[str, dict[int, Moment]] = {}  # by stream
        self.last: dict[str, dict[int, Moment]] = {}
        self.after: list[list[Clock]] = []  # after each step: what each stream knows to be complete
        for k, s in enumerate(p.steps):
            if isinstance(s, WORK):
                m = clocks.step(k, s.stream)
                for name in accesses(s, p.kernels):
                    r = self.root.get(name, name)
                    self.first.setdefault(r, {}).setdefault(s.stream, m)
                    self.last.setdefault(r, {})[s.stream] = m
            else:
                clocks.pass_by(s)
            self.after.append([joined(now, clocks.host) for now in clocks.now])
        end = clocks.step(len(p.steps), 0)
        for r in {self.root.get(name, name) for name in leaving}:  # the caller uses these on stream 0
            self.first.setdefault(r, {}).setdefault(0, end)
            self.last.setdefault(r, {})[0] = end
        self.ends = [joined(now, clocks.host) for now in clocks.now]

    def before(self, a: str, b: str) -> bool:
        """Whether every use of one buffer ends before any use of the other begins; no step may use both."""
        return all(m.after(other) and m.step != other.step
                   for m in self.first[b].values() for other in self.last[a].values())

    def apart(self, a: str, b: str) -> bool:
        return self.before(a, b) or self.before(b, a)

    def within(self, name: str) -> bool:
        """Whether stream 0 has begun the run before the buffer is used, and knows all uses to be over at its end."""
        end = Moment(len(self.after), 0, self.ends[0])
        return name in self.first and all(m.after(self.start) for m in self.first[name].values()) and all(
            end.after(m) for m in self.last[name].values())

    def unordered(self, root: str, clock: Clock) -> list[int]:
        """The streams on which it may still be in use at that time."""
        return [t for t, m in self.last.get(root, {}).items() if clock[t] < m.clock[t]]


def owner_of(root: str, uses: Uses, inputs: Iterable[str]) -> int:
    """The stream that allocates a buffer's memory."""
    if root in inputs or root not in uses.first:
        return 0
    return min(uses.first[root].values()).stream


def release(p: ProgramDraft, graph: Graph) -> None:
    """Decide when memory returns to the allocator, which gives it to the stream that allocated it: once that stream is
    behind all uses. If it never is, the allocator is notified which streams use it. The caller's arguments live as long
    as the call, as in eager."""
    uses, lives = Uses(p, graph.leaving), lifetimes(p)
    names: dict[str, list[str]] = {}
    for name, r in uses.root.items():
        if name in lives:
            names.setdefault(r, []).append(name)
    keeps: dict[int, list[Step]] = {}
    frees: dict[int, list[str]] = {}
    end = len(p.steps)
    for r, group in names.items():
        if p.buffers[r].place in ("arena", "seed", "list"):
            continue
        owner, last = owner_of(r, uses, graph.inputs), max(lives[name][1] for name in group)
        if r in graph.inputs or last >= end:
            keeps.setdefault(end, []).extend(Keep(r, t) for t in uses.unordered(r, uses.ends[owner]))
            continue
        known = next((k for k in range(last, end) if not uses.unordered(r, uses.after[k][owner])), None)
        if known is None:
            keeps.setdefault(last + 1, []).extend(Keep(r, t) for t in uses.unordered(r, uses.after[last][owner]))
            known = last
        frees.setdefault(known, []).extend(group)
    steps: list[Step] = []
    p.frees = {}
    for k in range(end + 1):
        steps += keeps.get(k, ())
        if k and k - 1 in frees:
            p.frees[len(steps) - 1] = (*p.frees.get(len(steps) - 1, ()), *sorted(frees[k - 1]))
        if k < end:
            steps.append(p.steps[k])
    p.steps = steps


# ---- the program's own streams -----------------------------------------------------------------------------


def on_own_streams(p: Program) -> tuple[Program, Fence]:
    """The same program on its own streams, so that a run can be recorded; and the fence that orders the caller's
    streams with it."""
    waited, happens = ({s.place for s in p.steps if isinstance(s, kind) and s.place is not None and (
        kind is Record or s.event is None)} for kind in (Wait, Record))
    numbers = [k for k, o in enumerate(p.outputs) if isinstance(o, StreamNumbers)]
    fence = Fence(p.streams, tuple(sorted(waited)), tuple(sorted(happens)),
                  p.arguments.index(p.ticket) if p.ticket else None, numbers[0] if numbers else None)
    sides = len(p.streams)
    steps: list[Step] = []
    frees: list[tuple[str, ...]] = [()] * (1 + sides)
    for s, freed in zip(p.steps, p.frees, strict=True):
        if isinstance(s, Wait) and s.event is None:
            frees[-1] += freed
            continue
        steps.append(replace(s, place=None) if isinstance(s, (Record, Wait)) else s)
        frees.append(freed)
    made = replace(p, streams=tuple(-k for k in range(1, sides + 1)), steps=tuple(forked(steps, sides)),
                   frees=(*frees, *[()] * (2 * sides)), ticket="",
                   arguments=tuple(a for a in p.arguments if a != p.ticket),
                   outputs=tuple(None if isinstance(o, StreamNumbers) else o for o in p.outputs))
    check_order(made)
    return made, fence


def drop_lost_keeps(p: ProgramDraft) -> None:
    """Drop Keep steps for buffers that no longer have memory of their own."""
    p.steps = [s for s in p.steps if not isinstance(s, Keep) or (
        s.buffer in p.buffers and p.buffers[s.buffer].place not in ("arena", "seed"))]

