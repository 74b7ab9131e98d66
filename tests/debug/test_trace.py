"""A traced block: the page, the trace for Perfetto, and how a GPU's kernels are found in one."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flambeau
from flambeau.config import config
from flambeau.debug.clocks import PartTime
from flambeau.debug.profile import Ranges, covered, read
from flambeau.debug.script import run_script
from flambeau.errors import OptionError
from flambeau.runtime.launch_plan import LaunchPlan, Step
from flambeau.runtime.watchers import Part


def data_of(page: str) -> dict[str, Any]:
    return json.loads(re.search(r"const D = (.*)\n", page)[1])  # type: ignore[index]


def test_a_block(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="flambeau", dynamic=False)

    def step() -> None:
        compiled(torch.randn(4, 8)).sum().backward()

    step()
    with flambeau.debug.trace(tmp_path / "new" / "out"):
        for _ in range(2):
            step()
    data = data_of((tmp_path / "new" / "out" / "report.html").read_text())
    assert data["steps"] == 2 and [c[0] for c in data["calls"]] == [1, 2]
    forward, backward = data["graphs"]
    assert forward["calls"] == 1 and {n["kind"] for n in forward["nodes"]} == {"kernel", "library"}
    kernel = next(n for n in forward["nodes"] if n["kind"] == "kernel")
    assert kernel["ms"] > 0 and kernel["bytes"] == (4 * 16 * 2 + 2 * 16 + 2 * 4) * 4
    assert "gelu" in data["texts"][kernel["title"]] and forward["lines"]["gelu"][0].startswith("gelu: f32[4, 16]")
    assert {"ms", "lost", "limit"} <= data["rows"][0].keys() and data["memory"]["CPU"]
    with gzip.open(tmp_path / "new" / "out" / "trace.json.gz") as file:
        assert any(e.get("name", "").startswith("flambeau_") for e in json.load(file)["traceEvents"])


def test_the_table_adds_up_to_the_step(tmp_path: Path) -> None:
    """Kernels, calls, what a program does between them, and steps of optimizers that were bound before the trace."""
    weight = torch.nn.Parameter(torch.randn(300, 300))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    torch.compiler.reset()
    forward = torch.compile(lambda x: torch.nn.functional.gelu(x @ weight).sum(), backend="flambeau")
    update = torch.compile(lambda: optimizer.step(), backend="flambeau")

    def step() -> None:
        forward(torch.randn(300, 300)).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        update()
        optimizer.zero_grad()

    step()
    with flambeau.debug.trace(tmp_path):
        for _ in range(3):
            step()
    data = data_of((tmp_path / "report.html").read_text())
    assert data["steps"] == 3 and len(data["graphs"]) == 3  # forward, backward, optimizer
    inside, outside = sum(r["ms"] for r in data["rows"]), sum(seconds * 1e3 for *_, seconds in data["others"])
    assert inside == pytest.approx(sum(g["ms"] for g in data["graphs"]), rel=1e-3)
    assert {r["kind"] for r in data["rows"]} >= {"kernel", "rest"}
    assert 0.5 * data["wall"] * 1e3 < inside + outside < 1.05 * data["wall"] * 1e3


def test_what_is_found_on_disk_has_kernels_and_no_operators(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cos().cumsum(0)

    with config.override(cache_dir=tmp_path / "cache", verify=False):
        from flambeau.compile.disk_cache import keepers

        for _ in range(2):
            torch.compiler.reset()
            compiled = torch.compile(f, backend="flambeau")
            compiled(torch.ones(9))
            for keeper in list(keepers):
                keeper.join()
        with flambeau.debug.trace(tmp_path):
            compiled(torch.ones(9))
    graph, = data_of((tmp_path / "report.html").read_text())["graphs"]
    assert "cumsum" in graph["what"] and [n["kind"] for n in graph["nodes"]] == ["kernel"] and not graph["lines"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="file"), flambeau.debug.trace(tmp_path / "file"):
        pass


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="Permission denied"), flambeau.debug.trace(tmp_path):
        pass


def test_a_script_without_steps_that_are_alike(tmp_path: Path) -> None:
    """No trace is written, that of an earlier run is not used, and the page shows the times of the whole run."""
    (tmp_path / "script.py").write_text("import torch\nf = torch.compile(torch.sin, backend='flambeau')\n"
                                        "for _ in range(2): f(torch.ones(9))\n")
    (tmp_path / "trace.json.gz").write_text("old")
    torch.compiler.reset()
    _, status = run_script(tmp_path / "script.py", (), tmp_path)
    data = data_of((tmp_path / "report.html").read_text())
    assert status == 0 and not (tmp_path / "trace.json.gz").exists()
    graph, = data["graphs"]
    assert not data["traced"] and graph["calls"] == 2
    assert graph["ms"] > 0 and data["wall"] * 1e3 == pytest.approx(graph["ms"])
    assert data["rows"][0]["bytes"] == 2 * 2 * 9 * 4


def test_a_script_whose_first_graph_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\nf = torch.compile(lambda x: x.sin().sum(), backend='flambeau')\n"
                                        "for n in range(4, 12): f(torch.ones(n, requires_grad=True)).backward()\n")
    torch.compiler.reset()
    run_script(tmp_path / "script.py", (), tmp_path)
    data = data_of((tmp_path / "report.html").read_text())
    assert data["traced"] and data["steps"] == 3
    assert [g["what"].split()[0] for g in data["graphs"]] == ["forward", "backward"]


def test_kernels_of_a_gpu(tmp_path: Path) -> None:
    """They belong to the range in which they were launched, whenever and by whichever thread they ran."""
    plan = LaunchPlan("cuda", "", device=torch.device("cuda"))
    ranges = Ranges()
    ranges.plans.append(plan)
    launch = Part(plan, "flambeau_gelu", "plan0 0", Step(0, (), ()))
    for part in (Part(plan, "flambeau_gelu and 1 more"), launch, Part(plan, "aten.mm", "call0")):
        ranges.parts[1, part.where] = PartTime(part, 1, 0.0, 100.0 if part.where else 0.0)
    host = {"pid": 7, "tid": 8, "ph": "X"}

    def ranged(name: str, start: float, length: float) -> dict[str, Any]:
        return host | {"cat": "cpu_op", "name": name, "ts": start, "dur": length, "args": {}}

    def launched(start: float, number: int, cat: str = "cuda_driver") -> dict[str, Any]:
        return host | {"cat": cat, "name": "cuLaunchKernel", "ts": start, "dur": 1.0, "args": {"correlation": number}}

    def kernel(name: str, start: float, length: float, number: int, stream: int = 7) -> dict[str, Any]:
        return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length,
                "args": {"correlation": number}}

    events = [
        ranged("flambeau_gelu and 1 more [1]", 0, 100), ranged("flambeau_gelu [1 plan0 0]", 10, 20), launched(12, 1),
        ranged("aten.mm [1 call0]", 40, 30), launched(45, 2, "cuda_runtime"), launched(50, 3, "cuda_runtime"),
        launched(80, 4), launched(150, 5), ranged("aten::add_", 140, 30),
        kernel("flambeau_gelu", 200, 5, 1), kernel("gemm", 205, 40, 2), kernel("reduce", 245, 10, 3, stream=9),
        kernel("copy", 250, 3, 4), kernel("add", 300, 2, 5),
        {"ph": "i", "name": "[memory]", "ts": 5.0, "args": {"Total Allocated": 64, "Device Type": 1, "Device Id": 0}}]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = read(path, ranges, 0.001)
    time, = found.times
    assert {where: round(p.seconds * 1e6) for where, p in time.parts.items()} == {"plan0 0": 5, "call0": 50, "rest": 3}
    assert round(time.seconds * 1e6) == 58 and time.calls == 1
    assert {name: n for name, (n, _) in found.others.items()} == {"add": 1}
    assert round(found.busy * 1e6) == 5 + 40 + 10 + 2  # one of them ran beside another
    assert found.memory == {"GPU 0": [(0.0, 64)]}


def test_covered() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == 4
