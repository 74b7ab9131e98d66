"""The choice between a library and our kernel for a product: regions, refusals, timing, and the stored choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau import product_choice
from flambeau.config import config
from flambeau.ir.program import Call, ContractKernel
from flambeau.pipeline import Compiled, Options, compile_graph
from flambeau.product_choice import Region, is_product, refusal, regions
from flambeau.targets.cuda.interpreter import InterpreterTarget

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(InterpreterTarget, "times", True)
    with config.override(cache_dir=tmp_path / "cache", target="interpreter"):
        yield


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=HALF)


def graph(fn: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(lambda *a: [fn(*a)], tracing_mode="fake")(*args)


def clock(monkeypatch: pytest.MonkeyPatch, ours: float) -> list[float]:
    """Replaces the clock: runs with a kernel of ours for a product take the given seconds, and the library one."""
    asked: list[float] = []

    def seconds(self: Any, run: Any) -> float:
        compiled = getattr(run.args[0], "compiled", None) if run.func is product_choice.call else None
        own = compiled is not None and any(isinstance(k, ContractKernel) for k in compiled.program.kernels)
        asked.append(ours if own else 1.0)
        return asked[-1]

    monkeypatch.setattr(InterpreterTarget, "seconds", seconds)
    return asked


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.addmm(b, x, w))


def compiled(fn: Callable[..., Any], *args: torch.Tensor) -> Compiled:
    run = compile_graph(graph(fn, *args))
    for made, wanted in zip(run(list(args)), [fn(*args)], strict=True):
        torch.testing.assert_close(made, wanted, atol=0.05, rtol=0.05)
    return run.compiled


def calls(c: Compiled) -> int:
    return sum(isinstance(s, Call) for s in c.program.steps)


@pytest.mark.parametrize(("ours", "called"), [(0.5, 0), (0.985, 0), (0.995, 1), (2.0, 1)])
def test_the_faster_one_is_taken_and_ties_are_the_librarys(ours: float, called: int,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    asked = clock(monkeypatch, ours)
    args = random(20, 24), random(24, 40), random(40)
    first = compiled(linear, *args)
    assert calls(first) == called and asked
    assert ("addmm is ours" in first.captured.choices[0]) == (not called)
    asked.clear()  # as in a later process, which finds the choice
    assert calls(compiled(linear, *args)) == called and not asked


def test_who_asks_for_one_kind_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = clock(monkeypatch, 0.5)
    args = random(20, 24), random(24, 40), random(40)
    for wanted, called in (("library", 1), ("own", 0)):
        with config.override(contractions=wanted):
            assert calls(compiled(linear, *args)) == called
    assert calls(compile_graph(graph(linear, *args), Options("eager")).compiled) == 2  # eager's bits, also for tanh
    assert not asked


def test_what_disagrees_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 0.5)
    monkeypatch.setattr(product_choice, "is_alike", lambda a, b: False)
    assert calls(compiled(linear, random(20, 24), random(24, 40), random(40))) == 1


def test_small_floats_may_differ_by_their_rounding() -> None:
    for dtype, other in (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0):
        a = torch.tensor([1.0, other]).to(dtype)
        near, far = a.clone(), a.clone()
        near.view(torch.uint8)[1] -= 1
        far.view(torch.uint8)[1] -= 16
        assert product_choice.is_alike(a, near) and not product_choice.is_alike(a, far)


def test_products_that_meet_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ a) * (x @ b)

    args = random(20, 24), random(24, 40), random(24, 40)
    region, = regions(graph(gated, *args))
    assert len(region.products) == 2
    clock(monkeypatch, 0.5)
    c = compiled(gated, *args)
    assert calls(c) == 1  # both variants take as long, and fewer of ours are tried first


def test_what_waits_for_another_call_is_no_part_of_a_region() -> None:
    def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = x + x @ a
        return (y + y.relu() @ b).exp()

    first, second = regions(graph(block, random(8, 16), random(16, 16), random(16, 16)))
    assert [n.name for n in first.nodes] == ["mm", "add", "relu"]
    assert [n.name for n in second.nodes] == ["mm_1", "add_1", "exp"]


def test_what_cannot_gain_is_refused_without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = clock(monkeypatch, 0.5)
    with FakeTensorMode():
        large = random(4096, 4096), random(4096, 4096)
    alone = Region([n := next(x for x in graph(torch.mm, *large).graph.nodes if is_product(x))], [n])
    single = compiled(linear, *(torch.randn(*s) for s in ((20, 24), (24, 40), (40,))))
    assert "no kernel of ours follows" in (refusal(n, alone, InterpreterTarget().capabilities()) or "")
    assert "tensor cores do not take torch.float32" in single.captured.choices[0]
    assert not asked


@pytest.mark.parametrize(("ours", "called"), [(0.5, 0), (2.0, 1)])
def test_small_products_alone_are_asked_for_too(ours: float, called: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = clock(monkeypatch, ours)
    made = compiled(torch.mm, random(20, 24), random(24, 40))
    assert calls(made) == called and asked
    assert ("mm is ours" in made.captured.choices[0]) == (not called)


def test_sizes_of_the_run_share_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = clock(monkeypatch, 0.5)
    run = torch.compile(linear, backend="flambeau", dynamic=True)
    for n in (20, 27):
        args = random(n, 24), random(24, 40), random(40)
        torch.testing.assert_close(run(*args), linear(*args), atol=0.05, rtol=0.05)
    assert asked
