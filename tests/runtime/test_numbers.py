"""Numbers of a run: sizes, floats that change and scalars of the host all reach kernels as words among their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import flambeau.debug
from flambeau.config import config
from flambeau.ir.index import WORD
from flambeau.ir.program import Launch, Program
from flambeau.runtime.launch_plan import word

TARGETS = ["cpu", *(pytest.param(target, marks=pytest.mark.skipif(find_spec(module) is None, reason=f"no {module}"))
                    for target, module in (("interpreter", "triton"), ("opencl", "pyopencl")))]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with config.override(graph_cache=False):
        yield


def compiled(f: Callable[..., Any], calls: list[tuple[Any, ...]], target: str = "cpu") -> Program:
    """The one program that serves all of these calls, each of which agrees with eager. The first argument's first
    dimension is one that changes."""
    with flambeau.debug.collect() as graphs:
        made = torch.compile(f, backend="flambeau", dynamic=False, options={"target": target})
        for args in calls:
            torch._dynamo.mark_dynamic(args[0], 0)
            torch.testing.assert_close(made(*args), f(*args))
    (graph,) = graphs
    return graph.program


def words_of(p: Program) -> list[str]:
    return sorted({s.name for k in p.kernels for s in k.sizes if s.name.startswith(WORD)})


@pytest.mark.parametrize("target", TARGETS)
def test_floats_that_follow_from_sizes(target: str) -> None:
    def f(x: Tensor) -> Tensor:
        return (x * (x.shape[0] / 7) + 1 / x.shape[0]).tanh() * x.shape[0]

    p = compiled(f, [(torch.randn(n, 7),) for n in (2, 6, 16, 33)], target)
    assert all(isinstance(s, Launch) for s in p.steps)  # nothing is called for them
    assert len(words_of(p)) == 2 and len(p.kernels[0].sizes) == 3


def test_they_go_along_tables() -> None:
    """Tensors of different sizes, one kernel, and a number that all of them read."""
    def f(z: Tensor, xs: list[Tensor]) -> list[Tensor]:
        return torch._foreach_mul(xs, z.shape[0] / 3)

    shapes = [(3,), (4, 5), (9000,), (7, 2), (11,), (2, 2, 2)]
    p = compiled(f, [(torch.randn(n), [torch.randn(s) for s in shapes]) for n in (5, 8)])
    (step,) = p.steps
    assert isinstance(step, Launch) and len(step.lengths) == len(shapes)
    assert [s.name for s in step.numbers] == [s.name for s, h in p.numbers if h.text.startswith("word(")]
    assert len(p.kernels[step.kernel].sizes) == 3  # rows, blocks and it


def test_different_numbers_are_different_launches_of_one_kernel() -> None:
    def f(z: Tensor, xs: list[Tensor], ys: list[Tensor]) -> Any:
        return torch._foreach_mul(xs, z.shape[0] / 3), torch._foreach_mul(ys, z.shape[0] / 7)

    lists = [[torch.randn(k + 2) for k in range(5)] for _ in range(2)]
    p = compiled(f, [(torch.randn(n), *lists) for n in (5, 8)])
    assert len(p.kernels) == 1 and [len(s.lengths) for s in p.steps if isinstance(s, Launch)] == [5, 5]
    assert len({s.numbers for s in p.steps if isinstance(s, Launch)}) == 2


def test_words() -> None:
    assert word(1.0) == 0x3FF0000000000000 and word(-0.0) == -(2**63)
    assert word(3) == word(3.0) and word(True) == word(1.0)
