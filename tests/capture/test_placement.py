"""Graphs that name several devices: compiled for one, the others called as they are, scalars brought over.

There need not be a GPU: graphs are captured with tensors that are not there, and run on the CPU in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.capture.decompositions import table
from flambeau.capture.graph import Captured, capture
from flambeau.ir.program import Launch, Program
from flambeau.runtime.executor import write
from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.runtime.placement import CPU, common_device, graph_device, target_of
from flambeau.schedule.plan import schedule
from flambeau.targets.base import get_target
from flambeau.targets.cuda.target import CudaTarget

GPU = torch.device("cuda", 0)
Tensors = list[torch.Tensor]


def captured(f: Callable[..., Any], args: Tensors, there: set[int]) -> tuple[Captured, Program, LaunchPlan]:
    """f of these arguments, of which those at the positions `there` are on the GPU."""
    with FakeTensorMode():
        fake = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU if k in there else CPU)
                for k, x in enumerate(args)]
        gm = make_fx(functionalize(f), decomposition_table=table(False))(*fake)
    assert graph_device(gm) == GPU
    target = get_target("cpu")
    with unset_fake_temporarily():
        c = capture(gm, target.capabilities(), device=GPU)
    p = schedule(c.graph, target.capabilities(), True)
    texts = [target.render(k, f"k{i}") for i, k in enumerate(p.kernels)]
    return c, p, write(p, "cpu", texts, GPU)


def run(package: LaunchPlan, args: Tensors) -> Tensors:
    """As if the CPU were the GPU."""
    constants = {k: CPU if isinstance(v, torch.device) else v for k, v in package.constants.items()}
    return replace(package, device=CPU, constants=constants).load()(list(args))


def check(f: Callable[..., Any], args: Tensors, there: set[int]) -> tuple[Captured, Program, LaunchPlan]:
    made = captured(f, args, there)
    mine, theirs = ([x.clone() for x in args] for _ in range(2))
    torch.testing.assert_close(run(made[2], mine), f(*theirs))
    torch.testing.assert_close(mine, theirs)  # what it updates
    return made


def inputs_of_kernels(p: Program) -> set[str]:
    return {name for s in p.steps if isinstance(s, Launch) for name in s.args if name.startswith("in")}


def test_scalars_on_the_cpu_meet_everything() -> None:
    x = torch.randn(4, 5)
    for scalar in (torch.tensor(2.5), torch.tensor(3), torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(True)):
        c, p, _ = check(lambda x, s: [(x * s).softmax(1), x + s], [x, scalar], {0})
        assert inputs_of_kernels(p) == {"in0"} and not c.externs


def test_a_scalar_is_brought_once() -> None:
    """A scalar on the CPU is passed as a run-time number, without a copy or a launch."""
    _, p, package = check(lambda x, s: [x * s, (x + s).sum(0)], [torch.randn(4, 5), torch.tensor(2.0)], {0})
    assert [h.text for _, h in p.numbers] == ["word(in1.item())"] and not package.constants.keys() & {"f0"}
    assert all(isinstance(s, Launch) for s in p.steps)


def test_operators_elsewhere_are_called_as_they_are() -> None:
    c, p, _ = check(lambda x, v: [x.exp(), v.exp() * 2], [torch.randn(4, 5), torch.randn(3)], {0})
    assert inputs_of_kernels(p) == {"in0"}
    assert c.externs == {"aten.exp.default": 1, "aten.mul.Tensor": 1}


def test_from_one_to_the_other_and_back() -> None:
    def f(x: torch.Tensor, v: torch.Tensor) -> Tensors:
        there = x.device  # the GPU while it is captured, where "cuda" by name needs a torch that has it
        return [x.to("cpu").sum(0), x + torch.ops.aten._to_copy(v, device=there)]

    c, p, _ = check(f, [torch.randn(4, 5), torch.randn(5)], {0})
    assert set(c.externs) == {"aten._to_copy.default", "aten.sum.dim_IntList"}
    assert "in1" not in inputs_of_kernels(p) and "in0" in inputs_of_kernels(p)


def test_constants_of_the_cpu_become_numbers() -> None:
    _, p, package = check(lambda x: [x * torch.tensor(2.5), torch.tensor(3.0) + 1, torch.tensor(7)],
                          [torch.randn(4, 5)], {0})
    assert not any(getattr(v, "__name__", "") == "on_device" for v in package.constants.values())
    first, second = (run(package, [torch.ones(4, 5)])[2] for _ in range(2))
    assert first.data_ptr() != second.data_ptr()  # the graph's own constant is not given away


def test_inputs_elsewhere_are_updated() -> None:
    def f(x: torch.Tensor, step: torch.Tensor, seen: torch.Tensor) -> Tensors:
        step.add_(1)
        seen.mul_(0.5)
        return [x / step]

    check(f, [torch.randn(4, 5), torch.tensor(3.0), torch.randn(3)], {0})


def test_results_elsewhere_have_the_strides_that_were_promised() -> None:
    (out,) = run(captured(lambda x, v: [v.t() + 0, x + 1], [torch.randn(2), torch.randn(3, 4)], {0})[2],
                 [torch.randn(2), torch.randn(3, 4)])[:1]
    assert out.shape == (4, 3)


@pytest.mark.parametrize(("devices", "expected"), [
    ([], CPU), (["cpu", "cpu"], CPU), (["cpu", "cuda:1", "cpu"], torch.device("cuda", 1)), (["meta", "cpu"], CPU),
    (["cuda:0", "cuda:1", "cuda:1"], torch.device("cuda", 1)),
])
def test_a_graph_is_compiled_for_most_of_its_tensors(devices: list[str], expected: torch.device) -> None:
    with FakeTensorMode():
        assert common_device([torch.empty(2, device=d) for d in devices] + [3, None]) == expected


def test_a_device_runs_on_the_target_of_its_name() -> None:
    assert target_of(CPU, None) is get_target("cpu")
    assert isinstance(target_of(GPU, None), CudaTarget)
    assert target_of(CPU, "interpreter") is get_target("interpreter")
    assert target_of(torch.device("meta"), None) is None
