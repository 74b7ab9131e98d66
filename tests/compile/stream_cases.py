"""What test_streams.py runs in a process of its own: streams and events inside compiled functions, on the device."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flambeau
import flambeau.debug
from flambeau.config import config
from flambeau.ir.program import Call, Copy, Launch, Record, Synchronize, Wait
from flambeau.report.program import Explanation, summarise
from flambeau.runtime.recordable import obstacles

DEV = "flambeau"
RUNS = 20
N = 64


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    flambeau.enable_device()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with config.override(verify=True):
        yield
    torch.accelerator.synchronize()


def here() -> torch.Stream:
    return torch.accelerator.current_stream()


def sides(count: int) -> list[torch.Stream]:
    return [torch.Stream(device=DEV) for _ in range(count)]


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="flambeau", fullgraph=True)


def delay(streams: list[torch.Stream], chance: random.Random) -> None:
    """Work of random length on each stream, so that what does not wait comes too early."""
    for s in (here(), *streams):
        if chance.random() < 0.6:
            with s:
                x = torch.ones(N * chance.randint(1, 5), N * chance.randint(1, 5), device=DEV)
                for _ in range(chance.randint(1, 3)):
                    x = (x @ x.T) @ x * 1e-4


def check(f: Callable[..., Any], streams: list[torch.Stream], runs: int = RUNS) -> list[flambeau.debug.Compiled]:
    """Equal to eager, which is not delayed, in many runs with fresh data and streams that are busy."""
    chance, made = random.Random(1), compiled(f)
    with torch.no_grad(), flambeau.debug.collect() as graphs:
        for _ in range(runs):
            x, y = torch.randn(N, N, device=DEV), torch.randn(N, N, device=DEV)
            torch.accelerator.synchronize()
            want = f(x, y)
            torch.accelerator.synchronize()
            delay(streams, chance)
            got = made(x, y)
            for a, b in zip(want, got, strict=True) if isinstance(want, tuple) else ((want, got),):
                torch.testing.assert_close(b.cpu(), a.cpu(), rtol=1e-5, atol=1e-5)
    return with_streams(graphs)


def with_streams(graphs: list[flambeau.debug.Compiled]) -> list[flambeau.debug.Compiled]:
    """Without those of eager operators of the device."""
    return [g for g in graphs if g.program.streams]


def streams_of(graph: flambeau.debug.Compiled) -> list[int]:
    return [s.stream for s in graph.program.steps if isinstance(s, (Launch, Call, Copy))]


# ---- what is carried ---------------------------------------------------------------------------------------


def test_fork_and_join() -> None:
    side, = sides(1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x * 2
        side.wait_stream(here())
        with side:
            b = (a + 1).sin()
        c = a.cos()
        here().wait_stream(side)
        return b * y + c

    graph, = check(f, [side])
    assert streams_of(graph) == [0, 1, 0, 0]  # nothing is fused across a stream, or across a wait
    text = str(Explanation([summarise(graph)]))
    assert "stream 1 waits for event 0" in text and "stream 0 waits for event 1" in text
    assert next(obstacles(graph.program, graph.gm, torch.device(DEV, 0))) == "it runs on several streams"


def test_three_streams_read_what_one_makes() -> None:
    """A producer has several consumers, and each waits."""
    a, b, c = sides(3)

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with a:
            made = (x @ y).sin()
        b.wait_stream(a)
        c.wait_stream(a)
        with b:
            one = made + 1
        with c:
            two = made * 2
        here().wait_stream(b)
        here().wait_stream(c)
        return one + two, made

    check(f, [a, b, c])


def test_waits_that_the_function_forgot_are_there() -> None:
    a, b = sides(2)

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with a:
            made = (x @ y).sin()
        with b:
            one = made + 1
        return one * 2, made

    program = compiled(f)
    x, y = torch.randn(N, N, device=DEV), torch.randn(N, N, device=DEV)
    with torch.no_grad(), flambeau.debug.collect() as graphs:
        for _ in range(RUNS):
            delay([a, b], random.Random(3))
            one, made = program(x, y)
            want = (x.cpu() @ y.cpu()).sin()
            torch.testing.assert_close((one.cpu(), made.cpu()), ((want + 1) * 2, want), rtol=1e-4, atol=1e-4)
    graph, = with_streams(graphs)
    assert any("waits for step" in note for note in graph.program.notes)


def test_events_that_are_recorded_again() -> None:
    side, = sides(1)
    forth, back = torch.Event(device=DEV), torch.Event(device=DEV)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x.sin()
            forth.record()
            with side:
                forth.wait()
                x = x * y
                back.record()
            back.wait()
        return x + 1

    check(f, [side])


def test_an_event_of_the_function_and_waits_of_the_host() -> None:
    side, = sides(1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = (x @ y).sin()
            a.record_stream(here())
        done = side.record_event()
        done.synchronize()
        b = a * 2
        side.synchronize()
        torch.accelerator.synchronize()
        return b + 1

    graph, = check(f, [side])
    assert sum(isinstance(s, Synchronize) for s in graph.program.steps) == 3


def test_an_event_from_before_and_one_for_later() -> None:
    side, = sides(1)
    before, after = torch.Event(device=DEV), torch.Event(device=DEV)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_event(before)
        with side:
            a = x + y
            after.record()
        return a

    made = compiled(f)
    with torch.no_grad(), flambeau.debug.collect() as graphs:
        for k in range(RUNS):
            x, y, z = torch.zeros(N, N, device=DEV), torch.ones(N, N, device=DEV), torch.zeros(N, N, device=DEV)
            torch.accelerator.synchronize()
            x.add_(k)
            before.record()
            got = made(x, y)
            other, = sides(1)
            other.wait_event(after)
            with other:
                z.copy_(got)
                assert z.cpu().unique().tolist() == [k + 1]
    graph, = with_streams(graphs)
    steps = graph.program.steps
    assert any(isinstance(s, Wait) and s.event is None for s in steps)
    assert any(isinstance(s, Record) and s.place is not None for s in steps)


def test_a_call_brings_its_own_streams() -> None:
    """Dynamo guards streams by their type alone: the one to use is that of the call."""

    def f(x: torch.Tensor, side: torch.Stream) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            return (x @ x).sin()

    made = compiled(f)
    x = torch.randn(N, N, device=DEV)
    with torch.no_grad():
        for side in sides(4):
            delay([side], random.Random(2))
            got = made(x, side)
            torch.testing.assert_close(got.cpu(), (x.cpu() @ x.cpu()).sin(), rtol=1e-4, atol=1e-4)


def test_the_callers_stream_is_that_of_the_call_and_stays() -> None:
    side, outer = sides(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        with side:
            side.wait_stream(outer)
            b = a * 2
        with torch.flambeau.stream(None):
            return b - 1

    made = compiled(f)
    with torch.no_grad():
        x = torch.ones(N, device=DEV)
        outer.wait_stream(here())
        with outer:
            got = made(x)
            assert here() == outer
        outer.synchronize()
        assert got.cpu().unique().tolist() == [3]


def test_two_threads_with_streams_of_their_own() -> None:
    def f(x: torch.Tensor, y: torch.Tensor, side: torch.Stream) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = x @ y
        here().wait_stream(side)
        return a + x

    made = compiled(f)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        own, = sides(1)
        with torch.no_grad():
            for k in range(RUNS):
                x = torch.full((N, N), float(seed + k), device=DEV)
                if not torch.equal(made(x, torch.eye(N, device=DEV), own).cpu(), 2 * x.cpu()):
                    wrong.append((seed, k))

    work(0)
    threads = [threading.Thread(target=work, args=(100 * t,)) for t in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_compiled_function_inside_another() -> None:
    side, = sides(1)

    @torch.compile(backend="flambeau")
    def inner(x: torch.Tensor) -> torch.Tensor:
        with side:
            return x.exp()

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        a = inner(x)
        here().wait_stream(side)
        return a * y

    check(f, [side])


def test_what_a_function_writes_to_its_inputs_on_a_side_stream() -> None:
    side, = sides(1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with side:
            y.add_(x @ x)
        return x * 2

    made = compiled(f)
    with torch.no_grad():
        for _ in range(RUNS):
            x, y = torch.eye(N, device=DEV), torch.zeros(N, N, device=DEV)
            delay([side], random.Random(4))
            made(x, y)
            with side:
                assert torch.equal(y.cpu(), torch.eye(N))


# ---- what is refused ---------------------------------------------------------------------------------------


def test_gradients_are_refused() -> None:
    side, = sides(1)

    def f(x: torch.Tensor) -> torch.Tensor:
        with side:
            y = x.sin()
        here().wait_stream(side)
        return y * 2

    x = torch.ones(8, device=DEV, requires_grad=True)
    with pytest.raises(flambeau.errors.UnsupportedError, match="gradient"):
        compiled(f)(x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(f)(x).cpu(), x.detach().cpu().sin() * 2)


def test_writes_to_inputs_behind_a_wait_are_refused() -> None:
    """Torch itself cannot hand them over."""
    side, = sides(1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            y.add_(x)
        here().wait_stream(side)
        return y * 2

    with pytest.raises(flambeau.errors.UnsupportedError, match="streams inside this compiled function"):
        compiled(f)(torch.ones(8, device=DEV), torch.ones(8, device=DEV))


def test_tensors_of_other_devices_are_refused() -> None:
    side, = sides(1)

    def f(x: torch.Tensor) -> torch.Tensor:
        with side:
            return x.cpu() + 1

    with pytest.raises(flambeau.errors.UnsupportedError, match="cpu"):
        compiled(f)(torch.ones(8, device=DEV))


def test_a_question_to_a_stream_is_refused() -> None:
    """Dynamo asks it once, while it traces, and compiles one of the two branches."""
    side = torch.Stream(device=DEV)

    def f(x: torch.Tensor) -> torch.Tensor:
        with side:
            y = x + 1
        return y if side.query() else y * 2

    with pytest.raises(flambeau.errors.UnsupportedError, match=r"Stream\.query"):
        torch.compile(f, backend="flambeau", fullgraph=True)(torch.ones(8, device=DEV))


def test_streams_in_a_checkpoint_are_refused() -> None:
    side = torch.Stream(device=DEV)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with side:
            y = x.sin()
        torch.accelerator.current_stream().wait_stream(side)
        return y

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False)

    with pytest.raises(flambeau.errors.UnsupportedError, match="checkpoint"):
        torch.compile(f, backend="flambeau", fullgraph=True)(torch.ones(8, device=DEV, requires_grad=True))
