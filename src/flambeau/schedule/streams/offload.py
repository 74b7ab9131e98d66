"""Schedules copies between device and host in parallel with other steps: when each begins, and when memory is free.

The input is a program scheduled for one stream that sends tensors to the host or fetches them (`ir.nodes.Send`,
`Fetch`). Here the copies move to a stream of the program's own. A tensor is sent right after the step that makes it. A
fetch starts as long before the first use as the time model says the copies take, into memory allocated on stream 0.
Waits, memory and the check of their order are the same as for all programs with streams.

Memory that was sent is free once stream 0 knows that the copy is over. This is not left to the allocator: the host is
far ahead of the device, and would find the copy unfinished. So stream 0 waits for the copy where the model says that it
is over, and the memory is freed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flambeau.ir.nodes import Graph, Value
from flambeau.ir.program import BufferPlan, Call, Copy, Fresh, Program, Record, Step, Wait, values_in
from flambeau.ir.tuning import Tuning

from ..memory import ProgramDraft, nbytes
from .order import accesses, check_order, is_single, roots
from .overlap import cost, results
from .waits import forked, order_streams, plan_places

COPIES = -8  # the stream's place, among the program's own streams
LATE = 1.1  # times the modelled time, after which a copy is assumed to be over
MOVES = ("send", "fetch")


def moves(p: Program) -> bool:
    """Whether a program sends or fetches tensors, and is still on one stream."""
    return is_single(p) and any(isinstance(s, Call) and s.kind in MOVES for s in p.steps)


def offloaded(p: Program, tuning: Tuning, rate: float, most: int | None, recorded: bool) -> Program:
    """Move copies to their own stream. `rate`: bytes per nanosecond between device and host; `most`: bytes of a buffer
    in the arena."""
    steps = [s for s in p.steps if not (isinstance(s, Call) and s.kind in MOVES)]
    sent, fetched = ([s for s in p.steps if isinstance(s, Call) and s.kind == kind] for kind in MOVES)
    times = [0.0]  # when each step begins, in nanoseconds
    for s in steps:
        times.append(times[-1] + cost(s, p, tuning, tuning.launch_recorded).time)
    buffers = dict(p.places)
    behind: dict[int, list[Step]] = {}  # by position of a step: steps to insert after it; -1: before all
    send_early(p, steps, sent, times, rate, behind)
    for s in fetched:
        buffers[s.names[0]] = replace(buffers[s.names[0]], place="alloc")
    fetch_ahead(p, steps, fetched, times, rate, behind)
    ordered = [*behind.get(-1, ()), *(x for k, s in enumerate(steps) for x in (s, *behind.get(k, ())))]
    host = {name for s in sent for name in s.names}
    leaving = [name for name in results(p) if name not in host]
    graph = Graph(list(p.inputs), list(p.arguments), dict(p.numbers), seeds=list(p.seeds), streams=[COPIES],
                  arriving=list(p.inputs), leaving=leaving)
    # Tensors that an earlier program sent are on the same stream, so stream 0 waits for it first.
    earlier: list[Step] = [Record(event_after(ordered), 1), Wait(event_after(ordered))] if fetched else []
    draft = ProgramDraft(list(p.kernels), forked(ordered, 1) if recorded else [*earlier, *ordered], list(p.outputs),
                         apart(buffers, sent), notes=list(p.notes))
    order_streams(draft, graph)
    plan_places(draft, graph, most)
    made = draft.finished(graph)
    check_order(made)
    return made


def apart(buffers: dict[str, BufferPlan], sent: Sequence[Call]) -> dict[str, BufferPlan]:
    """The buffers, with each sent one in memory of its own instead of the arena, to be freed after the copy."""
    gone = {v.buffer for s in sent for v in values_in(s.args)}
    return {name: replace(b, place="alloc") if name in gone and b.place == "arena" else b
            for name, b in buffers.items()}


def event_after(steps: Sequence[Step]) -> int:
    return 1 + max((s.event for s in steps if isinstance(s, Record)), default=-1)


def send_early(p: Program, steps: Sequence[Step], sent: Sequence[Call], times: Sequence[float], rate: float,
               behind: dict[int, list[Step]]) -> None:
    """Start each copy to the host right after the last step that writes the tensor."""
    root = roots(p)
    written: dict[str, int] = {}
    for k, s in enumerate(steps):
        for name, writes in accesses(s, p.kernels).items():
            if writes:
                written[root.get(name, name)] = k
    busy, event = 0.0, event_after(steps)
    made = {s: max((written.get(root.get(v.buffer, v.buffer), -1) for v in values_in(s.args)), default=-1)
            for s in sent}
    for s, k in sorted(made.items(), key=lambda pair: pair[1]):
        behind.setdefault(k, []).append(replace(s, stream=1))
        busy = max(busy, times[k + 1]) + moved(s.args, p) / rate
        # Stream 0 waits for the copy at the first step that begins after its modelled end.
        later = next((j for j in range(k + 1, len(steps)) if times[j] >= busy * LATE), None)
        if later is not None:
            behind[k].append(Record(event, 1))
            behind.setdefault(later, []).append(Wait(event))
            event += 1


def fetch_ahead(p: Program, steps: Sequence[Step], fetched: Sequence[Call], times: Sequence[float], rate: float,
                behind: dict[int, list[Step]]) -> None:
    """Start each copy back early enough that it, and those before it, complete before the tensor is used."""
    root = roots(p)
    first: dict[str, int] = {}
    for k, s in enumerate(steps):
        for name in accesses(s, p.kernels):
            first.setdefault(root.get(name, name), k)
    used = sorted(fetched, key=lambda s: first.get(root[s.names[0]], len(steps)))
    due = times[-1]
    begins: dict[Call, int] = {}
    for s in reversed(used):
        k = first.get(root[s.names[0]], len(steps))
        due = min(due, times[k]) - moved(s.args, p) / rate * LATE
        begins[s] = max((j for j in range(k) if times[j] <= due), default=0) - 1
    for s in used:  # in the order of first use
        source, = (v for v in values_in(s.args) if isinstance(v, Value))
        behind.setdefault(begins[s], []).extend(
            (Fresh(s.names[0]), Copy(s.names[0], source, 1, fetches=True)))


def moved(args: object, p: Program) -> float:
    return sum(nbytes(p.places[v.buffer]) or 0 for v in values_in(args) if v.buffer in p.places)
