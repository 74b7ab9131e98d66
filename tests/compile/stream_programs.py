"""Functions that use streams, for any device: each must equal eager, however late its streams are.

    python tests/compile/stream_programs.py --device cuda --runs 1000

`delayed` inserts work of random length before kernels and calls of a compiled function, on their own streams, so that
steps that miss a wait run too early. Eager, which gives the expected results, is not delayed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from flambeau.results_file import write_results
from flambeau.runtime import watchers

N = 64
Tensors = tuple[torch.Tensor, ...]
here = torch.accelerator.current_stream


@dataclass
class Case:
    """A test case. `make` gets the device, and returns a function of two matrices and the streams that it uses."""

    name: str
    make: Callable[[str], tuple[Callable[..., Any], list[torch.Stream]]]
    training: bool = False  # gradients of both matrices are compared
    fullgraph: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []


def case(training: bool = False, fullgraph: bool = True, **options: Any) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        CASES.append(Case(make.__name__, make, training, fullgraph, options))
        return make

    return add


def sides(device: str, count: int, **named: Any) -> list[torch.Stream]:
    return [torch.Stream(device=device, **named) for _ in range(count)]


def event(device: str) -> torch.Event:
    return torch.Event(device=device)


# ---- order ---------------------------------------------------------------------------------------------------


@case()
def fork_and_join(device: str) -> Any:
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x * 2
        side.wait_stream(here())
        with side:
            b = (a + 1).sin()
        c = a.cos()
        here().wait_stream(side)
        return b * y + c

    return f, [side]


@case()
def three_streams_read_what_one_makes(device: str) -> Any:
    a, b, c = sides(device, 3)

    def f(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        a.wait_stream(here())
        with a:
            made = (x @ y).sin()
        b.wait_stream(a)
        c.wait_stream(a)
        with b:
            one = made + 1
        with c:
            two = made * 2
        for s in (a, b, c):
            here().wait_stream(s)
        return one + two, made

    return f, [a, b, c]


@case()
def events_recorded_in_a_loop(device: str) -> Any:
    side, = sides(device, 1)
    forth, back = event(device), event(device)

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

    return f, [side]


@case()
def waits_of_the_host(device: str) -> Any:
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = (x @ y).sin()
        done = side.record_event()
        done.synchronize()
        b = a * 2
        side.synchronize()
        torch.accelerator.synchronize()
        return b + 1

    return f, [side]


@case()
def streams_and_events_that_it_makes(device: str) -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side, done = torch.Stream(device=device, priority=-1), torch.Event(device=device)
        side.wait_stream(here())
        with side:
            a = (x @ y).cos()
            done.record()
        b = x + y
        done.wait()
        return a * b

    return f, []


@case()
def a_stream_of_higher_priority(device: str) -> Any:
    side, = sides(device, 1, priority=-1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = x @ y
        here().wait_stream(side)
        return a.exp() - a

    return f, [side]


@case()
def no_stream_is_the_callers(device: str) -> Any:
    side, = sides(device, 1)
    module = torch.get_device_module(device)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = x @ y
        with module.stream(None):
            b = x.sin()
        here().wait_stream(side)
        return a + b

    return f, [side]


@case()
def the_context_of_the_devices_module(device: str) -> Any:
    side, = sides(device, 1)
    module = torch.get_device_module(device)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(module.current_stream())
        with module.stream(side):
            a = x @ y
        module.current_stream().wait_stream(side)
        return a + x

    return f, [side]


@case()
def streams_and_events_of_the_devices_module(device: str) -> Any:
    module = torch.get_device_module(device)
    side, done = module.Stream(), module.Event()

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(module.current_stream())
        with module.stream(side):
            a = (x @ y).sin()
            done.record()
        b = y * 2
        module.current_stream().wait_event(done)
        return a + b

    return f, [side]


@case()
def a_stream_from_outside(device: str) -> Any:
    """A stream that another library made: torch knows only its handle."""
    owner = torch.get_device_module(device).Stream()
    side = torch.cuda.ExternalStream(owner.cuda_stream) if device == "cuda" else torch.Stream(
        stream_id=owner.stream_id, device_index=owner.device_index, device_type=owner.device_type)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = (x @ y).exp()
        here().wait_stream(side)
        return a - y

    f.owner = owner  # type: ignore[attr-defined]
    return f, [side, owner]


@case(fullgraph=False)
def the_number_of_a_stream(device: str) -> Any:
    """The number must be that of the call's stream, although Dynamo refers to streams by positions in a table."""
    pool = sides(device, 2) if device != "cuda" else [torch.cuda.Stream() for _ in range(2)]
    turn = itertools.count()

    def f(x: torch.Tensor, y: torch.Tensor, side: torch.Stream) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = x @ y
        here().wait_stream(side)
        return a + (side.cuda_stream if device == "cuda" else side.stream_id) % 1009  # type: ignore[attr-defined]

    def called(g: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        k = next(turn) // 2  # eager and compiled calls alternate
        return g(x, y, pool[k % 2])  # type: ignore[no-any-return]

    f.called = called  # type: ignore[attr-defined]
    return f, pool


@case()
def memory_that_another_stream_uses(device: str) -> Any:
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        made = x @ y
        side.wait_stream(here())
        with side:
            late = (made @ y).sin()
        made.record_stream(side)
        x.record_stream(side)
        late.record_stream(here())
        here().wait_stream(side)
        return late, made

    return f, [side]


# ---- writes to inputs ------------------------------------------------------------------------------------------


@case()
def an_input_written_on_a_side_stream(device: str) -> Any:
    """Reads after the join get the new value."""
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            y.add_(x @ x)
        here().wait_stream(side)
        return y * 2

    return f, [side]


@case()
def an_event_behind_a_write(device: str) -> Any:
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        written = here().record_event()
        side.wait_event(written)
        with side:
            a = y @ x
        here().wait_stream(side)
        return a

    return f, [side]


@case()
def a_write_while_another_stream_still_reads(device: str) -> Any:
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = y @ x  # the old value
        read = side.record_event()
        b = x.sin()
        here().wait_event(read)
        y.zero_()
        here().wait_stream(side)
        return a + b

    return f, [side]


@case()
def written_behind_and_read_on_that_stream_later(device: str) -> Any:
    """The function ends without a wait; the caller reads the input on the side stream."""
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> None:
        side.wait_stream(here())
        with side:
            y.copy_(x @ x)

    def called(g: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        g(x, y)
        with side:
            seen = y + 1
        here().wait_stream(side)
        return seen

    f.called = called  # type: ignore[attr-defined]
    return f, [side]


# ---- gradients ---------------------------------------------------------------------------------------------------


@case(training=True)
def gradients_on_a_side_stream(device: str) -> Any:
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = (x @ y).sin()
        side.wait_stream(here())
        with side:
            b = (a @ y).cos()
        c = a * x
        here().wait_stream(side)
        return b * c

    return f, [side]


@case(training=True)
def gradients_that_add_up_on_three_streams(device: str) -> Any:
    streams = sides(device, 3)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = []
        for k, s in enumerate(streams):
            s.wait_stream(here())
            with s:
                parts.append((x @ y + k).sin())
        for s in streams:
            here().wait_stream(s)
        return parts[0] * parts[1] + parts[2]

    return f, streams


@case(training=True)
def gradients_through_a_third_stream(device: str) -> Any:
    a, b = sides(device, 2)

    def f(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        a.wait_stream(here())
        with a:
            one = (x @ y).tanh()
        b.wait_stream(a)
        with b:
            two = (one @ x).sin() + y.detach()
        a.wait_stream(b)
        with a:
            three = one * two
        here().wait_stream(a)
        here().wait_stream(b)
        return three, two

    return f, [a, b]


@case(training=True)
def a_checkpoint_on_a_side_stream(device: str) -> Any:
    a, b = sides(device, 2)

    def inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        b.wait_stream(a)
        with b:
            z = (x @ y).sin()
        a.wait_stream(b)
        return z * x

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a.wait_stream(here())
        with a:
            z = checkpoint(inside, x, y, use_reentrant=False)
        here().wait_stream(a)
        return z + y

    return f, [a, b]


@case(training=True)
def gradients_beside_a_write(device: str) -> Any:
    """A buffer is written on a side stream, like running statistics."""
    side, = sides(device, 1)
    count = torch.zeros(N, device=device)

    def f(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        a = x @ y
        side.wait_stream(here())
        with side, torch.no_grad():
            count.copy_(a.detach().sum(0))
        b = (a * x).sin()
        here().wait_stream(side)
        return b, count * 2

    return f, [side]


# ---- who calls ---------------------------------------------------------------------------------------------------


@case()
def a_compiled_function_inside(device: str) -> Any:
    side, = sides(device, 1)

    def within(x: torch.Tensor) -> torch.Tensor:
        with side:
            return x.exp()

    inner = torch.compile(within, backend="flambeau")

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        a = inner(x)
        here().wait_stream(side)
        return a * y

    return f, [side]


@case(training=True)
def streams_that_a_call_brings(device: str) -> Any:
    """Streams are arguments. Dynamo guards only their type, so each call and its backward must use the call's own."""
    pool = sides(device, 4)
    turn = itertools.count()

    def f(x: torch.Tensor, y: torch.Tensor, one: torch.Stream, two: torch.Stream) -> torch.Tensor:
        one.wait_stream(here())
        two.wait_stream(here())
        with one:
            a = (x @ y).sin()
        with two:
            b = (y @ x).cos()
        here().wait_stream(one)
        here().wait_stream(two)
        return a * b

    def called(g: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        k = next(turn)
        return g(x, y, pool[k % 4], pool[(k + 1) % 4])  # type: ignore[no-any-return]

    f.called = called  # type: ignore[attr-defined]
    return f, pool


@case(training=True)
def two_calls_before_their_backward(device: str) -> Any:
    """Two forwards with different streams run first; each backward must use its own forward's stream."""
    one, two = sides(device, 2)

    def f(x: torch.Tensor, y: torch.Tensor, side: torch.Stream) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = (x @ y).sin() @ y
        here().wait_stream(side)
        return a * x

    def called(g: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return g(x, y, one) + g(y, x, two)  # type: ignore[no-any-return]

    f.called = called  # type: ignore[attr-defined]
    return f, [one, two]


@case()
def two_threads(device: str) -> Any:
    one, two = sides(device, 2)

    def f(x: torch.Tensor, y: torch.Tensor, side: torch.Stream) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = x @ y
        here().wait_stream(side)
        return a + x

    def called(g: Any, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        out: dict[int, torch.Tensor] = {}
        start = here()

        def work(k: int, side: torch.Stream) -> None:
            with torch.no_grad(), start:
                for _ in range(3):
                    out[k] = g(x + k, y, side)

        threads = [threading.Thread(target=work, args=args) for args in ((0, one), (1, two))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return out[0], out[1]

    f.called = called  # type: ignore[attr-defined]
    return f, [one, two]


@case()
def the_callers_stream_is_that_of_the_call(device: str) -> Any:
    side, outer = sides(device, 2)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x + 1
        side.wait_stream(here())
        with side:
            b = a @ y
        here().wait_stream(side)
        return b - 1

    def called(g: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outer.wait_stream(here())
        with outer:
            out = g(x, y)
            assert here() == outer
        here().wait_stream(outer)
        out.record_stream(here())
        return out  # type: ignore[no-any-return]

    f.called = called  # type: ignore[attr-defined]
    return f, [side, outer]


@case(fullgraph=False)
def a_question_is_asked_at_each_call(device: str) -> Any:
    side, = sides(device, 1)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side.wait_stream(here())
        with side:
            a = x @ y
        if not side.query():
            side.synchronize()
        here().wait_stream(side)
        return a + 1

    return f, [side]


# ---- running them ------------------------------------------------------------------------------------------------


def recorded_cases() -> list[Case]:
    """The cases that can be recorded, with the option `graphs`."""
    hosts = ("waits_of_the_host", "events_recorded_in_a_loop", "a_question_is_asked_at_each_call", "two_threads")
    return [Case(f"{c.name} (recorded)", c.make, c.training, c.fullgraph, {"graphs": True})
            for c in CASES if c.name not in hosts]


def busy(device: str, chance: random.Random) -> None:
    """Enqueues work of random length on the current stream."""
    if device == "cuda":
        torch.cuda._sleep(chance.randint(1_000, 300_000))
    else:
        x = torch.ones(N * chance.randint(1, 3), N, device=device)
        for _ in range(chance.randint(1, 2)):
            x = (x @ x.T) @ x * 1e-4


@contextmanager
def delayed(device: str, chance: random.Random, share: float) -> Iterator[None]:
    """Inside the block, a random share of the kernels and calls of compiled functions is delayed."""

    def watcher(part: watchers.Part, call: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **named: Any) -> Any:
            if part.where and chance.random() < share and not busy_now.inside:
                busy_now.inside = True  # on some devices this work is itself a compiled program
                try:
                    busy(device, chance)
                finally:
                    busy_now.inside = False
            return call(*args, **named)

        return late

    watchers.WATCHERS.append(watcher)
    watchers.bind_anew()
    try:
        yield
    finally:
        watchers.WATCHERS.remove(watcher)
        watchers.bind_anew()


class _Busy(threading.local):
    inside = False


busy_now = _Busy()


def check(c: Case, device: str, runs: int, share: float = 0.3, seed: int = 1, compiled: Any = None) -> int:
    """The number of runs whose results differ from eager's."""
    chance = random.Random(f"{c.name} {seed}")
    f, streams = c.make(device)
    made = compiled or torch.compile(f, backend="flambeau", fullgraph=c.fullgraph, options=c.options)
    call = getattr(f, "called", lambda g, *args: g(*args))
    wrong = 0
    with delayed(device, chance, share), torch.set_grad_enabled(c.training):
        for _ in range(runs):
            x, y = (torch.randn(N, N, device=device) / 8 for _ in range(2))
            want = results(c, lambda *args: call(f, *args), x, y, lambda: None)
            for s in (here(), *streams):
                if chance.random() < 0.5:
                    with s:
                        busy(device, chance)
            got = results(c, lambda *args: call(made, *args), x, y, lambda: busy(device, chance))
            wrong += not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(want, got, strict=True))
    return wrong


def results(c: Case, run: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, between: Callable[[], None]
            ) -> list[torch.Tensor]:
    """The results of a run, the gradients, and its inputs afterwards, once all streams are done."""
    given = [t.clone().requires_grad_(c.training) for t in (x, y)]
    if not c.training:
        torch.accelerator.synchronize()  # streams that do not wait may read the inputs
    out = run(*given)
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    if c.training:
        between()
        torch.autograd.backward(sum((t * (k + 1)).sum() for k, t in enumerate(outs) if t.requires_grad))
        outs += [t.grad for t in given if t.grad is not None]
    torch.accelerator.synchronize()
    return [t.detach() for t in (*outs, *given)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shard", default="0/1", help="K/N: every N-th of them, from the K-th on")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all of them")
    parser.add_argument("--recorded", action="store_true", help="with graphs=True as well")
    args = parser.parse_args()
    if args.device == "flambeau":
        import flambeau

        flambeau.enable_device()
    found: list[dict[str, Any]] = []
    start = time.time()
    first, every = map(int, args.shard.split("/"))
    for c in [*CASES, *(recorded_cases() if args.recorded else [])][first::every]:
        if args.only not in c.name or time.time() - start > args.seconds:
            continue
        began = time.time()
        torch.compiler.reset()
        try:
            row: dict[str, Any] = {"runs": args.runs, "wrong": check(c, args.device, args.runs)}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        found.append({"name": c.name, **row, "seconds": round(time.time() - began, 1)})
        print(found[-1], flush=True)
        if args.json:
            bad = [row["name"] for row in found if row.get("wrong", 1)]
            summary = {"programs": len(found), "runs": sum(row.get("runs", 0) for row in found), "wrong": bad}
            write_results(args.json, "streams", found, summary, args.device)
    bad = [row["name"] for row in found if row.get("wrong", 1)]
    print("wrong:", bad or "none")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
