"""Checks that all uses of the same memory in a program happen in a defined order.

Streams run in parallel. The following is ordered: the steps of one stream; work on a stream after a wait, behind
everything before the event; and everything that the host enqueues after it has waited itself. All else may overlap. So
each step has a clock: for each stream, the number of its steps that are certain to have run when the step begins. One
step is before another if the other's clock counts it. Two steps that use the same memory must be ordered if one of them
writes. This concerns:

- a buffer's elements, also under another name (overwritten in place, or a view that a call returned);
- a place in the arena that several buffers use in turn: the arena belongs to stream 0, whose earlier runs used it
  before this one begins, and whose later runs use it once this one ends;
- memory returned to the allocator: it belongs to the stream that it was allocated on, which may reuse it immediately.

    check_order(program)      # OrderError names both steps, and the wait that is missing

The time is linear in the number of accesses, times the number of streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flambeau.errors import OrderError
from flambeau.ir.program import (
    WORK,
    AnyKernel,
    BufferPlan,
    Call,
    Copy,
    Fresh,
    Keep,
    Launch,
    Program,
    Record,
    Step,
    Synchronize,
    TableKernel,
    Wait,
    values_in,
)

from ..memory import ALIGN, ProgramDraft, nbytes

Clock = tuple[int, ...]  # for each stream, how many of its steps have run


class Moment(NamedTuple):
    """A step on its stream."""

    step: int  # -1: the start of the run; the number of steps: its end
    stream: int
    clock: Clock  # its own count included

    def after(self, other: Moment) -> bool:
        return self.clock[other.stream] >= other.clock[other.stream]


class Clocks:
    """Tracks what is certain to have run, at each point of a program."""

    def __init__(self, streams: int) -> None:
        self.now = [[0] * streams for _ in range(streams)]
        self.host = [0] * streams
        self.events: dict[int, Clock] = {}

    def step(self, k: int, stream: int) -> Moment:
        """Add a step to a stream: it runs after everything on that stream, and all that the host has waited for."""
        now = self.now[stream]
        join(now, self.host)
        now[stream] += 1
        return Moment(k, stream, tuple(now))

    def pass_by(self, s: Step) -> None:
        """Process a step that orders others."""
        if isinstance(s, Record):
            # Before any wait, an event covers just its own stream, and what the host has waited for.
            self.events[s.event] = joined(self.now[s.stream], self.host)
        elif isinstance(s, Wait):
            if s.event is not None:
                self.wait(s.stream, self.recorded(s.event))
        elif isinstance(s, Synchronize):
            if s.event is not None:
                join(self.host, self.recorded(s.event))
            elif s.place is None:
                for k, now in enumerate(self.now):
                    if s.stream in (None, k):
                        join(self.host, now)

    def recorded(self, event: int) -> Clock:
        if event not in self.events:
            raise OrderError(f"event {event} is waited for before it is recorded")
        return self.events[event]

    def wait(self, stream: int, clock: Clock) -> None:
        join(self.now[stream], clock)


def join(clock: list[int], other: Sequence[int]) -> None:
    for k, n in enumerate(other):
        if n > clock[k]:
            clock[k] = n


def joined(a: Sequence[int], b: Sequence[int]) -> Clock:
    return tuple(map(max, a, b))


# ---- what steps do to memory -----------------------------------------------------------------------------


def accesses(s: Step, kernels: Sequence[AnyKernel]) -> dict[str, bool]:
    """The buffers that a step uses, and whether it may write to each."""
    out: dict[str, bool] = {}

    def use(names: Iterable[str], written: bool) -> None:
        for name in names:
            out[name] = out.get(name, False) or written

    if isinstance(s, Launch):
        kernel = kernels[s.kernel]
        params = kernel.columns if isinstance(kernel, TableKernel) else kernel.params
        rows = len(s.args) // len(params) if params else 0
        for k, p in enumerate(params):
            use(s.args[k * rows : (k + 1) * rows], p.written)
    elif isinstance(s, Copy):
        use((s.src.buffer,), False)
        use((s.dst,), True)
    elif isinstance(s, Fresh):
        use((s.buffer,), True)
    elif isinstance(s, Call):
        use(s.names, True)
        schema = getattr(s.target, "_schema", None)
        if schema is None:  # what it does is unknown
            use((v.buffer for v in values_in((s.args, s.kwargs))), not is_reader(s.target))
        else:
            named = dict(s.kwargs)
            for k, a in enumerate(schema.arguments):
                given: Any = s.args[k] if k < len(s.args) else named.get(a.name)
                use((v.buffer for v in values_in(given)), a.is_write)
    return out


def is_reader(function: Any) -> bool:
    """Whether a function without a schema only reads its arguments: our own (runtime/launch_plan.py) do."""
    return getattr(function, "__module__", type(function).__module__).startswith("flambeau.")


def roots(p: Program | ProgramDraft) -> dict[str, str]:
    """For each buffer the one that owns its memory: itself, unless it overwrites another or is a call's view."""
    places = {b.name: b for b in (p.buffers.values() if isinstance(p, ProgramDraft) else p.buffers)}
    out = {name: name for name in places}

    def root(name: str) -> str:
        while out[name] != name:
            out[name] = out[out[name]]
            name = out[name]
        return name

    for b in places.values():
        if b.over:
            out[root(b.name)] = root(b.over)
    for s in p.steps:
        if isinstance(s, Call) and s.aliases:
            given = [v.buffer for v in values_in((s.args, s.kwargs)) if v.buffer in places]
            for name in (n for n in s.names if n in places):
                for x in given:
                    out[root(name)] = root(x)
    return {name: root(name) for name in places}


def is_single(p: Program | ProgramDraft) -> bool:
    """Whether all steps are on one stream, in program order."""
    return all(isinstance(s, WORK) and s.stream == 0 for s in p.steps)


def count_streams(p: Program | ProgramDraft) -> int:
    return 1 + max((s.stream or 0 for s in p.steps), default=0)


# ---- the check -------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """A piece of memory: its last write, and the reads since then."""

    written: Moment | None = None
    read: dict[int, Moment] = field(default_factory=dict)  # by stream, the latest read

    def conflicts(self, m: Moment, writes: bool) -> Iterator[Moment]:
        if self.written is not None and not m.after(self.written):
            yield self.written
        if writes:
            yield from (other for other in self.read.values() if not m.after(other))

    def use(self, m: Moment, writes: bool) -> None:
        if writes:
            self.written, self.read = m, {}
        else:
            self.read[m.stream] = m


class Memory:
    """The cells of a program: one for each buffer that owns memory, and one for each piece of the arena."""

    def __init__(self, p: Program) -> None:
        self.cells: dict[Any, Cell] = {}
        self.root = roots(p)
        places = {b.name: b for b in p.buffers}
        arena = {name: extent(places[r]) for name, r in self.root.items() if places[r].place == "arena"}
        cuts = sorted({edge for pair in arena.values() for edge in pair})
        index = {edge: k for k, edge in enumerate(cuts)}
        self.pieces = {name: range(index[a], index[b]) for name, (a, b) in arena.items()}
        self.arena = range(max(len(cuts) - 1, 0))

    def of(self, name: str) -> Iterator[Cell]:
        pieces: Iterable[Any] = self.pieces.get(name) or (self.root.get(name, name),)
        return (self.cell(x) for x in pieces)

    def cell(self, key: Any) -> Cell:
        return self.cells.setdefault(key, Cell())


def extent(b: BufferPlan) -> tuple[int, int]:
    """The range of bytes that a buffer occupies in the arena."""
    size = nbytes(b)
    assert size is not None, f"{b.name} is in the arena, and nobody knows how large it is"
    return b.offset, b.offset - (-max(size, 1) // ALIGN) * ALIGN


def check_order(p: Program) -> None:
    """Raise OrderError if two steps use the same memory and nothing orders them."""
    if not is_single(p):
        Check(p).run()


class Check:
    def __init__(self, p: Program) -> None:
        self.p, self.memory = p, Memory(p)
        self.clocks = Clocks(count_streams(p))
        self.owner: dict[str, int] = {}  # by root of the memory: the stream that allocated it
        self.alive: dict[str, int] = {}  # by root: how many of its names are not freed yet
        self.kept: dict[str, set[int]] = {}
        self.gone: set[str] = set()
        for names in p.frees:
            for name in names:
                self.alive[self.memory.root[name]] = self.alive.get(self.memory.root[name], 0) + 1

    def run(self) -> None:
        p, end = self.p, len(self.p.steps)
        start = self.clocks.step(-1, 0)
        for name in (*p.seeds, *p.arriving):
            self.use(name, start, True)
        for piece in self.memory.arena:
            self.memory.cell(piece).use(start, True)
        for k, s in enumerate(p.steps):
            if isinstance(s, WORK):
                m = self.clocks.step(k, s.stream)
                self.check_own(k, s)
                for name, writes in accesses(s, p.kernels).items():
                    self.owner.setdefault(self.memory.root.get(name, name), 0 if name in p.inputs else s.stream)
                    self.use(name, m, writes)
            elif isinstance(s, Keep):
                self.kept.setdefault(self.memory.root[s.buffer], set()).add(s.stream)
            else:
                self.clocks.pass_by(s)
            for name in p.frees[k] if p.frees else ():
                self.free(name, k)
        last = self.clocks.step(end, 0)
        for name in p.leaving:
            self.use(name, last, False)
        for piece in self.memory.arena:
            self.access(self.memory.cell(piece), last, True, "the arena")
        freed = {self.memory.root[name] for names in p.frees for name in names}
        for root in self.owner:
            if root not in freed and root not in self.memory.pieces:
                self.released(root, end)

    def check_own(self, k: int, s: Step) -> None:
        """Check that a step writes to no memory of another buffer that it uses, unless that was planned (`over`)."""
        there: dict[int, tuple[str, bool]] = {}
        for name, writes in accesses(s, self.p.kernels).items():
            for piece in self.memory.pieces.get(name, ()):
                other, wrote = there.setdefault(piece, (name, writes))
                if (writes or wrote) and self.memory.root[other] != self.memory.root[name]:
                    raise OrderError(f"{self.title(k)} uses {name} and {other}, which lie in the same memory")

    def use(self, name: str, m: Moment, writes: bool) -> None:
        if self.memory.root.get(name, name) in self.gone:
            raise OrderError(f"{self.title(m.step)} uses {name}, which was freed before")
        for cell in self.memory.of(name):
            self.access(cell, m, writes, name)

    def access(self, cell: Cell, m: Moment, writes: bool, name: str) -> None:
        for other in cell.conflicts(m, writes):
            self.fail(name, other, m, "writes to" if writes else "reads")
        cell.use(m, writes)

    def free(self, name: str, k: int) -> None:
        root = self.memory.root[name]
        self.alive[root] -= 1
        if not self.alive[root] and root not in self.memory.pieces:
            self.released(root, k)
            self.gone.add(root)

    def released(self, root: str, k: int) -> None:
        """Treat freed memory as written: the allocator may give it to the next work on its stream."""
        owner = self.owner.get(root, 0)
        now = Moment(k, owner, joined(self.clocks.now[owner], self.clocks.host))
        cell = self.memory.cell(root)
        for other in cell.conflicts(now, True):
            if other.stream not in self.kept.get(root, ()):
                self.fail(root, other, now, "frees")

    def fail(self, name: str, first: Moment, second: Moment, does: str) -> None:
        at = "the end of the run" if second.step == len(self.p.steps) else f"step {second.step}"
        raise OrderError(
            f"{self.title(second.step)} on stream {second.stream} {does} {name}, which {self.title(first.step)} on "
            f"stream {first.stream} uses, and nothing orders them: stream {second.stream} has to wait, before {at}, "
            f"for an event that stream {first.stream} records after "
            f"{'the start' if first.step < 0 else f'step {first.step}'}")

    def title(self, k: int) -> str:
        if k < 0:
            return "the start of the run"
        if k == len(self.p.steps):
            return "the end of the run"
        s = self.p.steps[k]
        what = {Launch: "kernel", Call: "call", Copy: "copy"}.get(type(s), "step")
        names = s.origins if isinstance(s, Launch) else (s.origin,) if isinstance(s, Call) else ()
        return f"step {k} ({what}{' of ' + ', '.join(n for n in names if n) if any(names) else ''})"
