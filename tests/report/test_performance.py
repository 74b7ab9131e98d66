"""docs/results/performance.md and its chart, from made-up results."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from flambeau.errors import UnsupportedError
from flambeau.report import performance

MACHINE = {"cpu": "a CPU", "cores": 2, "threads": 2, "isa": "AVX2", "torch": "2.11", "python": "3.12",
           "date": "2026-01-02T03:04:05"}
ORIGIN = {"command": "flambeau bench floors", "commit": "0123456789"}
GPU = {"gpu": "a GPU", "cuda": "13.0", "triton": "3.6.0"}


def floors(**changes: Any) -> dict[str, Any]:
    rows = [{"name": "cumsum dim 0", "group": "scan", "mode": "forward", "floor": 1e-4, "errors": {},
             "seconds": {"eager": 24e-4, "inductor": 11e-4, "flaggems": 25e-4, "flambeau": 1.5e-4}},
            {"name": "max_pool3d", "group": "pooling", "mode": "gradient", "floor": 2e-4, "errors": {"inductor": "no"},
             "seconds": {"eager": 4e-4, "inductor": 1e-4, "flambeau": 6e-4}},
            {"name": "grid & sampler", "group": "sampling", "mode": "forward", "floor": 1e-4, "errors": {"eager": "no"},
             "seconds": {}}]
    summary = {"bandwidth": 4.3e12, "dtype": "float32", "sizes": "full"}
    return {"kind": "floors", **ORIGIN, "machine": MACHINE | GPU, "rows": rows, "summary": summary | changes}


def written(folder: Path, *reports: dict[str, Any]) -> tuple[str, Path]:
    results, docs = folder / "results", folder / "docs"
    results.mkdir(parents=True)
    docs.mkdir()
    for k, report in enumerate(reports):
        (results / f"{k}-cuda.json").write_text(json.dumps(report))
    performance.write(results, docs)
    return "".join((docs / page).read_text() for page in performance.PAGES), docs / "performance-cuda.svg"


def test_table_of_floors(tmp_path: Path) -> None:
    page, _ = written(tmp_path, floors())
    assert "## Operators beside the memory limit (CUDA)\n\na GPU, CUDA 13.0, Triton 3.6.0; a CPU" in page
    assert "device copy 4.30 TB/s" in page
    assert "| cumsum dim 0 | 0.100 | 24.00 | 11.00 | 25.00 | **1.50** |" in page
    assert "| max_pool3d, gradient | 0.200 | **2.00** | !0.50 |  | 3.00 |" in page
    assert "| grid & sampler | 0.100 | failed |" in page
    assert "| **geometric mean, without grid_sampler** |  | **6.93** | **11.00** | **25.00** | **2.12** |" in page


def test_chart_of_floors(tmp_path: Path) -> None:
    page, picture = written(tmp_path, floors())
    assert "](performance-cuda.svg)" in page
    svg = xml.parse(picture).getroot()
    words = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"cumsum dim 0", "max_pool3d, gradient", "1.50×", "Flambeau", "10×"} <= set(words)
    assert "grid & sampler" not in words, "a case without a time has no line"


@pytest.mark.parametrize("report", [floors(dtype="bfloat16"), floors(sizes="odd"), floors() | {"machine": MACHINE}])
def test_variants_have_a_table_and_no_chart(tmp_path: Path, report: dict[str, Any]) -> None:
    page, picture = written(tmp_path, report)
    assert "cumsum dim 0" in page and ".svg" not in page
    assert not picture.exists()


def test_files_say_where_they_come_from(tmp_path: Path) -> None:
    page, _ = written(tmp_path, floors())
    assert "`flambeau bench floors` at 0123456789." in page
    with pytest.raises(UnsupportedError, match="does not say its commit"):
        written(tmp_path / "without", {k: v for k, v in floors().items() if k != "commit"})


def test_chart_of_compile_times(tmp_path: Path) -> None:
    rows = [{"name": "gpt", "seconds": {"inductor": {"cold": 12.0, "warm": 1.0}, "flambeau": {"cold": 3.0}}}]
    written(tmp_path, {"kind": "compile", **ORIGIN, "machine": MACHINE | GPU, "rows": rows, "summary": {}})
    words = {node.text for node in xml.parse(tmp_path / "docs" / "compile-time.svg").getroot().iter()}
    assert {"gpt", "3.00 s", "Inductor", "10 s"} <= words


def test_without_results(tmp_path: Path) -> None:
    page, picture = written(tmp_path)
    assert page == "".join(performance.HEAD.format(title) for title, _ in performance.PAGES.values())
    assert not picture.exists()


def test_steps_on_a_gpu_name_it(tmp_path: Path) -> None:
    row = {"name": "gpt", "group": "train", "mode": "train", "seconds": {"eager": 2e-3, "flambeau": 1e-3}}
    page, _ = written(tmp_path, {"kind": "models", **ORIGIN, "machine": MACHINE | GPU, "rows": [row], "summary": {}},
                      {"kind": "models", **ORIGIN, "machine": MACHINE, "rows": [row], "summary": {}})
    assert "## Step times of the model suite (CUDA)\n\na GPU" in page
    assert "## Step times of the model suite\n\na CPU" in page


def test_the_operator_database(tmp_path: Path) -> None:
    counts = {"entries": 677, "passed": 676, "samples": 16821, "gradients": 13278}
    rows = [{"name": "pow", "dtype": "float32", "reason": "large terms cancel"}]
    compiled = {"kind": "opinfo", **ORIGIN, "machine": MACHINE | GPU, "rows": rows, "summary": {"float32": counts}}
    device = {"kind": "opinfo", **ORIGIN, "machine": MACHINE | {"device": "PoCL"}, "rows": [],
              "summary": {"float32": counts | {"native": 562}}}
    page, _ = written(tmp_path, compiled, device)
    first, second = page.split("## PyTorch's operator database")[1:]
    assert "can trace the sample, compared with eager: every" in first and "PoCL, through OpenCL" in second
    assert "| float32 | 677 | 676 | 16,821 | 13,278 |" in first and "- `pow`, float32: large terms cancel" in first
    assert "| float32 | 677 | 676 | 562 | 16,821 | 13,278 |" in second and "Not counted" not in second
