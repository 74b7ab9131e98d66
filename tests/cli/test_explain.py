"""`flambeau explain`: what is compiled is found, and the page says what was fused."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flambeau import debug, pipeline
from flambeau.cli import main
from flambeau.report.program import Summary, summarise
from flambeau.targets.cpu.target import CpuTarget

from ..runtime.replays import Replays

FILE = """
import torch

def act(x):
    return torch.relu(x * 2 + 1).sum(-1)

def act_inputs():
    return torch.randn(8, 32, requires_grad=True)

def lonely(x):
    return x

inputs = 3
"""


def summaries(function, *inputs: torch.Tensor) -> list[Summary]:  # type: ignore[no-untyped-def]
    return [summarise(graph) for graph in debug.compile_once(function, inputs)]


def test_recordings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(CpuTarget, "recorder", lambda self: Replays())
    assert main(["explain", "--demo", "--graphs"]) == 0
    page = capsys.readouterr().out
    rows = [line.split() for line in page.splitlines() if "1 x warm-up" in line]
    assert [row[row.index("steps)") + 1 :][:5] for row in rows] == [["5", "3", "1", "x", "first"]] * 2  # and backward
    monkeypatch.undo()
    assert main(["explain", "--demo", "--graphs"]) == 0
    assert "5 x nothing is recorded on cpu" in capsys.readouterr().out


def test_operators_inside_their_consumer_are_named() -> None:
    forward, = summaries(lambda x: torch.relu(x * 2 + 1).sum(-1), torch.randn(8, 32))
    step, = forward.steps
    assert step.kind == "kernel" and {"mul", "add", "relu"} < set(step.operators)
    assert (step.reads, forward.arena_bytes) == (["in0"], 0)
    assert "32" in step.inner
    assert step.title in forward.texts[step.name]
    assert forward.headline() == "forward: 4 operators became 1 kernel(s)"
    assert {"lower", "schedule", "codegen", "wait for compiler"} <= forward.seconds.keys()


def test_library_calls_and_what_is_memory_for_them() -> None:
    forward, backward = summaries(lambda x: torch.tanh(x * 3) @ x, torch.randn(16, 16, requires_grad=True))
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert [s.kind for s in forward.steps] == ["kernel", "library"]
    assert any(m.operator == "tanh" for m in forward.memory)
    assert any(m.why == "result of aten.mm.default" for m in backward.memory)


def test_equal_layers_share_a_kernel() -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.softmax(x @ w, -1)
        return x

    forward, = summaries(layers, torch.randn(16, 16), torch.randn(16, 16))
    kernels = [s for s in forward.steps if s.kind == "kernel"]
    assert [s.same_as for s in kernels] == ["", "k0", "k0"]


def test_collect_ends_with_its_block() -> None:
    with debug.collect() as graphs:
        assert len(pipeline.OBSERVERS) == 1
    assert not pipeline.OBSERVERS and not graphs


def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "example.py", tmp_path / "out.json"
    file.write_text(FILE)
    assert main(["explain", f"{file}:act", "--text", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "graph 1, forward" in printed and "graph 2, backward" in printed and "flambeau_" in printed
    assert len(json.loads(out.read_text())) == 2


@pytest.mark.parametrize(("name", "text"), [
    ("example", "not FILE:FUNC"), ("nothing.py:act", "no file"), ("example.py:absent", "no function"),
    ("example.py:lonely", "lonely_inputs()")])
def test_what_is_not_there(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                           capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "example.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", name]) == 1
    assert text in capsys.readouterr().err


def test_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "nothing"]) == 1
    assert "gpt" in capsys.readouterr().err


# ---- repeated regions --------------------------------------------------------------------------------------

DEEP = """
import torch
import torch.nn.functional as F

weights = [torch.eye(8, requires_grad=True) for _ in range(13)]

def deep(x, shift=1):
    for k, w in enumerate(weights):
        y = F.layer_norm(x, (8,)) @ w
        y = y.roll(2 if k == 6 else 1, 0).sin() * 0.5 + y.tanh().square() - x.cos()
        x = x + F.gelu(y) @ w
    return x

def deep_inputs():
    return torch.linspace(-1, 1, 32).view(4, 8)
"""


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("regions")
    (folder / "model.py").write_text(DEEP)
    page, text = folder / "page.html", io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["explain", f"{folder}/model.py:deep", "--regions", "--html", str(page)]) == 0
    return text.getvalue(), page


def test_regions_are_explained(explained: tuple[str, Path]) -> None:
    text, _ = explained
    assert "pieces, of which" in text
    assert "has other arguments than roll" in text  # why the layer in the middle is not one of them
    assert all(phase in text for phase in ("Dynamo", "search for regions", "AOTAutograd", "codegen"))


def test_the_page_of_regions_is_complete(explained: tuple[str, Path]) -> None:
    _, page = explained
    html = page.read_text()
    assert "http" not in html.replace("</html>", "") and "<script" not in html
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no browser on this machine")
    shown = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
                           capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and shown.stdout.count("<tr>") == html.count("<tr>")
    assert 'class="strip"' in shown.stdout and "Dynamo" in shown.stdout


def test_a_page_needs_regions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--demo", "--html", "page.html"]) != 0
    assert "--regions" in capsys.readouterr().err


SCRIPT = """
import sys
import torch

step = torch.compile(lambda x: torch.softmax(x * float(sys.argv[2]), -1), backend="flambeau")
for _ in range(8):
    step(torch.randn(4, 8))
print(sys.argv[1:], __name__)
"""


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, written = tmp_path / "script.py", tmp_path / "all.json"
    script.write_text(SCRIPT + "sys.exit(4)\n")
    assert main(["explain", "--text", "--json", str(written), "--trace", str(tmp_path / "out"), str(script),
                 "--rate", "2"]) == 4
    page = capsys.readouterr().out
    assert "['--rate', '2'] __main__" in page and "1 compiled" in page and "int64_t bad" in page
    graph, = json.loads(written.read_text())["graphs"]
    assert graph["calls"] == 8 and graph["rows"][0]["kind"] == "kernel"
    report = (tmp_path / "out" / "report.html").read_text()
    assert '"steps":3,' in report and (tmp_path / "out" / "trace.json.gz").exists()


def test_a_script_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main(["explain", str(script)]) == 1
    assert "Nothing was compiled" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "none.py")]) == 1
    assert "there is no file" in capsys.readouterr().err


def test_options_that_a_script_cannot_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--numerics", "eager", "--graphs", str(tmp_path / "script.py")]) == 1
    assert "--numerics, --graphs: for a function, not for a script" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["", "none/file.json"])
def test_a_place_that_cannot_be_written(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--demo", "--json", str(tmp_path / bad)])
    assert "is a folder" in (said := capsys.readouterr().err) or "there is no folder" in said
