"""Statistics and reports of the harness, with fake callables and a fake clock."""

import json
import math
from pathlib import Path

import pytest
import torch

from flambeau.bench import harness, ops
from flambeau.bench.harness import Row, alternate, geometric_mean, group_ratios
from flambeau.report import performance
from flambeau.results_file import plain, write_results
from flambeau.testing.one_order import in_one_order


class FakeClock:
    """Time passes only when a callable says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: float):
        def call() -> None:
            self.calls.append(name)
            self.now += seconds
        return call


def test_alternate_takes_turns_in_rotated_order() -> None:
    clock = FakeClock()
    calls = {"a": clock.work("a", 1.0), "b": clock.work("b", 2.0)}
    times = alternate(calls, limit=0.0, rounds=(3, 9), warmup=1, clock=clock)
    assert clock.calls == list("ab" "ab" "ba" "ab")
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3}


@pytest.mark.parametrize("limit, rounds", [(0.0, 2), (10.0, 4), (1000.0, 6)])
def test_alternate_keeps_the_limit(limit: float, rounds: int) -> None:
    clock = FakeClock()
    times = alternate({"a": clock.work("a", 3.0)}, limit, rounds=(2, 6), warmup=0, clock=clock)
    assert len(times["a"]) == rounds


def test_alternate_without_callables() -> None:
    assert alternate({}) == {}


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geometric_mean([]))


def test_spread_is_relative_to_the_median() -> None:
    assert harness.spread([2.0] * 5) == 0.0
    assert harness.spread([1.0, 2.0, 3.0]) == pytest.approx(1.0)


def test_ratios_by_group_leave_out_failures() -> None:
    rows = [Row("x", "scan", "forward", {"eager": 4.0, "fast": 1.0}),
            Row("y", "scan", "forward", {"eager": 1.0, "fast": 1.0}),
            Row("z", "norm", "forward", {"eager": 1.0}, errors={"fast": "no"})]
    assert rows[2].ratio("fast", "eager") is None
    assert group_ratios(rows, "fast", "eager") == pytest.approx({"scan": 2.0, "all": 2.0})


def test_comparisons_are_with_eager_and_with_peers() -> None:
    assert harness.comparisons(["eager", "inductor", "flambeau:numerics=fast"]) == [
        ("inductor", "eager"), ("flambeau:numerics=fast", "eager"), ("flambeau:numerics=fast", "inductor")]


def test_a_failing_backend_is_reported_and_the_others_are_timed() -> None:
    def broken() -> None:
        raise RuntimeError("no such operator\nand more")

    row = harness.timed(Row("x", "g", "train"), {"good": lambda: None, "bad": broken}, limit=0.0)
    assert set(row.seconds) == {"good"}
    assert row.errors == {"bad": "RuntimeError: no such operator"}


def test_differences_are_counted_in_eager_errors() -> None:
    exact = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    eager = {"w": torch.tensor([1.0, 2.001])}
    got = {"w": torch.tensor([1.0, 2.003])}
    found = harness.differences(got, eager, exact)
    assert found["abs"] == pytest.approx(0.002, rel=1e-3)
    assert found["rel"] == pytest.approx(0.001, rel=1e-2)
    assert found["eager_errors"] == pytest.approx(3.0, rel=1e-2)


def test_differences_do_not_hide_nan_or_a_missing_gradient() -> None:
    one, nan = torch.ones(2), torch.full((2,), math.nan)
    values = {"a": one, "b": one}
    assert math.isnan(harness.differences({"a": nan, "b": one}, values, values)["abs"])
    with pytest.raises(ValueError, match="'b'"):
        harness.differences({"a": one}, values, values)


def test_measure_model_and_report(tmp_path: Path) -> None:
    rows = [harness.measure_model("scans", "tiny", mode, ["eager", "aot_eager"], limit=0.0)
            for mode in harness.STEPS]
    assert all(set(row.seconds) == {"eager", "aot_eager"} and not row.errors for row in rows)
    assert [len(row.accuracy["aot_eager"]) for row in rows] == [len(harness.DRAWS)] * 2
    assert all(draw["rel"] < 1e-5 for row in rows for draw in row.accuracy["aot_eager"])
    sheet, *_ = performance.steps({"rows": plain(rows), "summary": {}})
    assert len(sheet.rows) == 2 and len(sheet.means) == 3 and sheet.heads[-1] == "error of aot_eager"
    assert not any("failed" in row for row in sheet.rows)
    write_results(tmp_path / "r.json", "models", rows, harness.summarise(rows, ["eager", "aot_eager"]))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["machine"]["torch"] == torch.__version__
    assert set(report["summary"]["aot_eager over eager"]) == {"train", "infer", "all"}


def test_operator_cases_have_names_of_their_own() -> None:
    names = [case.name for case in ops.CASES]
    assert len(names) == len(set(names))
    assert {case.family for case in ops.CASES} >= {"scan", "pooling", "sampling", "embedding", "activation",
                                                   "indexing", "reduction", "softmax", "norm"}


@pytest.mark.parametrize("family", sorted({case.family for case in ops.CASES}))
def test_operator_steps_run_in_eager(family: str) -> None:
    for case, dtype, direction in ops.variants(family + "/"):
        ops.operator_step(case, case.make(dtype), direction, "eager")()


@pytest.mark.parametrize("refused", [False, True])
def test_one_order_is_strict_where_torch_can(refused: bool) -> None:
    def run() -> bool:
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        if refused and not warn_only:
            raise RuntimeError("an_operator does not have a deterministic implementation")
        return warn_only

    assert in_one_order(run) is refused
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


def test_one_order_leaves_other_errors() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        in_one_order(lambda: torch.ones(2) + fail("shapes"))
    assert not torch.are_deterministic_algorithms_enabled()


def fail(text: str) -> torch.Tensor:
    raise RuntimeError(text)
