"""`flambeau bench`: the choices of the command line, with the measuring itself kept small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau import cli
from flambeau.bench.numerics import GROUPS
from flambeau.report.performance import write


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


def test_steps_of_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "optimizers.json"
    assert cli.main(["bench", "optimizers", "--tiny", "--only", "SGD, momentum, 200", "--json", str(file)]) == 0
    row, = json.loads(file.read_text())["rows"]
    assert set(row["seconds"]) == {"foreach", "fused", "flambeau", "accelerate"} and row["floor"] > 0
    write(tmp_path, tmp_path)
    assert "| SGD, momentum, 200 equal |" in (tmp_path / "performance.md").read_text()


@pytest.mark.parametrize(("words", "names", "line"), [
    pytest.param(["device", "--tiny", "--only", "places"], ["copy", "places of maxima"], "| places of maxima |",
                 marks=pytest.mark.slow),
    (["device-steps", "--size", "tiny", "--only", "matmul", "--limit", "0.1"], ["matmul"], "| matmul forward |"),
])
def test_the_device_is_measured(tmp_path: Path, words: list[str], names: list[str], line: str) -> None:
    """In a process of its own: the device is there for the rest of it."""
    code = f"from flambeau import cli; raise SystemExit(cli.main({['bench', *words, '--json', 'device.json']}))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    if "OpenCL" in done.stderr and done.returncode:
        pytest.skip("no OpenCL device")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "device.json").read_text())["rows"]
    assert [row["name"] for row in rows] == names and all(row["seconds"]["flambeau"] > 0 for row in rows)
    write(tmp_path, tmp_path)
    assert any(line in page.read_text() for page in tmp_path.glob("*.md"))


def test_whole_networks_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own for the network; what the CPU does not have is named."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "compiled.json"
    command = ["bench", "compiled", "--only", "lm24 infer", "--backends", "eager,ours,whole,graphs", "--jobs", "1"]
    assert cli.main([*command, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["kind"] == "compiled" and report["summary"]["jobs"] == 1
    row, = report["rows"]
    assert set(row["ms"]) == set(row["first_s"]) == {"eager", "ours", "whole"} and min(row["ms"].values()) > 0
    assert (row["tensors"], row["unequal_with_regions"], row["unequal_from_run_to_run"]) == (1, 0, 0)
    assert row["peak_mib"] == {} and set(row["skipped"]) == {"graphs", "memory"}
    write(tmp_path, tmp_path)
    assert "| lm24 | infer |" in (tmp_path / "performance.md").read_text()


def test_an_unknown_way_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "compiled", "--backends", "eager,nothing"]) == 1
    assert "nothing" in capsys.readouterr().err


def test_values_that_differ_from_eagers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task of every kind and a model; none should differ, and all that was planned is done."""
    file = tmp_path / "numerics.json"
    only = ("alone float32 abs,chains float32 0,entries square bfloat16,large rms_norm float32,models dlrm,"
            "optimizers AdamW fused float16 scaled,optimizers AdamW foreach bfloat16")
    assert cli.main(["bench", "numerics", "--only", only, "--jobs", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    summary, rows = report["summary"], {row["name"]: row for row in report["rows"]}
    assert summary["done"] == summary["planned"]
    assert summary["planned"] == {"alone": 1, "chains": 1, "entries": 1, "large": 1, "optimizers": 2}
    assert len(rows) == 7 and all(row["values"] > 0 == row["unequal"] and not row["errors"] for row in rows.values())
    assert rows[GROUPS["chains"]]["cases"] == 10 and rows[GROUPS["optimizers"]]["cases"] == 2
    assert set(summary["ms"]["dlrm"]) == {"eager", "exact", "fast"} and summary["error"]["dlrm"] > 0
    assert "done:" in capsys.readouterr().out
    write(tmp_path, tmp_path)
    assert f"| {GROUPS['alone']} | 8 |" in (tmp_path / "performance.md").read_text()
