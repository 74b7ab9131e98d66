"""`flambeau bench`: the choices of the command line, with the measuring itself kept small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flambeau import cli


def test_table_of_floors_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "floors.json"
    command = ["bench", "ops", "--tiny", "--only", "softmax,expm1", "--backends", "eager,flaggems"]
    assert cli.main([*command, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["kind"] == "floors"
    assert report["summary"]["sizes"] == "tiny" and report["summary"]["bandwidth"] > 0
    assert [row["name"] for row in report["rows"]] == ["softmax", "expm1"]
    assert set(report["rows"][0]["seconds"]) == {"eager"}
    assert "softmax forward: floor" in capsys.readouterr().out


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "ops", "--target", "cuda"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_no_case_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "ops", "--tiny", "--only", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().out


def test_models_and_their_target(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    command = ["bench", "models", "--only", "mlp", "--size", "tiny", "--infer", "--backends", "eager"]
    assert cli.main([*command, "--limit", "0.01", "--target", "cpu", "--json", str(file)]) == 0
    assert "gpu" not in json.loads(file.read_text())["machine"]
