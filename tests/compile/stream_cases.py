"""Tests that test_streams.py runs in a separate process: streams and events in compiled functions, on the device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch

import flambeau
import flambeau.debug
from compile.stream_programs import CASES, Case, N, busy, check, delayed, here, recorded_cases, sides
from flambeau.config import config
from flambeau.ir.program import Call, Copy, Launch, Record, Synchronize, Wait
from flambeau.report.program import Explanation, summarise
from flambeau.runtime import executor, watchers
from flambeau.runtime.streams import overlap_choice
from flambeau.targets.base import Recorder, Recording, get_target

DEV = "flambeau"
RUNS = 6


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    flambeau.enable_device()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with config.override(verify=True):
        yield
    torch.accelerator.synchronize()


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="flambeau", fullgraph=True)


def delay(streams: list[torch.Stream], chance: random.Random) -> None:
    for s in (here(), *streams):
        with s:
            busy(DEV, chance)


def with_streams(graphs: list[flambeau.debug.Compiled]) -> list[flambeau.debug.Compiled]:
    """The graphs that use streams, without those of the device's eager operators."""
    return [g for g in graphs if g.program.streams]


def streams_of(graph: flambeau.debug.Compiled) -> list[int]:
    return [s.stream for s in graph.program.steps if isinstance(s, (Launch, Call, Copy))]


def matrices(grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.randn(N, N, device=DEV) / 8 for _ in range(2))
    return x.requires_grad_(grad), y.requires_grad_(grad)


# ---- what is carried ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_eager(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="flambeau: this function uses streams")
        assert check(case, DEV, RUNS) == 0


def test_delays_find_a_wait_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite that cannot fail says nothing."""
    other = executor.Writer.other

    def without_waits(self: Any, s: Any, launched: Any) -> None:
        if not isinstance(s, Wait):
            other(self, s, launched)

    monkeypatch.setattr(executor.Writer, "other", without_waits)
    cases = [c for c in CASES if c.name in ("three_streams_read_what_one_makes", "gradients_through_a_third_stream")]
    assert all(check(c, DEV, 30, share=0.6) for c in cases)


def test_kernels_cross_neither_streams_nor_waits() -> None:
    side, = sides(DEV, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x * 2
        side.wait_stream(here())
        with side:
            b = (a + 1).sin()
        c = a.cos()
        here().wait_stream(side)
        return b * y + c

    with torch.no_grad(), flambeau.debug.collect() as graphs:
        compiled(f)(*matrices())
    graph, = with_streams(graphs)
    assert streams_of(graph) == [0, 1, 0, 0]
    text = str(Explanation([summarise(graph)]))
    assert "stream 1 waits for event 0" in text and "stream 0 waits for event 1" in text


def test_a_gradient_is_on_the_stream_of_what_it_is_the_gradient_of() -> None:
    one, two = sides(DEV, 2)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one.wait_stream(here())
        with one:
            a = x @ y
        two.wait_stream(one)
        with two:
            b = a @ y.detach()
        here().wait_stream(two)
        return (b + a.sin()).sum()

    x, y = matrices(True)
    with flambeau.debug.collect() as graphs:
        compiled(f)(x, y).backward()
    forward, backward = with_streams(graphs)
    by_operator = {name: s.stream for s in backward.program.steps if isinstance(s, (Launch, Call))
                   for name in (s.origins if isinstance(s, Launch) else (s.origin,))}
    products = {name: stream for name, stream in by_operator.items() if name.startswith("mm")}
    assert sorted(products.values()) == [1, 1, 2]  # the products' streams: gradients of x, y, a
    assert by_operator[next(n for n in by_operator if n.startswith("add"))] == 1  # a's gradients meet where a was made
    assert backward.program.ticket and not forward.program.ticket


def test_waits_that_the_function_forgot_are_there() -> None:
    a, b = sides(DEV, 2)

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with a:
            made = (x @ y).sin()
        with b:
            one = made + 1
        return one * 2, made

    program = compiled(f)
    x, y = matrices()
    with torch.no_grad(), flambeau.debug.collect() as graphs:
        for k in range(RUNS):
            delay([a, b], random.Random(k))
            one, made = program(x, y)
            want = (x.cpu() @ y.cpu()).sin()
            torch.testing.assert_close((one.cpu(), made.cpu()), ((want + 1) * 2, want), rtol=1e-4, atol=1e-4)
    graph, = with_streams(graphs)
    assert any("waits for step" in note for note in graph.program.notes)


def test_an_event_from_before_and_one_for_later() -> None:
    side, = sides(DEV, 1)
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
            other, = sides(DEV, 1)
            other.wait_event(after)
            with other:
                z.copy_(got)
                assert z.cpu().unique().tolist() == [k + 1]
    graph, = with_streams(graphs)
    steps = graph.program.steps
    assert any(isinstance(s, Wait) and s.event is None for s in steps)
    assert any(isinstance(s, Record) and s.place is not None for s in steps)


def test_an_event_that_a_function_makes_and_returns() -> None:
    side, = sides(DEV, 1)

    def f(x: torch.Tensor) -> Any:
        side.wait_stream(here())
        with side:
            a = x @ x
        return a, side.record_event()

    made = torch.compile(f, backend="flambeau")
    seen = set()
    with torch.no_grad():
        for _ in range(RUNS):
            x, _ = matrices()
            delay([side], random.Random(5))
            a, done = made(x)
            seen.add(id(done))
            done.synchronize()
            torch.testing.assert_close(a.cpu(), x.cpu() @ x.cpu(), rtol=1e-4, atol=1e-5)


def test_waits_of_the_host_are_steps() -> None:
    case, = (c for c in CASES if c.name == "waits_of_the_host")
    f, _ = case.make(DEV)
    with torch.no_grad(), flambeau.debug.collect() as graphs:
        compiled(f)(*matrices())
    graph, = with_streams(graphs)
    assert sum(isinstance(s, Synchronize) for s in graph.program.steps) == 3


def test_a_backward_may_run_twice() -> None:
    side, = sides(DEV, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = (x @ y).exp()
        here().wait_stream(side)
        return (a * x).sum()

    x, y = matrices(True)
    want = torch.autograd.grad(f(x, y), (x, y))
    loss = compiled(f)(x, y)
    for _ in range(2):
        delay([side], random.Random(6))
        got = torch.autograd.grad(loss, (x, y), retain_graph=True)
        torch.testing.assert_close([g.cpu() for g in got], [g.cpu() for g in want], rtol=1e-4, atol=1e-5)


# ---- recorded ----------------------------------------------------------------------------------------------


class Again(Recording):
    """Replays by running the function again on the recorded arguments, into the recorded results, as a CUDA graph
    does."""

    def __init__(self, run: Any, inputs: list[Any]) -> None:
        self.run, self.inputs, self.results = run, inputs, run(list(inputs))

    def replay(self) -> None:
        results = self.run(list(self.inputs))
        if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in results):
            torch.accelerator.synchronize()  # the host itself copies CPU results below
        for old, new in zip(self.results, results, strict=True):
            if isinstance(old, torch.Tensor) and old is not new:
                old.copy_(new)


class RunsAgain(Recorder):
    made = 0

    def place(self) -> Any:
        return here().stream_id

    def record(self, run: Any, inputs: list[Any], group: Any = None) -> Recording:
        RunsAgain.made += 1
        return Again(run, inputs)


@pytest.mark.parametrize("case", recorded_cases()[::3], ids=lambda c: c.name)
def test_recorded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RunsAgain()
    monkeypatch.setattr(type(get_target("flambeau")), "recorder", lambda self: recorder)
    before = RunsAgain.made
    assert check(case, DEV, RUNS) == 0
    assert RunsAgain.made > before or "writ" in case.name  # other addresses need another recording


def test_what_is_recorded_is_on_streams_of_its_own() -> None:
    case, = (c for c in CASES if c.name == "gradients_through_a_third_stream")
    f, _ = case.make(DEV)
    x, y = matrices(True)
    with flambeau.debug.collect() as graphs:
        torch.compile(f, backend="flambeau", options={"graphs": True})(x, y)[0].sum().backward()
    forward, backward = with_streams(graphs)
    for g in (forward, backward):
        assert all(k < 0 for k in g.program.streams) and g.package.fence is not None
        assert g.package.graphs is not None and not g.package.graphs.obstacle
    assert forward.package.fence.numbers is not None and backward.package.fence.ticket is not None


# ---- automatic ---------------------------------------------------------------------------------------------


def branches(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y).relu() @ x + (y @ x).tanh() @ y + (x @ x).sin() @ y


def automatic(function: Callable[..., Any], *args: torch.Tensor, **options: Any) -> Any:
    return torch.compile(function, backend="flambeau", options={"streams": "auto", **options})(*args)


@pytest.mark.parametrize("several", [0, 1])
def test_one_stream_or_several_have_the_same_bits(several: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_choice, "choice", lambda *_: several)
    x, y = matrices(True)
    want = torch.autograd.grad(torch.compile(branches, backend="flambeau")(x, y).sum(), (x, y))
    with flambeau.debug.collect() as graphs, delayed(DEV, random.Random(2), 0.3):
        for _ in range(RUNS):
            got = torch.autograd.grad(automatic(branches, x, y).sum(), (x, y))
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))
    assert with_streams(graphs) and all(k < 0 for g in with_streams(graphs) for k in g.program.streams)


@pytest.mark.parametrize("several", [0, 1])
def test_what_was_faster_is_taken_from_then_on(several: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []

    def clock(plans: Any, target: Any, kernels: Any, args: list[Any]) -> str:
        measured.append(f"{several} 1.0 1.0")
        return measured[-1]

    monkeypatch.setattr(overlap_choice, "measured", clock)
    ran: list[str] = []

    def watcher(part: watchers.Part, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **named: Any) -> Any:
            ran.append(str(here().stream_id))
            return call(*args, **named)

        return told if part.where else call

    x, y = matrices()
    with config.override(cache_dir=tmp_path / "cache"):
        for turn in range(3):  # as in later processes, which find the graph on disk
            torch.compiler.reset()
            monkeypatch.setattr(watchers, "WATCHERS", [watcher])
            automatic(lambda x, y: branches(x, y) + several, x, y)
            assert len(measured) == 1, turn
    assert (len(set(ran)) > 1) == bool(several)


def test_recordings_take_turns_until_a_clock_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and backwards of one program are replayed with those of the other in between."""
    recorder, forgotten = RunsAgain(), []
    monkeypatch.setattr(type(get_target(DEV)), "recorder", lambda self: recorder)
    monkeypatch.setattr(recorder, "forget", forgotten.append, raising=False)
    monkeypatch.setattr(overlap_choice, "TRIALS", WeakValueDictionary())  # without those of other tests
    monkeypatch.setattr(overlap_choice, "choice", lambda *_: 1)
    x, y = (t.requires_grad_() for t in matrices())
    run = torch.compile(branches, backend="flambeau", options={"streams": "auto", "graphs": True})
    plain = torch.compile(lambda x, y: branches(x, y), backend="flambeau")
    before = RunsAgain.made
    for step in range(2 * overlap_choice.TURNS * overlap_choice.CALLS + 4):
        with torch.no_grad():
            x.mul_(-0.9).add_(y, alpha=0.1)
        x.grad = y.grad = None
        run(x, y).sum().backward()
        if step % 7 == 0:
            want = torch.autograd.grad(plain(x, y).sum(), (x, y))
            assert torch.equal(x.grad.cpu(), want[0].cpu()) and torch.equal(y.grad.cpu(), want[1].cpu()), step
    assert RunsAgain.made >= before + 4  # a forward and a backward of both programs
    assert len(forgotten) == 2 and not overlap_choice.TRIALS  # of the forward and of the backward; nothing is left


def test_the_clock_runs_on_copies_that_lie_as_the_arguments_do(tmp_path: Path) -> None:
    """Programs are made for strides: columns with gaps between them, rows that are one and the same."""
    wide, row = torch.randn(64, 3 * 64, device=DEV) / 8, torch.randn(1, 64, device=DEV) / 8
    x, y = wide[:, 1::3], row.expand(64, 64)
    with config.override(cache_dir=tmp_path / "cache"):
        got = automatic(branches, x, y)
    torch.testing.assert_close(got.cpu(), branches(x.cpu(), y.cpu()), rtol=1e-4, atol=1e-4)
    for t in (x, y):
        made = overlap_choice.copied(t)
        assert made.stride() == t.stride() and torch.equal(made.cpu(), t.cpu())
        assert made.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


# ---- what is not -------------------------------------------------------------------------------------------


def test_what_cannot_be_followed_runs_on_the_callers_stream_between_waits() -> None:
    """AOTAutograd writes a mutated input that needs a gradient behind the graph, on the caller's stream."""
    side, = sides(DEV, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            y.mul_(x @ x)
            done = side.record_event()
        here().wait_event(done)
        return y * 2

    with pytest.warns(RuntimeWarning, match="all of it runs on the caller's.*writes to an input"):
        made = compiled(f)
        for k in range(RUNS):
            x, y = matrices(True)
            want = y.detach().cpu() * (k + 1) * (x.cpu() @ x.cpu()).detach()
            torch.accelerator.synchronize()
            delay([side], random.Random(k))
            with side:  # before the call, only on the side stream
                base = y * (k + 1)
            got = made(x, base)
            with side:  # and after the call
                seen = base.detach() + 0
            side.synchronize()
            torch.testing.assert_close((got.cpu(), seen.cpu()), (want * 2, want), rtol=1e-4, atol=1e-5)


def test_tensors_of_other_devices() -> None:
    side, = sides(DEV, 1)

    def f(x: torch.Tensor) -> torch.Tensor:
        with side:
            return x.cpu() + 1

    with pytest.warns(RuntimeWarning, match="on cpu, in a function that uses streams"):
        assert compiled(f)(torch.ones(8, device=DEV)).tolist() == [2] * 8


def test_a_question_is_no_part_of_a_graph() -> None:
    """Dynamo asks it once, while it traces, and compiles one of the two branches."""
    side = torch.Stream(device=DEV)

    def f(x: torch.Tensor) -> torch.Tensor:
        with side:
            y = x + 1
        return y if side.query() else y * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Stream\.query"):
        compiled(f)(torch.ones(8, device=DEV))


def test_streams_inside_of_a_branch() -> None:
    side = torch.Stream(device=DEV)

    def yes(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            y = x.sin()
        here().wait_stream(side)
        return y

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, yes, lambda x: x.cos(), (x,))

    x = torch.ones(8, device=DEV)
    with pytest.warns(RuntimeWarning, match="streams inside of cond"), torch.no_grad():
        torch.testing.assert_close(compiled(f)(x).cpu(), x.cpu().sin())


def test_without_changes_to_torch_streams_are_refused() -> None:
    side, = sides(DEV, 1)

    def f(x: torch.Tensor) -> torch.Tensor:
        with side:
            return x + 1

    with config.override(patches=False), pytest.raises(flambeau.errors.UnsupportedError, match="FLAMBEAU_PATCHES"):
        compiled(f)(torch.ones(8, device=DEV))
