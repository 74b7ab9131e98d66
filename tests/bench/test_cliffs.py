"""Random cases: the same seed draws the same case, every family runs, and the summary says how far we are behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.bench import cliffs
from flambeau.bench.cliff_cases import FAMILIES, Input, draw
from flambeau.bench.cliffs import CliffRow, cliff_chart, measure, step, summarise
from flambeau.errors import UnsupportedError
from flambeau.report.performance import random_cases
from flambeau.results_file import plain, write_results


def test_every_family_runs() -> None:
    seen = set()
    for seed in range(120):
        case, again = draw(seed, "tiny"), draw(seed, "tiny")
        assert str(case) == str(again)
        inputs = case.tensors("cpu")
        assert all(torch.equal(a, b) for a, b in zip(inputs, again.tensors("cpu")))
        assert step(case, "eager", [])(*inputs)
        seen.add(case.family)
    assert seen == set(FAMILIES)


def test_inputs_lie_as_drawn() -> None:
    x = Input((2, 3, 5), torch.float32, (0, 2, 1), gap=4).made("cpu")
    assert (x.shape, x.stride()) == ((2, 3, 5), (35, 1, 7))


def test_the_worst_come_first() -> None:
    rows = [CliffRow("near", "scan", 1, 1 << 20, 1, {"eager": 2e-3, "inductor": 1e-3, "flambeau": 1.02e-3}),
            CliffRow("far", "norm", 2, 1 << 20, 2, {"eager": 1e-3, "inductor": 2e-3, "flambeau": 3e-3}),
            CliffRow("short", "norm", 3, 1 << 4, 2, {"eager": 1e-6, "flambeau": 9e-6})]
    summary = summarise(rows, 1e9)
    assert (summary["cases"], summary["short"], summary["worst"]) == (2, 1, pytest.approx(3.0))
    assert summary["within"] == {"1.05": 0.5, "1.1": 0.5, "1.5": 0.5, "2.0": 0.5}
    text, sheet = random_cases({"rows": plain(rows), "summary": summary})
    assert [row[0] for row in sheet.rows] == ["2 far", "1 near"] and text == \
        "The worst 2 of 2. Not counted: 1 that take less than 20 microseconds."
    assert "99% of the cases" in cliff_chart(rows, "two cases")


def test_what_has_no_time_is_counted_and_gives_no_file(tmp_path: Path) -> None:
    rows = [CliffRow("lost", "scan", 1, errors={"part": "no time"}),
            CliffRow("alone", "scan", 2, seconds={"eager": 1e-3})]
    summary = summarise(rows, 1e9)
    assert (summary["cases"], summary["short"], summary["without a time"]) == (0, 0, 2)
    with pytest.raises(UnsupportedError, match="mean of no measured case"):
        write_results(tmp_path / "cliffs.json", "cliffs", rows, summary)
    assert not list(tmp_path.iterdir())


def test_what_a_process_left_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases are measured wave by wave; one that a process did not come to says why."""
    def run(module: str, parts: dict[str, Any], *_: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, given in parts.items():
            done, *left = given["seeds"]
            yield name, {"rows": {str(done): {"seconds": {"eager": 2e-3, "flambeau": 1e-3}}}}
            if left:
                yield name, {"errors": {f"case {left[0]}": "ValueError: of its own"}}
                yield name, {"errors": {"part": "no time"}}

    monkeypatch.setattr(cliffs, "run", run)
    *_, (rows, summary) = measure("cpu", "tiny", "scan", 17, 3, ("eager", "flambeau"), 2, 100.0)
    assert len(rows) == 17 and summary["cases"] == 3 and summary["without a time"] == 14  # of 8, 8 and 1
    why = [row.errors.get("part") for row in rows]
    assert why[:8] == [None, "ValueError: of its own", *["no time"] * 6] and why[16] is None


@pytest.mark.slow
def test_a_run() -> None:
    *_, (rows, summary) = measure("cpu", "tiny", "reduction", 2, 11, ("eager", "flambeau"), 1, 100.0)
    assert [row.errors for row in rows] == [{}, {}] and summary["cases"] + summary["short"] == 2
