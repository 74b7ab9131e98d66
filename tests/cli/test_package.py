"""`flambeau export`, `run`, `inspect` and `size`: a function on its way through a file."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from flambeau.cli import main


def test_from_a_function_to_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, package = tmp_path / "example.py", str(tmp_path / "norm.flam")
    file.write_text("import torch\ndef norm(x): return torch.relu(x - x.mean(-1, keepdim=True))\n"
                    "def norm_inputs(): return (torch.randn(4, 16),)\n")
    assert main(["export", f"{file}:norm", "-o", package]) == 0
    assert package in capsys.readouterr().out
    np.save(tmp_path / "x.npy", np.arange(64, dtype=np.float32).reshape(4, 16))
    assert main(["run", package, "--input", f"x={tmp_path}/x.npy", "--output", f"{tmp_path}/y"]) == 0
    assert np.array_equal(np.load(tmp_path / "y0.npy")[0], np.maximum(np.arange(16) - 7.5, 0).astype(np.float32))
    assert main(["inspect", package, "--texts"]) == 0
    shown = capsys.readouterr().out
    assert "forward(x: float32 [4, 16] contiguous) -> float32" in shown and "flambeau_mean_sub_relu_" in shown
    assert main(["size", package, "--html", f"{tmp_path}/size.html"]) == 0
    for shown in (capsys.readouterr().out, (tmp_path / "size.html").read_text()):
        assert "kernels of cpu" in shown and "mean, sub, relu (float32)" in shown
    assert main(["export", f"{file}:norm", "-o", f"{tmp_path}/bare.flam", "--drop-debug"]) == 0
    assert (tmp_path / "bare.flam").stat().st_size < Path(package).stat().st_size
    assert main(["size", f"{tmp_path}/bare.flam"]) == 0 and "kernel code" in capsys.readouterr().out
    words = ["bench", package, "--model", f"{file}:norm", "--limit", "0.05", "--json", f"{tmp_path}/load.json"]
    with patch("flambeau.bench.packages.available", lambda peers: ["eager"]):
        assert main(words) == 0
    package_row, eager = json.loads((tmp_path / "load.json").read_text())["rows"]
    assert package_row["name"] == "package" and eager["name"] == "eager"
    for row in (package_row, eager):
        assert 0 < row["latency"]["p50"] <= row["latency"]["p99"] and row["calls"]["1"] > 0 and row["calls"]["2"] > 0
    with pytest.raises(SystemExit):
        main(["bench", str(tmp_path / "none.flam")])
    assert "is neither a file (*.flam) nor one of" in capsys.readouterr().err
    for words in (["run", "none.flam"], ["inspect", "none.flam"], ["run", package, "--output", "/no/folder/y"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "there is no f" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert main(["run", package, "--input", f"{tmp_path}/x.npy"]) == 1
    assert "input 'x': expected float32 [4, 16] contiguous, got float64 [3]" in capsys.readouterr().err


def test_arguments_are_described_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, package = tmp_path / "example.py", str(tmp_path / "pick.flam")
    file.write_text("import torch\ntable = torch.nn.Parameter(torch.randn(10, 8))\n"
                    "def pick(ids, x): return table[ids].sum() * x\n")
    words = ["export", f"{file}:pick", "-o", package, "--args"]
    assert main([*words, "int64[ids=4]", "float32[N=5:2..64, 8]"]) == 0
    assert main(["inspect", package]) == 0
    shown = capsys.readouterr().out
    assert "ids: int64 [ids] contiguous" in shown and "x: float32 [2..64, 8] contiguous" in shown
    np.save(tmp_path / "ids.npy", np.arange(3))
    np.save(tmp_path / "x.npy", np.zeros((7, 8), np.float32))
    assert main(["run", package, "--input", f"ids={tmp_path}/ids.npy", "--input", f"x={tmp_path}/x.npy"]) == 0
    assert "float32 [7, 8]" in capsys.readouterr().out
    for wrong, message in (("float33[4]", "'float33[4]' is not an argument"), ("float32[4,]", "is not an argument"),
                           ("float32[N=4:8]", "is not an argument"),
                           ("float32[N=4, N=5]", "size N is 4 and 5")):
        assert main([*words, wrong]) == 1
        assert message in capsys.readouterr().err
