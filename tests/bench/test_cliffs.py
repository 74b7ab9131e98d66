"""Random cases: the same seed draws the same case, every family runs, and the summary says how far we are behind."""

import pytest
import torch

from flambeau.bench.cliff_cases import FAMILIES, Input, draw
from flambeau.bench.cliffs import CliffRow, cliff_chart, measure, step, summarise
from flambeau.report.performance import random_cases
from flambeau.results_file import plain


def test_every_family_runs() -> None:
    seen = set()
    for seed in range(120):
        case, again = draw(seed, "tiny"), draw(seed, "tiny")
        assert str(case) == str(again)
        inputs = case.tensors("cpu")
        assert all(torch.equal(a, b) for a, b in zip(inputs, again.tensors("cpu")))
        assert step(case, "eager")(*inputs)
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
    assert [row[0] for row in sheet.rows] == ["2 far", "1 near"] and text == "The worst 2 of 2."
    assert "99% of the cases" in cliff_chart(rows, "two cases")


@pytest.mark.slow
def test_a_run() -> None:
    *_, (rows, summary) = measure("cpu", "tiny", "reduction", 2, 11, ("eager", "flambeau"), 1, 100.0)
    assert [row.errors for row in rows] == [{}, {}] and summary["cases"] + summary["short"] == 2
