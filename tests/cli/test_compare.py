"""`flambeau compare`: equal or not by its exit status, the operator and the line, and a page that stands alone."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flambeau.cli import main
from flambeau.cli.compare import DIFFERENT, histogram
from flambeau.compare.comparison import Comparison
from flambeau.compare.differences import Difference
from flambeau.compare.first_difference import First
from flambeau.report.comparison import page

FILE = """
import torch
from torch import nn

def same(x):
    return x.relu() * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        y = self.up(x)
        return (y * 1.25 + x).abs()

torch.manual_seed(0)
net = Net().bfloat16()

def net_inputs():
    return torch.randn(16, 32).bfloat16()

def inputs():
    return (torch.randn(4, 5, requires_grad=True),)

def broken(x):
    raise KeyError("here")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("compare") / "model.py"
    file.write_text(FILE)
    return file


def test_equal(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{model}:same", "--numerics", "eager"]) == 0
    printed = capsys.readouterr().out
    assert "bit for bit" in printed and "gradient of input 0" in printed and "First" not in printed


@pytest.fixture(scope="module")
def different(model: Path) -> tuple[str, Path, Path]:
    html, data, text = model.with_suffix(".html"), model.with_suffix(".json"), io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["compare", f"{model}:net", "--html", str(html), "--json", str(data)]) == DIFFERENT
    return text.getvalue(), html, data


def test_different(model: Path, different: tuple[str, Path, Path]) -> None:
    text, _, data = different
    assert "values differ" in text and "█" in text and "gradient of up.weight" in text and "Layers" in text
    assert "aten.add.Tensor (graph 1, forward): it differs only inside a fused kernel, and not if aten.mul" in text
    assert f"{model}:15  return (y * 1.25 + x).abs()" in text
    report = json.loads(data.read_text())
    assert report["equal"] is False and report["first"]["line"] == 15 and report["results"][0]["differ"] > 0


def test_the_page(different: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, file, _ = different
    html = file.read_text()
    assert not re.search(r"https?:|src=|@import|url\(|<script", html)
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"]
    shown = subprocess.run([browser, *flags, f"--user-data-dir={tmp_path}", file.as_uri()], capture_output=True,
                           text=True, timeout=120, check=True)
    assert shown.stdout.count("<tr") == html.count("<tr") and shown.stdout.count("<rect") == html.count("<rect ") > 0
    assert 'id="histogram"' in shown.stdout and "return (y * 1.25 + x).abs()" in shown.stdout
    assert shown.stdout.count('class="differs"') == html.count("class=differs") > 0


def test_names_on_the_page_are_text() -> None:
    hostile = "<b>x</b>"
    row = Difference(hostile, "float32", (2,), 2, 1, 1, {"1": 1}, 1.0, 2.0, hostile)
    report = Comparison("fast", "cpu", 1, [row], first=First(hostile, "operator", "forward", code=hostile, file="f"),
                        notes=[hostile])
    text = page(report, hostile)
    assert hostile not in text and text.count("&lt;b&gt;x") >= 6 and '<td class="n worse">2.00</td>' in text


def test_a_model_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "dlrm", "--infer", "--numerics", "eager", "--no-layers", "--no-locate", "--full"]) == 0
    printed = capsys.readouterr().out
    assert "result" in printed and "gradient of" not in printed and "Layers" not in printed


def test_bars_are_as_long_as_their_numbers() -> None:
    heading, first, second, third = histogram({"1": 100, "2-3": 50, "NaN": 1})
    assert (first.count("█"), second.count("█"), third.count("█")) == (50, 25, 1)


@pytest.mark.parametrize(("arguments", "text"), [
    (["nothing"], "no model 'nothing'"), (["model.py"], "model.py:forward"), (["absent.py:net"], "no file"),
    (["model.py:absent"], "no function"), (["model.py:broken"], "model.py:broken does not run: KeyError: 'here'"),
    (["gpt", "--device", "nowhere"], "no device 'nowhere'"), (["model.py:same", "--target", "nowhere"], "no target")])
def test_what_is_not_there(arguments: list[str], text: str, model: Path, monkeypatch: pytest.MonkeyPatch,
                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["compare", *arguments]) == 1
    assert text in capsys.readouterr().err
