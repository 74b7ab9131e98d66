"""Findings about bits: a difference is found, named and counted, and so is eager that does not repeat itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
import torch

from flambeau.bench import bits
from flambeau.bench.numerics import NumericsRow, over_eager


def test_a_difference_is_counted_and_named() -> None:
    eager = [torch.tensor([1.0, 2.0]), torch.tensor([0.0])]
    ours = [torch.tensor([1.0, 2.0000002384185791]), torch.tensor([-0.0])]
    finding = bits.found("alone", "add", ours, eager)
    assert (finding.values, finding.unequal) == (3, 2) and "result 0: 1 of 2, 1 ulps" in finding.note
    row = NumericsRow("operators")
    row.add(asdict(finding))
    row.add(asdict(bits.Finding("alone", "sub", 5, 0)))
    row.add(asdict(bits.Finding("alone", "mul", error="no kernel")))
    row.add(asdict(bits.Finding("alone", "sum", 5, 0, bits.UNSTEADY)))
    assert (row.cases, row.values, row.unequal, row.unsteady) == (3, 13, 2, 1)
    assert row.differ == [f"add: {finding.note}"] and row.errors == {"mul": "no kernel"}


def test_other_operators_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds planted faults: an operator whose second eager call differs by a rounding, and one that raises."""
    calls: list[int] = []

    def unsteady(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return a * b if len(calls) == 1 else (a * b) * (1 + 2e-7)

    def fails(*tensors: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")

    monkeypatch.setattr(bits, "ALONE", {"unsteady": unsteady, "fails": fails, "neg": lambda a, b, c: -a})
    found = {f.name: f for f in bits.check_alone(torch.float32, ["unsteady", "fails", "neg"], 64, "cpu")}
    assert found["unsteady float32"].unequal > 0 and found["neg float32"].unequal == 0
    assert found["fails float32"].error == "ValueError: planted" and not found["neg float32"].error


def test_steps_that_eager_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "compiling", lambda: torch.no_grad())
    monkeypatch.setattr(bits, "plain_steps", lambda *args: [torch.rand(3)])
    finding, = bits.check_optimizer("SGD", {"lr": 0.1}, "default", torch.float32, "cpu")
    assert finding.note == bits.UNSTEADY and finding.unequal == 0


def test_a_function_that_is_not_compiled() -> None:
    with pytest.raises(AssertionError, match="nothing was compiled"), bits.compiling():
        pass


def test_all_tasks() -> None:
    tasks = bits.tasks("large", "cpu")
    counts = Counter(task.group for task in tasks)
    assert counts["chains"] * bits.AT_ONCE["chains"] >= 2000 and counts["entries"] > 1000
    assert len({(task.group, task.name) for task in tasks}) == len(tasks), "names choose tasks"
    optimizers = {task.name for task in tasks if task.group == "optimizers"}
    assert {"SGD momentum 0.9 nesterov True fused bfloat16", "Rprop foreach float16 scaled"} <= optimizers
    assert not any(name.startswith("Rprop fused") for name in optimizers), "which has no such form"
    early: Any = {task.group for task in tasks[:120]}
    assert early == set(counts), "some of each, whenever the time is over"


def test_means_over_models() -> None:
    ms = {"a": {"eager": 2.0, "exact": 1.0}, "b": {"eager": 1.0, "exact": 2.0, "fast": 0.5}, "c": {"exact": 1.0}}
    assert over_eager(ms) == pytest.approx({"exact": 1.0, "fast": 0.5})
