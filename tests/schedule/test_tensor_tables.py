"""Launches along a table: kernels of one form become one, and only those that do not wait for each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from flambeau import pipeline
from flambeau.config import config
from flambeau.ir.program import CHUNK, Launch, LoopKernel, Param, TableKernel
from flambeau.pipeline import Compiled
from flambeau.schedule.memory import ProgramDraft
from flambeau.schedule.tensor_tables import ranks_of

TARGETS = ["cpu", pytest.param("interpreter", marks=pytest.mark.skipif(find_spec("triton") is None,
                                                                       reason="Triton is not installed"))]
SHAPES = [(3,), (0,), (4, 5), (1,), (5000,), (), (2, 2, 2), (4096,), (8193,)]
Tensors = list[Tensor]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    found: list[Compiled] = []
    monkeypatch.setattr(pipeline, "OBSERVERS", [found.append])
    with config.override(graph_cache=False, verify=True):
        yield found


def agree(f: Callable[..., Any], lists: list[Tensors], target: str = "cpu", times: int = 2) -> None:
    """The compiled function against eager, inputs and results; each time with tensors in other memory."""
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="flambeau", options={"target": target})
    for _ in range(times):
        ours, eager = ([[t.clone() for t in tensors] for tensors in lists] for _ in range(2))
        a, b = compiled(*ours), f(*eager)
        torch.testing.assert_close([*ours, a], [*eager, b])


def random(shapes: list[tuple[int, ...]] = SHAPES) -> Tensors:
    return [torch.rand(s) + 0.5 for s in shapes]


def launches(c: Compiled) -> list[Launch]:
    return [s for s in c.program.steps if isinstance(s, Launch)]


@pytest.mark.parametrize("target", TARGETS)
def test_operators_on_lists_are_one_launch(target: str, graphs: list[Compiled]) -> None:
    def f(xs: Tensors, ys: Tensors) -> Any:
        torch._foreach_mul_(xs, 0.9)
        torch._foreach_addcmul_(xs, ys, ys, 0.1)
        return torch._foreach_sqrt(ys)

    agree(f, [random(), random()], target)
    (step,) = launches(graphs[0])
    assert len(graphs[0].program.steps) == 1 and len(step.lengths) == len(SHAPES) - 1  # nothing is done over nothing


@pytest.mark.parametrize("target", TARGETS)
def test_reductions_of_lists_are_three_launches(target: str, graphs: list[Compiled]) -> None:
    """One launch for small tensors, one for the blocks of large ones, and one for the results of those blocks."""
    shapes = [*SHAPES, (3, 4097), (2, 3, 2731), (70, 70), (6,)]
    agree(lambda xs: torch._foreach_norm(xs), [random(shapes)], target)
    joined = sorted(len(s.lengths) for s in launches(graphs[0]) if s.lengths)
    large = sum(math.prod(s) > CHUNK for s in shapes)
    single = sum(math.prod(s) < 2 for s in shapes)  # elements, which are no reduction
    assert joined == sorted([large, large, len(shapes) - large - single])
    assert len(launches(graphs[0])) == 3 + single


@pytest.mark.parametrize("target", TARGETS)
def test_maps_and_reductions_of_lists_are_one_launch(target: str, graphs: list[Compiled]) -> None:
    def f(xs: Tensors, scale: Tensors) -> Any:
        sums = [(x * scale[0]).sum() + 1 for x in xs]
        torch._foreach_mul_(xs, 2.0)
        return [(a, x.amax()) for a, x in zip(sums, xs, strict=True)]

    agree(f, [random([(k + 1, 5) for k in range(6)]), random([()])], target)
    (step,) = launches(graphs[0])
    assert len(step.lengths) == 6


def test_rows_of_a_block_each(graphs: list[Compiled]) -> None:
    """Rows as long as a block can be in a table, but not with values that are read once for each row."""
    xs = random([(k + 2, CHUNK) for k in range(5)])
    agree(lambda xs, ys: [(x.sum(1), (x * y[:, None]).sum(1)) for x, y in zip(xs, ys, strict=True)],
          [xs, [x[:, 0].clone() for x in xs]])
    agree(lambda xs: [x.sum(1) for x in xs], [xs])
    (step,) = launches(graphs[1])
    assert step.lengths == tuple(x.numel() for x in xs)


def test_reductions_that_ask_for_their_place_stay_as_they_are(graphs: list[Compiled]) -> None:
    agree(lambda xs: [(x.argmax(), (x - x.mean()).abs().sum(), x.sum(0)) for x in xs], [random(5 * [(70, 71)])])
    of_places = [s for s in launches(graphs[0]) if any(a.startswith("in") for a in s.args)]
    assert len(of_places) >= 5 and not any(s.lengths for s in of_places if "argmax" in str(s.origins))


def test_the_text_does_not_depend_on_how_many_there_are(graphs: list[Compiled]) -> None:
    for count in (5, 40):
        agree(lambda xs: torch._foreach_exp(xs), [random([(k + 1, 3) for k in range(count)])], times=1)
    assert graphs[0].texts == graphs[1].texts and len(graphs[0].texts) == 1


def test_what_waits_comes_later(graphs: list[Compiled]) -> None:
    """Sums of neighbours, of which each reads the one before: nothing can be joined."""
    def f(xs: Tensors) -> Tensors:
        out = [xs[0]]
        for x in xs[1:]:
            out.append(out[-1].sin() + x)
        return out[1:]

    agree(f, [random(8 * [(600,)])])
    made = {}
    for s in launches(graphs[0]):
        kernel = graphs[0].program.kernels[s.kernel]
        if isinstance(kernel, TableKernel):
            written = {a for at, p in enumerate(kernel.body.params) if p.written
                       for a in s.args[at * len(s.lengths):(at + 1) * len(s.lengths)]}
            assert not written & (set(s.args) - written)
        made[id(s)] = s
    assert made


def test_ranks() -> None:
    """Reads come after writes, writes after reads and after other writes; reads do not wait for reads."""
    params = (Param("from", torch.float32, False), Param("to", torch.float32, True))
    kernel = LoopKernel((), (), None, (), (), frozenset(), params, ())
    program = ProgramDraft([kernel], [], [])

    def ranks(*pairs: str) -> list[int]:
        return ranks_of(program, [Launch(0, tuple(pair)) for pair in pairs])

    assert ranks("ab", "ac", "de") == [0, 0, 0]
    assert ranks("ab", "bc", "cd", "ae") == [0, 1, 2, 0]
    assert ranks("ab", "ca", "da") == [0, 1, 2]  # a is read, then written, then written again
    assert ranks("ab", "aa", "ac") == [0, 1, 2]


def test_mixed_dtypes_and_layouts(graphs: list[Compiled]) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int32)
    xs = [(torch.rand(5, k + 2) * 9).to(d) for d in dtypes for k in range(4)]
    xs += [torch.rand(4, k + 5).t() for k in range(4)] + [torch.rand(4, 10)[:, ::2] for _ in range(4)]
    agree(lambda xs: [x * 3 + 1 for x in xs], [xs])
    assert sorted(len(s.lengths) for s in launches(graphs[0]) if s.lengths)[-1] == 12  # float32, whatever the order


def test_a_few_launches_stay_as_they_are(graphs: list[Compiled]) -> None:
    agree(lambda xs: torch._foreach_exp(xs), [random([(3,), (4,), (5,)])])
    assert not any(s.lengths for s in launches(graphs[0]))
