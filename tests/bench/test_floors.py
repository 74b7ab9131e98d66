"""The table of memory floors: its bytes, and the way through it in tiny sizes on the CPU."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flambeau.bench import floors
from flambeau.bench.floor_cases import CASES, FORWARD, SIZES, Case, Draw, chosen
from flambeau.report import performance
from flambeau.results_file import plain

# Milliseconds at 4.3 TB/s, in the full sizes and float32.
FLOORS = {
    "cumsum dim 0 forward": 0.125, "cummax dim 1 forward": 0.250, "cummax one row forward": 0.250,
    "max_pool3d forward": 0.086, "max_pool3d gradient": 0.086, "avg_pool3d forward": 0.070,
    "avg_pool3d gradient": 0.070, "max_unpool3d forward": 0.086, "max_pool2d forward": 0.335,
    "max_pool2d gradient": 0.335, "grid_sampler_3d random forward": 0.128, "grid_sampler_3d smooth gradient": 0.193,
    "embedding_bag weighted sum forward": 0.285, "embedding_bag max forward": 0.285,
    "embedding_bag weighted sum gradient": 0.404, "embedding_bag max gradient": 0.182, "index_add_ forward": 0.375,
    "native_dropout forward": 0.141, "exponential_ forward": 0.062, "softmax forward": 0.125,
    "hardswish gradient": 0.187,
}
TINY = floors.drawer("tiny", "float32", "cpu")


def label(case: Case) -> str:
    return f"{case.name} {case.direction}"


def named(name: str) -> Case:
    return next(case for case in CASES if label(case) == name)


def test_cases_have_names_of_their_own() -> None:
    names = [label(case) for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", FLOORS)
def test_bytes_in_full_size(name: str) -> None:
    case = named(name)
    with FakeTensorMode():
        inputs = case.make(Draw(SIZES["full"], torch.float32, torch.device("cpu")))
        outputs = floors.flat(case.run(*inputs))
    assert case.moved(inputs, outputs) / floors.REFERENCE * 1e3 == pytest.approx(FLOORS[name], abs=6e-4)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_cases_agree_with_float64(case: Case) -> None:
    row = floors.measure_case(case, TINY, ["eager"], bandwidth=1e10)
    assert not row.errors
    assert row.floor == row.bytes / 1e10 > 0
    assert set(row.accuracy) == (set() if case.random else {"eager"})


@pytest.mark.parametrize("name", ["cumsum dim 0 forward", "max_pool2d gradient", "index_add_ forward",
                                  "exponential_ forward", "embedding_bag max gradient"])
def test_ours_is_measured_beside_eager(name: str) -> None:
    rows = list(floors.measure([named(name)], TINY, ["eager", "flambeau"], 1e10, limit=300.0))
    assert not rows[0].errors
    assert set(rows[0].seconds) == {"eager", "flambeau"}


def test_half_precision_is_judged_by_its_own_tolerance() -> None:
    row = floors.measure_case(named("softmax forward"), floors.drawer("tiny", "bfloat16", "cpu"), ["eager"], 1e10)
    assert not row.errors and 1e-5 < row.accuracy["eager"] < 2e-2


def failing_backend(graph: torch.fx.GraphModule, _: object):
    raise RuntimeError("cannot")


def wrong_backend(graph: torch.fx.GraphModule, _: object):
    return lambda *inputs: tuple(t + t.abs().max() if t.is_floating_point() else t for t in graph(*inputs))


def slow_backend(graph: torch.fx.GraphModule, _: object):
    time.sleep(30)
    return graph.forward


@pytest.mark.parametrize("backend, text, timed", [(failing_backend, "cannot", False), (wrong_backend, "wrong", True),
                                                  (slow_backend, "longer than 1 seconds", False)])
def test_a_bad_backend_is_reported_and_the_others_are_timed(backend, text: str, timed: bool,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "compiled", lambda f, name: torch.compile(f, backend=backend) if name == "bad" else f)
    torch.compiler.reset()  # imports Dynamo, which by itself may take longer than the limit
    row = floors.measure_case(named("softmax forward"), TINY, ["bad", "eager"], 1e10, limit=1.0)
    torch._dynamo.reset()
    assert list(row.errors) == ["bad"] and text in row.errors["bad"]
    assert set(row.seconds) == ({"bad", "eager"} if timed else {"eager"})
    assert floors.mark(row, "bad") == ("!" if timed else "failed")


def test_indices_must_be_those_of_eager() -> None:
    eager = torch.ones(4), torch.arange(4)
    assert floors.fault((torch.ones(4), torch.tensor([0, 1, 2, 0])), eager, 0.0, 0.0).startswith("2.5e-01 of the ind")
    assert floors.fault(eager, eager, 0.0, 0.0) is None
    assert floors.fault(eager, eager, float("nan"), 0.0) is not None
    assert "torch.int32" in floors.fault((eager[0], eager[1].int()), eager, None, 0.0)


def test_errors_are_relative_and_know_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    exact = torch.tensor([4.0, -inf, nan], dtype=torch.float64)
    assert floors.error((torch.tensor([4.0, -inf, nan]),), (exact,)) == 0.0
    assert floors.error((torch.tensor([5.0, -inf, nan]),), (exact,)) == pytest.approx(0.25)
    assert not floors.error((torch.tensor([nan, -inf, nan]),), (exact,)) <= 1.0


def test_flaggems_takes_part_where_it_has_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package, which is not installed here."""
    entered = []
    gems = ModuleType("flag_gems")
    gems.__spec__ = SimpleNamespace(name="flag_gems")

    class UseGems:
        def __enter__(self) -> None:
            entered.append(True)

        def __exit__(self, *_: object) -> None:
            entered.append(False)

    gems.use_gems, gems.all_registered_keys = UseGems, lambda: ["softmax", "_softmax"]
    monkeypatch.setitem(sys.modules, "flag_gems", gems)
    backends = floors.available(["eager", "flaggems"])
    rows = list(floors.measure([named("softmax forward"), named("expm1 forward")], TINY, backends, 1e10, 60.0))
    assert [set(row.seconds) for row in rows] == [{"eager", "flaggems"}, {"eager"}]
    assert entered == [True, False] * 2 and not any(row.errors for row in rows)


def test_flaggems_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors.importlib.util, "find_spec", lambda name: None)
    assert floors.available([*floors.PEERS, *floors.OURS]) == ["eager", "inductor", "flambeau", "accelerate"]


def test_choice_of_cases() -> None:
    assert {case.group for case in chosen("scan/,softmax")} == {"scan", "rows"}
    assert all(case.direction == FORWARD for case in chosen("pool", [FORWARD]))
    assert len(chosen()) == len(CASES)


def test_table_and_means() -> None:
    rows = [floors.FloorRow("a", "scan", "forward", 8, 2.0, {"eager": 8.0, "flambeau": 2.0}),
            floors.FloorRow("b", "sampling", "forward", 8, 1.0, {"eager": 1.0, "flambeau": 4.0})]
    summary = floors.summarise(rows, ["eager", "flambeau"], 1e12)
    assert summary["mean"] == pytest.approx({"eager": 2.0, "flambeau": 2.0})
    assert summary["mean without sampling"] == pytest.approx({"eager": 4.0, "flambeau": 1.0})
    *_, sheet = performance.floors({"kind": "floors", "machine": {}, "rows": plain(rows),
                                    "summary": summary | {"dtype": "float32", "sizes": "tiny"}})
    assert sheet.rows[0] == ["a", "2000.000", "4.00", "**1.00**", "0.25", "4.30"] and len(sheet.means) == 2
    assert floors.line(rows[0], ["eager", "flambeau"]) == "a forward: floor 2000.000 ms; eager 4.00, flambeau 1.00"
