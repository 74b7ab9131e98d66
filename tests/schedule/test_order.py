"""The checker of streams accepts ordered programs, and rejects those that lack a wait."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flambeau.errors import OrderError
from flambeau.ir.index import as_index
from flambeau.ir.nodes import Graph, Value
from flambeau.ir.program import (
    BufferPlan,
    Copy,
    Keep,
    Launch,
    LoopKernel,
    Param,
    Program,
    Record,
    Step,
    Synchronize,
    Wait,
)
from flambeau.runtime.plain_program import from_plain, to_plain
from flambeau.schedule.memory import ALIGN, ProgramDraft
from flambeau.schedule.streams.order import accesses, check_order, extent, is_single
from flambeau.schedule.streams.waits import plan_streams

SIZE = as_index(ALIGN // 4)


def kernel(reads: int, writes: int) -> LoopKernel:
    params = tuple(Param(f"p{k}", torch.float32, k >= reads) for k in range(reads + writes))
    return LoopKernel((), (), None, (), (), frozenset(), params, ())


KERNELS = tuple(kernel(r, w) for r in range(3) for w in range(3))


def launch(stream: int, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> Launch:
    return Launch(KERNELS.index(kernel(len(reads), len(writes))), (*reads, *writes), stream=stream)


def buffer(name: str, place: str = "alloc", offset: int = 0, over: str = "") -> BufferPlan:
    return BufferPlan(name, torch.float32, (SIZE,), (as_index(1),), place, offset, over)


def program(*steps: Step, frees: dict[int, tuple[str, ...]] | None = None, **places: BufferPlan) -> Program:
    names = dict.fromkeys(n for s in steps for n in accesses(s, KERNELS))
    buffers = [places.get(n) or buffer(n, "input" if n.startswith("in") else "alloc") for n in names]
    return Program(tuple(n for n in names if n.startswith("in")), (), (), KERNELS, steps, tuple(buffers), (),
                   frees=tuple((frees or {}).get(k, ()) for k in range(len(steps))))


def whole(name: str) -> Value:
    return Value(name, (SIZE,), torch.float32, ())


# ---- what orders steps -----------------------------------------------------------------------------------


def test_one_stream_is_one_order() -> None:
    check_order(program(launch(0, (), ("a",)), launch(0, ("a",), ("b",)), launch(0, ("b",), ("a",))))


def test_what_is_missing_is_named() -> None:
    made = replace(launch(0, (), ("a",)), origins=("mul",))
    read = replace(launch(1, ("a",), ("b",)), origins=("add", "sin"))
    with pytest.raises(OrderError) as error:
        check_order(program(made, read))
    text = str(error.value)
    assert "step 1 (kernel of add, sin) on stream 1 reads a" in text and "step 0 (kernel of mul) on stream 0" in text
    assert "stream 1 has to wait, before step 1, for an event that stream 0 records after step 0" in text


KEPT = Keep("a", 1), Keep("b", 0)  # who uses memory of another stream, until the end


@pytest.mark.parametrize("between", [
    (Record(0, 0), Wait(0, 1)),
    (Synchronize(stream=0),),
    (Synchronize(),),
    (Record(0, 0), Synchronize(event=0)),
    (Record(0, 0), Wait(0, 2), Record(1, 2), Wait(1, 1)),  # through a third stream
])
def test_events_and_the_host_order(between: tuple[Step, ...]) -> None:
    check_order(program(launch(0, (), ("a",)), *between, launch(1, ("a",), ("b",)), *KEPT))


@pytest.mark.parametrize("between", [
    (Record(0, 1), Wait(0, 0)),  # the other way round
    (Record(0, 0), Wait(0, 2)),  # somebody else waits
    (Synchronize(stream=1),),
    (Wait(None, 1, 3),),  # for what the caller recorded before
    (Synchronize(place=3),),
])
def test_what_does_not_order(between: tuple[Step, ...]) -> None:
    with pytest.raises(OrderError):
        check_order(program(launch(0, (), ("a",)), *between, launch(1, ("a",), ("b",)), *KEPT))


def test_an_event_is_what_was_there_when_it_was_recorded() -> None:
    with pytest.raises(OrderError):
        check_order(program(Record(0, 0), launch(0, (), ("a",)), Wait(0, 1), launch(1, ("a",), ("b",)), *KEPT))


def test_an_event_that_nobody_recorded() -> None:
    with pytest.raises(OrderError, match="before it is recorded"):
        check_order(program(launch(0, (), ("a",)), Wait(7, 1), launch(1, ("a",), ("b",))))


# ---- what memory is used for ------------------------------------------------------------------------------


def test_two_readers_need_no_order() -> None:
    check_order(program(launch(0, ("in0",), ("a",)), launch(1, ("in0",), ("b",)), Keep("in0", 1)))


@pytest.mark.parametrize("second", [launch(1, (), ("in0",)), Copy("in0", whole("in1"), 1)])
def test_an_input_that_is_written_while_it_is_read(second: Step) -> None:
    kept = [Keep(name, 1) for name in accesses(second, KERNELS)]
    with pytest.raises(OrderError, match="in0"):
        check_order(program(launch(0, ("in0",), ("a",)), second, *kept))
    check_order(program(launch(0, ("in0",), ("a",)), Record(0), Wait(0, 1), second, *kept))


def test_a_place_in_the_arena_that_two_have() -> None:
    places = {"a": buffer("a", "arena"), "b": buffer("b", "arena")}
    enter, leave = (Record(0, 0), Wait(0, 1)), (Record(1, 1), Wait(1, 0))
    first, second = launch(0, (), ("a",)), launch(1, (), ("b",))
    with pytest.raises(OrderError):
        check_order(program(*enter, first, second, *leave, **places))
    check_order(program(first, *enter, second, *leave, **places))
    apart = {**places, "b": buffer("b", "arena", ALIGN)}
    check_order(program(*enter, first, second, *leave, **apart))


@pytest.mark.parametrize("steps", [(Record(0, 0), Wait(0, 1)), (Record(1, 1), Wait(1, 0))], ids=["start", "end"])
def test_the_arena_is_the_callers_before_and_after(steps: tuple[Step, ...]) -> None:
    used = launch(1, (), ("a",))
    first = isinstance(steps[0], Record) and steps[0].stream == 0
    with pytest.raises(OrderError, match="arena|start"):
        check_order(program(*(steps if first else ()), used, *(() if first else steps), a=buffer("a", "arena")))


def test_a_step_that_writes_where_it_reads() -> None:
    """A loop that writes other elements than it reads could read its own results."""
    places = {"a": buffer("a", "arena"), "b": buffer("b", "arena")}
    steps = launch(0, (), ("a",)), launch(0, ("a",), ("b",)), Record(0, 0)
    with pytest.raises(OrderError, match="the same memory"):
        check_order(program(*steps, **places))
    check_order(program(*steps, **{**places, "b": buffer("b", "arena", ALIGN)}))
    check_order(program(*steps, **{**places, "b": buffer("b", "over", over="a")}))


def test_memory_over_another_is_the_same() -> None:
    read = launch(0, ("a",), ("c",))
    over = {"b": buffer("b", "over", over="a")}
    with pytest.raises(OrderError):
        check_order(program(launch(0, (), ("a",)), Record(0), Wait(0, 1), read, launch(1, (), ("b",)), **over))


def test_memory_is_freed_behind_all_use_of_it() -> None:
    made, used = launch(0, (), ("a",)), launch(1, ("a",), ("b",))
    steps = made, Record(0, 0), Wait(0, 1), used
    with pytest.raises(OrderError, match="frees"):
        check_order(program(*steps, frees={3: ("a",)}))
    check_order(program(*steps, Keep("a", 1), frees={4: ("a",)}))
    check_order(program(*steps, Record(1, 1), Wait(1, 0), frees={5: ("a",)}))
    with pytest.raises(OrderError, match="the end"):  # where it goes, if nobody frees it before
        check_order(program(*steps))


def test_memory_is_not_used_once_it_is_freed() -> None:
    steps = launch(0, (), ("a",)), launch(0, ("a",), ("b",)), launch(0, ("a",), ("c",)), Record(0, 0)
    with pytest.raises(OrderError, match="freed before"):
        check_order(program(*steps, frees={1: ("a",)}))


# ---- against the definition ------------------------------------------------------------------------------


def happens_before(p: Program) -> set[tuple[int, int]]:
    """Pairs of steps of which one ends before the other begins, straight from what the steps mean."""
    end = len(p.steps)
    edges: set[tuple[int, int]] = set()
    stream = {-1: 0, end: 0} | {k: s.stream for k, s in enumerate(p.steps) if isinstance(s, (Launch, Copy))}
    places = {**stream, **{k: s.stream for k, s in enumerate(p.steps) if isinstance(s, (Record, Wait))}}
    for a, b in itertools.combinations(sorted(places), 2):
        if places[a] == places[b]:
            edges.add((a, b))
    for k, s in enumerate(p.steps):
        recorded = {s.event: k for k, s in enumerate(p.steps) if isinstance(s, Record)}
        if isinstance(s, Wait) and s.event is not None:
            edges.add((recorded[s.event], k))
        if isinstance(s, Synchronize):
            edges |= {(k, later) for later in places if later > k}
            edges |= {(k, j) for j, t in enumerate(p.steps) if j > k and isinstance(t, Synchronize)}
            if s.event is not None:
                edges.add((recorded[s.event], k))
            elif s.place is None:
                edges |= {(j, k) for j in places if j < k and s.stream in (None, places[j])}
    after: dict[int, set[int]] = {}
    for a in sorted({x for pair in edges for x in pair}, reverse=True):  # all edges go forward
        nexts = {b for x, b in edges if x == a}
        after[a] = nexts.union(*(after.get(b, set()) for b in nexts))
    return {(a, b) for a, there in after.items() for b in there}


def is_ordered(p: Program) -> bool:
    """Whether all conflicting uses of memory are, pair by pair."""
    before, end = happens_before(p), len(p.steps)
    uses: list[tuple[int, object, bool]] = []
    for k, s in enumerate(p.steps):
        for name, writes in accesses(s, p.kernels).items():
            b = p.places[name]
            cells = range(*extent(b), ALIGN) if b.place == "arena" else (name,)
            uses += [(k, cell, writes) for cell in cells]
    arena = {cell for _, cell, _ in uses if isinstance(cell, int)}
    uses += [(k, cell, True) for cell in arena for k in (-1, end)]
    for (j, a, w), (k, b, v) in itertools.combinations(uses, 2):
        # In one step two buffers must lie apart.
        if a == b and (w or v) and (j == k or (min(j, k), max(j, k)) not in before):
            return False
    return True


@st.composite
def drawn(draw: st.DrawFn) -> Program:
    """A program in which nothing is freed: the caller has all that is not in the arena."""
    names = [f"b{k}" for k in range(draw(st.integers(1, 4)))]
    streams = st.integers(0, draw(st.integers(1, 3)))
    steps: list[Step] = []
    events = 0
    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(("launch", "launch", "launch", "record", "wait", "wait", "wait", "host")))
        if kind == "record" or (kind == "wait" and not events):
            steps.append(Record(events, draw(streams)))
            events += 1
        elif kind == "wait":
            steps.append(Wait(draw(st.integers(0, events - 1)), draw(streams)))
        elif kind == "host":
            steps.append(draw(st.sampled_from((Synchronize(), Synchronize(stream=draw(streams))))))
        else:
            used = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
            cut = draw(st.integers(0, 1))
            steps.append(launch(draw(streams), tuple(used[:cut]), tuple(used[cut:])))
    arena = draw(st.booleans())
    places = {n: buffer(n, "arena", ALIGN * draw(st.integers(0, 2))) if arena else buffer(n) for n in names}
    used = {n for s in steps for n in accesses(s, KERNELS)}
    kept = () if arena else tuple(Keep(n, t) for n in used for t in range(4))
    return program(*steps, *kept, **places)


@given(drawn())
@settings(max_examples=400, deadline=None)
def test_the_checker_agrees_with_the_definition(p: Program) -> None:
    assume(not is_single(p))  # these are in order, and the checker looks at nothing else of them
    found = True
    try:
        check_order(p)
    except OrderError:
        found = False
    assert found == is_ordered(p), p


# ---- waits that are needed --------------------------------------------------------------------------------


@st.composite
def planned(draw: st.DrawFn) -> Program:
    """Random steps on random streams, as `plan_streams` orders them and plans their memory."""
    count, streams = draw(st.integers(4, 24)), draw(st.integers(2, 4))
    there = ["in0", "in1"]
    steps: list[Step] = []
    events = 0
    for k in range(count):
        if draw(st.integers(0, 5)) == 0:  # the user's own
            stream = draw(st.integers(0, streams - 1))
            steps += [Record(events, stream), Wait(events, draw(st.integers(0, streams - 1)))]
            events += 1
        reads = tuple(draw(st.lists(st.sampled_from(there), min_size=0, max_size=2, unique=True)))
        if draw(st.integers(0, 7)) == 0:
            made = draw(st.sampled_from([n for n in there if n not in reads] or ["in2"]))  # once more
        else:
            made = f"b{k}"
        steps.append(launch(draw(st.integers(0, streams - 1)), reads, (made,)))
        there = list(dict.fromkeys([*there, made]))
    names = list(dict.fromkeys(n for s in steps for n in accesses(s, KERNELS)))
    kinds = {n: "input" if n.startswith("in") else draw(st.sampled_from(("arena", "arena", "alloc"))) for n in names}
    graph = Graph(inputs=[n for n in names if kinds[n] == "input"], streams=list(range(1, streams)))
    if draw(st.booleans()):
        graph.arriving = list(graph.inputs)
        graph.leaving = draw(st.lists(st.sampled_from(names), unique=True))
    outputs = [whole(n) for n in graph.leaving]
    for n in graph.leaving:  # the caller has it: no place in the arena
        kinds[n] = "input" if kinds[n] == "input" else "output"
    draft = ProgramDraft(list(KERNELS), steps, outputs, {n: buffer(n, kind) for n, kind in kinds.items()})
    plan_streams(draft, graph, None, len(steps))
    return draft.finished(graph)


def passes(p: Program) -> bool:
    try:
        check_order(p)
        return True
    except OrderError:
        return False


def without(p: Program, k: int) -> Program:
    return replace(p, steps=(*p.steps[:k], *p.steps[k + 1:]),
                   frees=(*p.frees[:k - 1], (*p.frees[k - 1], *p.frees[k]), *p.frees[k + 1:]) if k else p.frees[1:])


def test_a_program_without_one_of_its_waits_is_rejected() -> None:
    """The waits that were added are all needed: each was, when it was, by two steps that nothing ordered."""
    removed = 0

    @given(planned())
    @settings(max_examples=300, deadline=None)
    def each(p: Program) -> None:
        nonlocal removed
        check_order(p)
        assert from_plain(to_plain(p)) == p
        own = {s.event for s in p.steps if isinstance(s, Record)} - users_events(p)
        for k, s in enumerate(p.steps):
            if isinstance(s, Wait) and s.event in own:
                assert not passes(without(p, k)), (k, s)
                removed += 1

    each()
    assert removed >= 500


def users_events(p: Program) -> set[int]:
    """Those whose wait follows the record at once; ours are recorded behind a launch, and waited for before one."""
    return {s.event for s, t in zip(p.steps, p.steps[1:]) if isinstance(s, Record) and isinstance(t, Wait)
            and t.event == s.event}
