"""The bench of contractions in small: every group runs, results agree, and what decides is in the summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flambeau.bench import contraction_search, contractions
from flambeau.bench.contraction_cases import cases
from flambeau.bench.contraction_search import SearchRow
from flambeau.bench.contractions import ContractionRow, bars, measure, measure_case, summarise
from flambeau.cli import main
from flambeau.config import config


def row(group: str, name: str, seconds: float) -> ContractionRow:
    return ContractionRow(name, group, 1.0, True, {"eager": 2.0, "flambeau": seconds, "own": seconds})


def test_what_decides() -> None:
    made = [row("products", "64 x 64 x 512", 4.0), row("products", "64 x 64 x 64", 100.0),
            row("FP8", "per tensor, fast, 8 x 8 x 8", 1.0), row("FP8", "per row, fast, 8 x 8 x 8", 1.05),
            row("FP8", "block scales, fast, 8 x 8 x 8", 1.25), row("experts", "one, 8 x 8 x 8", 1.0),
            row("experts", "8, 8 x 8 x 8", 2.0),
            SearchRow("8 x 8 x 8", cold_s=[3.0, 4.0], second_s=0.5, choices=[["mm is ours"], ["mm is ours"]])]
    found = bars(made)
    assert found["own kernels over the library, aligned, depth 512 and more"] == 0.5
    assert found["FP8, fast: per row over per tensor"] == 1.05
    assert found["FP8, fast: block scales over per tensor"] == 1.25 and found["FP8, precise: ms"] is None
    assert found["8 experts, rate over one product's"] == 0.5 and found["64 experts, rate over one product's"] is None
    assert found["first call of a new shape, s"] == 4.0 and found["choices are equal"] and found["cold compiles"] == 2
    made[-1] = SearchRow("8 x 8 x 8", choices=[["mm is ours"], ["mm is the library's"]])
    assert bars(made)["choices are equal"] is False
    said = summarise(made, 7)
    assert said["seed"] == 7 and said["products"]["least over the best peer"] == 0.02


def test_shapes_follow_from_the_seed() -> None:
    first, again, other = ([c.name for c in cases(seed, 64, 3, 9)] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("group", ["products", "tails", "FP8", "experts"])
def test_results_agree_in_small(group: str) -> None:
    with config.override(target="interpreter"):
        mine = [c for c in cases(3, 128, 2, 0) if c.group == group]
        assert mine
        for case in mine:
            made = measure_case(case, ("eager", "flambeau"), "cpu")
            assert "flambeau" in made.error or "eager" in made.errors, made  # eager on CPUs has no block scales
            assert "flambeau" not in made.errors or "eager" in made.errors, made.errors


@pytest.mark.slow
def test_processes_that_search(monkeypatch: pytest.MonkeyPatch) -> None:
    made, = measure("cpu", "search", 5, 64, (0, 0), (), 300, colds=1)
    assert isinstance(made, SearchRow) and not made.errors and len(made.cold_s) == 1 and made.second_s
    assert made.equal and len(made.choices) == 2
    monkeypatch.setattr(contraction_search.sys, "executable", "/bin/false")
    failed = contraction_search.measure("cpu", (8, 8, 8), 1, float("inf"))
    assert failed.errors and not failed.cold_s and "search" in contractions.line(failed)


def test_the_file(tmp_path: Path) -> None:
    out = tmp_path / "contractions.json"
    only = ["--only", "products", "--backends", "eager,flambeau", "--json", str(out)]
    assert main(["bench", "contractions", *only]) == 0
    report = json.loads(out.read_text())
    assert report["command"] and report["commit"] and report["machine"]["torch"] and report["machine"]["date"]
    assert isinstance(report["summary"]["seed"], int) and len(report["rows"]) == 3
