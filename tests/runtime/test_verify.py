"""FLAMBEAU_VERIFY=1: every access of a kernel is checked, and results are compared with what torch was told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flambeau.pipeline as pipeline
import opencl_forms
from agreement import through
from flambeau.config import config
from flambeau.errors import BoundsError, PromiseError
from flambeau.ir.program import LoopKernel, Program
from flambeau.runtime.result_checks import kept
from small_models import MODELS, gradients

TARGETS = ("cpu", "interpreter", *opencl_forms.FORMS)


@contextmanager
def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> Iterator[None]:
    """Programs that something went wrong with on their way."""
    schedule = pipeline.schedule

    with monkeypatch.context() as m:
        m.setattr(pipeline, "schedule", lambda *args: change(schedule(*args)))
        yield


def shifted(by: int, written: bool) -> Callable[[Program], Program]:
    """Reads, or writes, so many elements away from where they belong."""

    def moved(kernel: Any) -> LoopKernel:
        assert isinstance(kernel, LoopKernel)
        if written:
            return replace(kernel, stores=tuple((name, at + by) for name, at in kernel.stores))
        return kernel.rewritten(lambda e: replace_load(e, by) if e.op == "load" else e)

    return lambda p: replace(p, kernels=tuple(map(moved, p.kernels)))


def replace_load(e: Any, by: int) -> Any:
    name, (at,) = e.attr
    return type(e)("load", e.dtype, e.args, (name, (at + by,)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("by", "written"), [(1, True), (-3, False)])
def test_an_access_outside_of_its_buffer_is_an_error(target: str, by: int, written: bool,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    by *= 1000000 if target == "interpreter" else 1  # there, memory next to a buffer may be another's
    with config.override(verify=True, target=target), changed(monkeypatch, shifted(by, written)):
        f = through(lambda x: x.sin() * 2)
        with pytest.raises(BoundsError, match=r"the kernel of sin, mul \(k0\) accessed") as caught:
            f(torch.randn(40, 8))
    if target != "interpreter":
        found = re.search(r"element (-?\d+) of buffer (\w+), which has elements from 0 to 320", str(caught.value))
        assert found is not None and int(found[1]) in ((320,) if written else (-3, -2, -1))


@pytest.mark.parametrize("target", TARGETS)
def test_sound_programs_pass(target: str) -> None:
    def f(x: Tensor, i: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = F.layer_norm(x, (24,)).tanh()
        return (y.cumsum(0), torch.zeros(30, 24).index_add(0, i, y).softmax(1), y @ w, y.t().contiguous() + 1,
                F.pad(y, (1, 2)), torch.cat([y, x[3:]]).amax(0), y[i % 7], F.max_pool1d(y, 3), (y > 0).any(0))

    x, i, w = torch.randn(30, 24), torch.arange(30) % 9, torch.randn(24, 4)
    with config.override(verify=True, target=target):
        torch.testing.assert_close(torch.compile(f, backend="flambeau")(x, i, w), f(x, i, w), rtol=1e-4, atol=1e-4)


def test_a_view_may_read_its_whole_storage() -> None:
    """What as_strided reaches outside of a tensor lies in its memory all the same."""
    base = torch.arange(40.0)
    with config.override(verify=True):
        f = torch.compile(lambda x: x.as_strided((3, 4), (8, 1), 2) + 1, backend="flambeau")
        assert torch.equal(f(base[10:20]), base[10:20].as_strided((3, 4), (8, 1), 2) + 1)


@pytest.mark.parametrize("name", ["mlp", "pool"])
def test_models_train(name: str) -> None:
    model, shape = MODELS[name]
    x = torch.randn(shape, requires_grad=True)
    with config.override(verify=True):
        torch._dynamo.reset()
        ours = gradients(torch.compile(model, backend="flambeau"), x)
    torch.testing.assert_close(ours, gradients(model, x), rtol=1e-4, atol=1e-4)


def test_text_and_call_are_the_same_without_it() -> None:
    def program(verify: bool | str) -> tuple[list[str], str]:
        made: list[Any] = []
        with config.override(verify=verify):
            def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
                made.append(run := pipeline.compile_graph(gm))
                return run

            torch._functorch.aot_autograd.aot_function(lambda x: x.sin().sum(0), keep)(torch.randn(20, 30))
        c = made[0].compiled
        return [t.text for t in c.texts], c.package.source

    assert program(False) == program("passes")
    texts, source = program(True)
    assert "within(" in texts[0] and "kept(" in source and "within(" not in program(False)[0][0]


# ---- results -----------------------------------------------------------------------------------------------


def test_strides_are_compared() -> None:
    x = torch.randn(4, 5)
    assert kept([x, 3], (), ((5, 1), None), (0, -1), (), ()) == [x, 3]
    with pytest.raises(PromiseError, match=r"result 0 has strides \(5, 1\), but torch expects \(1, 4\)"):
        kept([x], (), ((1, 4),), (0,), (), ())


def test_shared_memory_is_compared() -> None:
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    rows = ((5, 1), (5, 1))
    assert kept([x, x[1:]], (y,), rows, (0, 0), (1,), ())
    assert kept([x], (x,), rows[:1], (0,), (0,), ())
    assert kept([x], (x, x), rows[:1], (0,), (0, 1), ())  # two inputs that are one
    assert kept([x], (x,), rows[:1], (1,), (0,), (0,))  # an input that nobody else needs
    with pytest.raises(PromiseError, match="result 1 does not share the memory of result 0, but torch expects that"):
        kept([x, y], (), rows, (0, 0), (), ())
    with pytest.raises(PromiseError, match="result 0 shares the memory of input 0, but torch expects that it does"):
        kept([x], (x,), rows[:1], (1,), (0,), ())
    with pytest.raises(PromiseError, match="result 1 shares the memory of result 0"):
        kept([x, x[1:]], (), rows, (0, 1), (), ())
