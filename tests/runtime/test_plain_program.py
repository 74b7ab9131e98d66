"""A Program is a value: hashable, printable, and equal after writing and reading it, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import flambeau.debug
from drawn import first_seed
from flambeau.bench.models import SUITE
from flambeau.codegen.source import called
from flambeau.config import config
from flambeau.ir import attention, program
from flambeau.ir.lines import reach
from flambeau.ir.program import Program
from flambeau.pipeline import Compiled
from flambeau.runtime.executor import write
from flambeau.runtime.launch_plan import Held, LaunchPlan
from flambeau.runtime.plain_data import Malformed
from flambeau.runtime.plain_program import codec, from_plain, to_plain
from flambeau.targets.base import get_target
from fuzz import kinds  # noqa: F401 - what is drawn
from fuzz.draw import draw
from fuzz.judge import compiled as fuzzed
from schedule.programs import programs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        yield


def again(p: Program) -> Program:
    """After a round trip; and that nothing but the bytes made it."""
    data = to_plain(p)
    made = from_plain(data)
    assert made is not p and made == p and hash(made) == hash(p) and str(made) == str(p)
    assert to_plain(made) == data
    return made


def planned(p: Program) -> LaunchPlan:
    """What the executor makes of it, its kernels' texts rendered anew."""
    target = get_target("cpu")
    return write(p, "cpu", [called(k, target.render(k, f"k{i}")) for i, k in enumerate(p.kernels)])


def checked(compiled: Callable[..., Any], *args: Any) -> list[Compiled]:
    """Runs all graphs of a compiled function from programs that were written and read, and compares the bits."""
    with flambeau.debug.collect() as graphs:
        results = compiled(*args)
        some = [r for r in ([results] if isinstance(results, Tensor) else results)
                if isinstance(r, Tensor) and r.requires_grad]
        if some:
            torch.autograd.backward([r.sum() for r in some])
    for graph in graphs:
        made = planned(again(graph.program))
        assert made == graph.package
        vals = [n.meta.get("val") for n in graph.gm.graph.nodes if n.op == "placeholder"]
        (first, error), (second, other) = (outcome(run, vals) for run in (graph.finish(), made.load()))
        assert type(error) is type(other), (error, other)
        torch.testing.assert_close(second, first, rtol=0, atol=0, equal_nan=True)
    return graphs


def outcome(run: Callable[[list[Any]], list[Any]], vals: list[Any]) -> tuple[Any, Exception | None]:
    """Results and arguments after a run, and the error if it ends with one: indices are as they happen to be."""
    args = [argument(val) for val in vals]
    torch.manual_seed(3)
    try:
        return (run(list(args)), args), None
    except Exception as error:
        return args, error


def argument(val: Any) -> Any:
    if not isinstance(val, Tensor):
        return hint(val)
    shape, strides = tuple(map(hint, val.shape)), tuple(map(hint, val.stride()))
    memory = torch.arange(reach(shape, strides)) % 2
    return memory.to(val.dtype).as_strided(shape, strides)


def hint(x: Any) -> Any:
    return x.node.hint if isinstance(x, (torch.SymInt, torch.SymFloat)) else x


@pytest.mark.parametrize("name", SUITE)
def test_models(name: str) -> None:
    """Forward and backward of every model: the executor makes the same of both, so they compute the same."""
    built = SUITE[name].build("tiny")
    inputs = built.make_inputs(batch=2)
    held = {**dict(built.module.named_parameters()), **dict(built.module.named_buffers())}

    def loss(*values: Tensor) -> Tensor:
        *args, target = values[:len(inputs)]
        return built.loss(functional_call(built.module, dict(zip(held, values[len(inputs):])), tuple(args)), target)

    made = programs(loss, *inputs, *held.values())
    assert len(made) == 2
    for p in made:
        assert planned(again(p)) == planned(p)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_programs(seed: int) -> None:
    program = draw(first_seed() + seed)
    function = fuzzed(program, "cpu")

    def call(*args: Any) -> Any:
        with suppress(Exception):  # some are drawn to be wrong; what was compiled before that is looked at
            return function(*args)
        return ()

    checked(call, *program.call(program.sizes[0]))


def test_each_kind_of_step_and_number() -> None:
    """Run-time sizes, library calls, held tensors, random numbers, updates, results that are the same object."""
    held = torch.tensor([1.0, -0.0, 3.0])

    def f(x: Tensor, w: Tensor, scale: float) -> Any:
        y = F.dropout(x @ w, 0.5) * held * scale
        x.add_(1)
        return y, y, y.view(-1), y.cumsum(0), x.shape[0] * 2, torch.where(y > 0, y, 0).sort(0).values

    compiled = torch.compile(f, backend="flambeau", dynamic=True)
    seen = checked(compiled, torch.randn(5, 3), torch.randn(3, 3), 0.3)
    assert any(g.program.numbers for g in seen) and any(g.program.seeds for g in seen)
    assert all(s.stream == 0 for g in seen for s in g.program.steps)


def frozen_all_through(x: Any) -> bool:
    """No part of it can be changed."""
    if is_dataclass(x):
        assert x.__dataclass_params__.frozen, type(x)  # type: ignore[attr-defined]
        return all(frozen_all_through(getattr(x, f.name)) for f in fields(x))
    assert not isinstance(x, (list, dict, set)), type(x)
    return all(map(frozen_all_through, x)) if isinstance(x, tuple) else True


def test_every_class_of_programs_is_in_the_table() -> None:
    for module in (attention, program):
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and (
                    is_dataclass(kind) or hasattr(kind, "_fields")):
                assert kind in codec().records, kind


def test_it_does_not_change() -> None:
    p = flambeau.debug.compile_once(lambda x, w: (x @ w).softmax(-1), (torch.randn(4, 4), torch.randn(4, 4)))[0].program
    assert frozen_all_through(p)
    with pytest.raises(FrozenInstanceError):
        p.arena_bytes = 1  # type: ignore[misc]
    other = replace(p, arena_bytes=p.arena_bytes + 256)
    assert other != p and len({p, other, replace(p)}) == 2
    text = str(p)
    assert text.startswith("inputs: in0\ninputs: in1") and "steps: Launch(kernel=0, " in text and "aten.mm" in text


def test_held_tensors_are_compared_by_their_bits() -> None:
    a, b, c = (Held(torch.tensor(x)) for x in ([0.0, 1.0], [0.0, 1.0], [-0.0, 1.0]))
    assert a == b and hash(a) == hash(b) and a != c


def test_what_is_no_program_is_refused() -> None:
    p = flambeau.debug.compile_once(lambda x: x.sin() + 1, (torch.randn(4),))[0].program
    data = to_plain(p)
    for changed in (data[:-9], data.replace(b'"LoopKernel"', b'"eval"'), data.replace(b'["ref",0]', b'["ref",-1]'),
                    data.replace(b'["ref",0]', b'["ref",99999]'), b'[1,[],[],["tuple"]]\n'):
        with pytest.raises(Malformed):
            from_plain(changed)
