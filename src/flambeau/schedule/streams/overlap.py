"""Runs steps of a program in parallel: moves some to streams of its own, by modelled times and critical paths.

    overlapped(program, tuning)       # a Program with the same kernels, or None where nothing is to be gained

A step depends on the steps whose memory it uses. Within these constraints a list schedule is made: the step with the
longest path to the end first, on the stream where it can begin soonest. The model knows what a step moves and computes,
and what share of the machine its results fill: two steps that fill it run one after the other, whatever their streams.
A change of stream costs a wait. Steps keep an order that one stream could run; waits, memory and the check of their
order are the same as for all programs with streams (`waits.py`, `order.py`). Every step computes what it did, so bits
are equal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flambeau.ir.nodes import Graph
from flambeau.ir.program import (
    WORK,
    BufferPlan,
    Call,
    ContractKernel,
    Launch,
    Program,
    Record,
    Step,
    Synchronize,
    Wait,
    values_in,
)
from flambeau.ir.tuning import Tuning

from ..memory import ProgramDraft, nbytes, span
from .order import accesses, check_order, count_streams, is_single, roots
from .waits import plan_overlap

STREAMS = (2, 3, 4)  # the numbers of streams to try


@dataclass(frozen=True)
class Cost:
    """The time of a step by itself in nanoseconds, and the share of the machine that it keeps busy."""

    time: float
    share: float


@dataclass(frozen=True)
class Lane:
    """The stream of a step, and its modelled start and end."""

    stream: int
    start: float
    end: float


def overlapped(p: Program, tuning: Tuning, fixed: float | None = None) -> Program | None:
    """The program on several streams, or None. `fixed`: least nanoseconds per step, by default of a host launch."""
    work = [s for s in p.steps if isinstance(s, WORK)]
    if not is_single(p) or len(work) < 3:
        return None
    costs = [cost(s, p, tuning, tuning.launch if fixed is None else fixed) for s in work]
    before = dependences(p, work)
    lanes = min((lane_up(costs, before, count, tuning.stream_wait) for count in STREAMS),
                key=lambda found: max(x.end for x in found))
    alone, together = sum(c.time for c in costs), max(x.end for x in lanes)
    if together > alone * (1 - tuning.overlap_gain / 100):
        return None
    order = sorted(range(len(work)), key=lambda k: (lanes[k].start, k))
    used = {s: k for k, s in enumerate(dict.fromkeys([0, *(lanes[k].stream for k in order)]))}
    graph = Graph(list(p.inputs), list(p.arguments), dict(p.numbers), seeds=list(p.seeds),
                  streams=[-k for k in range(1, len(used))], arriving=list(p.inputs), leaving=results(p))
    draft = ProgramDraft(list(p.kernels), [replace(work[k], stream=used[lanes[k].stream]) for k in order],
                         list(p.outputs), in_arena(p), notes=list(p.notes))
    draft.notes.append(f"{len(used)} streams: {alone / 1e3:.0f} us one after the other, {together / 1e3:.0f} us side "
                       "by side, as modelled")
    plan_overlap(draft, graph)
    made = draft.finished(graph)
    check_order(made)
    return made


def results(p: Program) -> list[str]:
    """The buffers that the caller uses afterwards, on its own stream."""
    written = [name for s in p.steps for name, writes in accesses(s, p.kernels).items() if writes and name in p.inputs]
    return list(dict.fromkeys([*(v.buffer for v in values_in(p.outputs)), *written]))


def in_arena(p: Program) -> dict[str, BufferPlan]:
    """The buffers, with all intermediates of known size in the arena, as allocators keep memory of streams separate."""
    shared = {v.buffer for s in p.steps if isinstance(s, Call)
              and (s.aliases or any(w for n, w in accesses(s, p.kernels).items() if n not in s.names))
              for v in values_in((s.args, s.kwargs))}
    over = {b.over for b in p.buffers}
    return {b.name: replace(b, place="arena") if b.place == "alloc" and nbytes(b) is not None
            and all(x.is_const for x in (*b.shape, *b.strides)) and b.name not in shared and b.name not in over else b
            for b in p.buffers}


# ---- the model ---------------------------------------------------------------------------------------------


def cost(s: Step, p: Program, tuning: Tuning, fixed: float) -> Cost:
    used = accesses(s, p.kernels)
    sizes = {name: nbytes(p.places[name]) or 0 for name in used if name in p.places}
    moved = sum(sizes.values())
    made = max((span(p.places[name]).bounds()[1] or 0 for name, written in used.items()
                if written and name in p.places), default=0)
    operations, fills = 0.0, tuning.filled
    if isinstance(s, Launch) and isinstance(kernel := p.kernels[s.kernel], ContractKernel):
        variables = (*kernel.batch, *kernel.rows, *kernel.columns, *kernel.depth)
        operations, fills = 2.0 * math.prod(v.size.bounds()[1] or 1 for v in variables), tuning.filled_product
    elif isinstance(s, Call) and s.kind == "library":
        operations, fills = products(s, p, made), tuning.filled_product
    share = min(1.0, max(made / fills, 1 / 128))
    return Cost(fixed + max(moved / tuning.memory_rate, operations / tuning.product_rate / share), share)


def products(s: Call, p: Program, made: int) -> float:
    """The multiplications and additions of a library call. For an m x k times an k x n matrix, the root of the product
    of the three sizes is m k n; convolutions and attention come near it."""
    given = sorted((span(p.places[v.buffer]).bounds()[1] or 0 for v in values_in((s.args, s.kwargs))
                    if v.buffer in p.places), reverse=True)[:2]
    return 2.0 * math.sqrt(math.prod(given) * max(made, 1)) if len(given) == 2 else 0.0


def timeline(p: Program, tuning: Tuning) -> dict[int, Lane]:
    """When each step of a program with streams would run, according to the model."""
    now = [0.0] * count_streams(p)
    events: dict[int, float] = {}
    out: dict[int, Lane] = {}
    for k, s in enumerate(p.steps):
        if isinstance(s, WORK):
            start = now[s.stream]
            now[s.stream] += cost(s, p, tuning, tuning.launch_recorded).time
            out[k] = Lane(s.stream, start, now[s.stream])
        elif isinstance(s, Record):
            events[s.event] = now[s.stream]
        elif isinstance(s, Wait) and s.event is not None:
            now[s.stream] = max(now[s.stream], events[s.event] + tuning.stream_wait)
        elif isinstance(s, Synchronize):
            now = [max(now)] * len(now)
    return out


# ---- the schedule ------------------------------------------------------------------------------------------


def dependences(p: Program, work: Sequence[Step]) -> list[set[int]]:
    """The steps that each step must follow. Calls other than to a library may do more than their schema says (draw
    random numbers), so they keep their order."""
    root = roots(p)
    written: dict[str, int] = {}
    read: dict[str, list[int]] = {}
    out: list[set[int]] = []
    last: int | None = None
    for k, s in enumerate(work):
        before: set[int] = set()
        for name, writes in accesses(s, p.kernels).items():
            r = root.get(name, name)
            before |= {written[r]} if r in written else set()
            if writes:
                before |= {*read.pop(r, ())}
        for name, writes in accesses(s, p.kernels).items():
            r = root.get(name, name)
            if writes:
                written[r] = k
            else:
                read.setdefault(r, []).append(k)
        if isinstance(s, Call) and s.kind != "library":
            before |= set() if last is None else {last}
            last = k
        out.append(before - {k})
    return out


def lane_up(costs: Sequence[Cost], before: Sequence[set[int]], streams: int, wait: float) -> list[Lane]:
    """Compute a list schedule: a stream, a start and an end for each step."""
    after: list[list[int]] = [[] for _ in costs]
    for k, some in enumerate(before):
        for j in some:
            after[j].append(k)
    way = [0.0] * len(costs)  # modelled time from a step's start to the end
    for k in reversed(range(len(costs))):
        way[k] = costs[k].time + max((way[j] for j in after[k]), default=0.0)
    missing = [len(some) for some in before]
    ready = [(-way[k], k) for k, n in enumerate(missing) if not n]
    heapq.heapify(ready)
    free, filled = [0.0] * streams, 0.0  # when each stream, and the whole machine, become idle
    lanes: list[Lane | None] = [None] * len(costs)
    while ready:
        _, k = heapq.heappop(ready)
        found: list[tuple[float, bool, int]] = []
        for s in range(streams):
            start, near = free[s], False
            for j in before[k]:
                lane = lanes[j]
                assert lane is not None
                start = max(start, lane.end + (wait if lane.stream != s else 0.0))
                near = near or lane.stream == s
            if not before[k] and s:
                start = max(start, wait)  # after the start of the run
            found.append((max(start, filled) if costs[k].share > 0.5 else start, not near, s))
        start, _, s = min(found)
        lanes[k] = Lane(s, start, start + costs[k].time)
        free[s] = start + costs[k].time
        if costs[k].share > 0.5:
            filled = free[s]
        for j in after[k]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, (-way[j], j))
    return [x for x in lanes if x is not None]
