"""The search for block shapes: which are tried, which are dropped, and how the choice is stored and found again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flambeau import pipeline
from flambeau.codegen.source import BlockSource
from flambeau.compile.backend import check_options
from flambeau.compile.disk_cache import keepers, stats
from flambeau.config import config
from flambeau.errors import OptionError
from flambeau.ir.tuning import AROUND, UNSCALED, Scale
from flambeau.targets import search
from flambeau.targets.base import get_target
from flambeau.targets.cuda.interpreter import InterpreterTarget

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[BlockSource]:
    """The sources of all kernels that are compiled."""
    seen: list[BlockSource] = []
    monkeypatch.setattr(pipeline, "OBSERVERS", [lambda made: seen.extend(made.texts)])
    return seen


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    with config.override(cache_dir=tmp_path / "cache"):
        yield


class Clock:
    """A fake clock: candidate `fastest` of every kernel takes one second, the others two. Counts what it times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fastest: int) -> None:
        self.fastest, self.timed = fastest, 0
        monkeypatch.setattr(InterpreterTarget, "seconds", self.seconds)

    def seconds(self, run: Callable[[], object]) -> float:
        self.timed += 1
        name = run.func.name  # type: ignore[attr-defined]
        return 1.0 if name.endswith(f".{self.fastest}") else 2.0


def compiled(f: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="flambeau", options={"target": "interpreter", "search": True, **options})


FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "map": (lambda x: x * 2 + 1, (50, 60)),
    "softmax": (lambda x: x.softmax(1), (9, 70)),
    "columns": (lambda x: x.sum(0), (70, 40)),
    "long rows": (lambda x: x.mean(1), (1, 17000)),
    "scan": (lambda x: x.cumsum(1), (3, 40)),
    "pooling": (lambda x: F.max_pool2d(x[None], 3, 2, 1), (4, 17, 19)),
    "floats of 8 bits": (lambda x: x.to(torch.float8_e4m3fn), (50, 60)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_candidates_agree_and_the_fastest_is_kept(name: str, monkeypatch: pytest.MonkeyPatch,
                                                      sources: list[BlockSource],
                                                      caplog: pytest.LogCaptureFixture) -> None:
    f, shape = FUNCTIONS[name]
    x = torch.randn(shape)
    clock = Clock(monkeypatch, 1)
    caplog.set_level(logging.INFO, search.__name__)
    run = compiled(f)
    for _ in range(2):
        torch.testing.assert_close(run(x).float(), f(x).float())
    assert all(s.alternatives for s in sources)
    assert clock.timed == search.ROUNDS * sum(1 + len(s.alternatives) for s in sources)
    assert "dropped" not in caplog.text and "candidate 1 of" in caplog.text


@pytest.mark.parametrize("dtype", search.ROUNDING)
def test_results_agree_up_to_rounding(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -3.0, float("nan"), 0.0], dtype=torch.float64)
    wanted, near, far = (y.to(dtype) for y in (x, x * (1 + torch.finfo(dtype).eps), x * 2))
    assert search.agree(near, wanted) and not search.agree(far, wanted)


def test_later_processes_do_not_time(monkeypatch: pytest.MonkeyPatch) -> None:
    f, shape = FUNCTIONS["map"]
    x = torch.randn(shape)
    clock = Clock(monkeypatch, 2)
    compiled(f)(x)
    assert clock.timed
    clock.timed = 0
    made: list[str] = []
    build = search.built

    def built(target: Any, sources: Any) -> Any:
        made.extend(s.name for s in sources)
        return build(target, sources)

    monkeypatch.setattr(search, "built", built)
    torch.testing.assert_close(compiled(f)(x), f(x))
    assert clock.timed == 0 and [name.partition(".")[2] for name in made] == ["2"]


def test_graphs_from_the_cache_find_their_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    f, shape = FUNCTIONS["map"]
    x = torch.randn(shape)
    clock = Clock(monkeypatch, 2)
    with config.override(verify=False):  # otherwise nothing is stored
        compiled(f)(x)
        for keeper in list(keepers):
            keeper.join()
        assert clock.timed
        clock.timed, before = 0, stats["hit"]
        torch.testing.assert_close(compiled(f)(x), f(x))
    assert (clock.timed, stats["hit"]) == (0, before + 1)


def test_what_gains_nothing_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    f, shape = FUNCTIONS["map"]
    Clock(monkeypatch, 99)
    caplog.set_level(logging.INFO, search.__name__)
    compiled(f)(torch.randn(shape))
    assert "candidate 0 of" in caplog.text


@pytest.mark.parametrize("how", ["other values", "part of it", "does not parse", "does not start"])
def test_candidates_that_differ_are_dropped(how: str, monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    variants = InterpreterTarget.variants

    def spoiled(source: BlockSource) -> BlockSource:
        first = source.parts[0]
        if how == "part of it":
            return replace(source, parts=(replace(first, grid=f"({first.grid}) - 1"), *source.parts[1:]))
        if how == "does not start":
            refuse = "(_ for _ in ()).throw(RuntimeError('out of resources'))"
            return replace(source, parts=(replace(first, grid=refuse), *source.parts[1:]))
        wrong = source.text.replace("2.0", "2.5") if how == "other values" else source.text + "def ("
        assert wrong != source.text
        return replace(source, text=wrong)

    def offer(self: InterpreterTarget, kernel: Any, source: Any) -> Any:
        made: Any = variants(self, kernel, source)
        return replace(made, alternatives=tuple(map(spoiled, made.alternatives)))

    monkeypatch.setattr(InterpreterTarget, "variants", offer)
    Clock(monkeypatch, 1)
    caplog.set_level(logging.INFO, search.__name__)
    f, shape = FUNCTIONS["map"]
    x = torch.randn(shape)
    torch.testing.assert_close(compiled(f)(x), f(x))
    assert "candidate 0 of 1," in caplog.text
    assert ("is dropped" in caplog.text) == (how in ("other values", "part of it"))


def test_steps_see_the_results_of_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 1)
    f = lambda x: (x.softmax(1).cumsum(1) * 2).sum(0)  # noqa: E731
    x = torch.randn(5, 70)
    torch.testing.assert_close(compiled(f)(x), f(x))


def test_random_numbers_are_those_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 1)
    x = torch.ones(3000)
    f = lambda x: F.dropout(x, 0.5)  # noqa: E731
    torch.manual_seed(0)
    got = compiled(f)(x)
    torch.manual_seed(0)
    assert torch.equal(got, compiled(f, search=False)(x))


def test_updates_in_place_and_scatters_are_left_alone(monkeypatch: pytest.MonkeyPatch,
                                                      sources: list[BlockSource]) -> None:
    clock = Clock(monkeypatch, 1)

    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.zeros(4).index_add(0, i, torch.ones(6))

    x = torch.zeros(5)
    got = compiled(f)(x, torch.tensor([0, 1, 1, 3, 3, 3]))
    assert x.tolist() == [1] * 5 and got.tolist() == [1, 2, 0, 3]
    assert not any(s.alternatives for s in sources) and clock.timed == 0


def test_run_time_sizes_are_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1)
    torch._dynamo.reset()
    options = {"target": "interpreter", "search": True}
    f = torch.compile(lambda x: x * 2 + 1, backend="flambeau", options=options, dynamic=True)
    for n in (70, 90, 5000):
        x = torch.randn(n)
        torch.testing.assert_close(f(x), x * 2 + 1)
    first = clock.timed
    assert first
    torch._dynamo.reset()
    g = torch.compile(lambda x: x * 2 + 1, backend="flambeau", options=options, dynamic=True)
    g(torch.randn(100))  # a size between the same powers of two
    assert clock.timed == first


def test_a_plan_may_not_wait_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1)
    monkeypatch.setattr(InterpreterTarget, "queue", lambda self: None)
    f, shape = FUNCTIONS["map"]
    x = torch.randn(shape)
    torch.testing.assert_close(compiled(f)(x), f(x))
    assert clock.timed == 0


def test_a_plan_may_be_asked_to_decide_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1)
    f, shape = FUNCTIONS["map"]
    x = torch.randn(shape)
    g = compiled(f)
    with search.undecided():
        torch.testing.assert_close(g(x), f(x))
        assert clock.timed == 0
    torch.testing.assert_close(g(x), f(x))
    assert clock.timed > 0


def test_what_the_clock_chooses_is_not_deterministic(monkeypatch: pytest.MonkeyPatch,
                                                     sources: list[BlockSource]) -> None:
    Clock(monkeypatch, 1)
    torch.use_deterministic_algorithms(True)
    try:
        compiled(lambda x: x * 2)(torch.randn(9))
    finally:
        torch.use_deterministic_algorithms(False)
    assert sources and not any(s.alternatives for s in sources)


def test_by_default_nothing_is_searched(sources: list[BlockSource]) -> None:
    f, shape = FUNCTIONS["map"]
    compiled(f, search=False)(torch.randn(shape))
    assert sources and not any(s.alternatives for s in sources)
    with config.override(search=True):
        torch._dynamo.reset()
        torch.compile(f, backend="flambeau", options={"target": "interpreter"})(torch.randn(shape))
    assert sources[-1].alternatives


def test_the_option_is_checked() -> None:
    with pytest.raises(OptionError, match="search"):
        check_options({"search": "hard"}, None)


def test_shapes_stay_near_the_heuristic() -> None:
    assert UNSCALED not in AROUND and len(set(AROUND)) == len(AROUND)
    assert (Scale(1, -1).sized(64), Scale(-9).sized(64), Scale(1, 1).warped(32)) == (128, 1, 32)
    assert (Scale(warps=-1).warped(1), Scale(stages=-2).staged(4), Scale(stages=-2).staged(1)) == (1, 2, 1)


def test_memory_is_shared_with_its_address() -> None:
    target = get_target("interpreter")
    assert isinstance(target, InterpreterTarget)
    x = torch.zeros(3)
    target.memory(x.data_ptr(), 8).fill_(1)
    assert x.view(torch.uint8).tolist() == [1] * 8 + [0] * 4
