"""`flambeau ops`: every registered operator has a row, and a cell says what is true of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flambeau.cli import main
from flambeau.ops import LOWERINGS
from flambeau.ops.contraction import CONTRACTIONS
from flambeau.ops.registry import FAMILIES
from flambeau.report import coverage


@pytest.fixture(scope="module")
def rows() -> dict[str, coverage.Operator]:
    return {row.name: row for row in coverage.coverage()}


def test_every_lowering_and_contraction_has_a_row(rows: dict[str, coverage.Operator]) -> None:
    assert {coverage.name_of(op) for op in (*LOWERINGS, *CONTRACTIONS)} <= rows.keys()
    assert FAMILIES.keys() == LOWERINGS.keys()
    assert {cell for row in rows.values() for cell in row.cells.values()} == set(coverage.CELLS)


@pytest.mark.parametrize(("name", "family", "dtype", "cell"), [
    ("aten.hardswish", "activation", "float32", "native"),
    ("aten.hardswish", "activation", "complex64", "none"),  # PyTorch does not have it either
    ("aten.exp", "transcendental", "complex64", "extern"),  # PyTorch has it, the loop language has no complex
    ("aten.bitwise_and", "bitwise", "float32", "none"),
    ("aten.mm", "contraction", "float32", "library"),
    ("aten.view", "view", "float32", "partly"),
    ("aten.sort", coverage.UNLOWERED, "float32", "extern"),
])
def test_cells(rows: dict[str, coverage.Operator], name: str, family: str, dtype: str, cell: str) -> None:
    assert (rows[name].family, rows[name].cells[dtype]) == (family, cell)


def test_backward_operators_have_the_dtypes_of_gradients() -> None:
    known = {"gelu": ({torch.float32, torch.int64}, {torch.float32})}
    assert coverage.lookup("gelu_backward", known) == {torch.float32}
    assert coverage.lookup("_gelu", known) == {torch.float32, torch.int64}
    assert coverage.lookup("no_such_operator", known) is None


def test_without_the_tables_of_pytorch_dtypes_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "opinfo_dtypes", dict)
    found = {row.name: row for row in coverage.coverage([torch.float32, torch.complex64])}
    assert all(row.assumed for row in found.values())
    assert found["aten.hardswish"].cells == {"float32": "native", "complex64": "extern"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ops.json"
    assert main(["ops", "--family", "softmax", "--dtype", "float32", "--json", str(file)]) == 0
    assert "_log_softmax" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["counts"] == {"native": len(report["operators"])}


@pytest.mark.parametrize(("arguments", "text"), [
    (["--family", "nothing"], "no family"), (["--dtype", "float31"], "no dtype"),
    (["--filter", "zzz"], "No operator")])
def test_what_is_not_there(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", *arguments]) == 1
    printed = capsys.readouterr()
    assert text in printed.out + printed.err
