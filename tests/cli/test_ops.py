"""`flambeau ops`: every registered operator has a row, and a cell says what is true of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flambeau.cli import main
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import SUPPORTED
from flambeau.ops import LOWERINGS
from flambeau.ops.facts import facts, overloads_with
from flambeau.report import coverage


@pytest.fixture(scope="module")
def rows() -> dict[str, coverage.Operator]:
    return {row.name: row for row in coverage.coverage()}


def test_every_lowering_and_contraction_has_a_row(rows: dict[str, coverage.Operator]) -> None:
    assert {coverage.name_of(op) for op in (*LOWERINGS, *overloads_with("library"))} <= rows.keys()
    assert all(facts(op).family for op in LOWERINGS)
    assert {cell for row in rows.values() for cell in row.cells.values()} == set(coverage.CELLS)


@pytest.mark.parametrize(("name", "family", "dtype", "cell"), [
    ("aten.hardswish", "activation", "float32", "native"),
    ("aten.hardswish", "activation", "complex64", "none"),  # PyTorch does not have it either
    ("aten.exp", "transcendental", "complex64", "extern"),  # PyTorch has it, the loop language has no complex
    ("aten.bitwise_and", "bitwise", "float32", "none"),
    ("aten.mm", "contraction", "float32", "library"),
    ("aten.view", "view", "float32", "partly"),
    ("aten.sort", "sorting", "float32", "extern"),
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


# ---- other machines, and the device ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def single() -> dict[str, coverage.Operator]:
    """A device without float64."""
    machine = Capabilities("single", dtypes=SUPPORTED - {torch.float64})
    return {row.name: row for row in coverage.coverage(machine=machine, device=True)}


@pytest.mark.parametrize(("name", "dtype", "cell"), [
    ("aten.hardswish", "float32", "native"),
    ("aten.hardswish", "float64", "fallback"),  # the device does not have it
    ("aten.hardswish", "complex64", "unsupported"),  # nor does PyTorch
    ("aten.mm", "float32", "fallback"),
    ("aten.sort", "float32", "fallback"),
    ("aten.view", "complex64", "native"),  # nothing moves
])
def test_cells_of_a_device(single: dict[str, coverage.Operator], name: str, dtype: str, cell: str) -> None:
    assert single[name].cells[dtype] == cell
    assert {cell for row in single.values() for cell in row.cells.values()} == set(coverage.CELLS_OF_A_DEVICE)


def test_contractions_of_a_machine_that_has_kernels_for_them() -> None:
    machine = Capabilities("contracts", contracts=True)
    cells = {row.name: row.cells for row in coverage.coverage([torch.float32], machine, device=True)}
    assert cells["aten.mm"]["float32"] == cells["aten.convolution"]["float32"] == "partly"
    assert cells["aten.mkldnn_rnn_layer"]["float32"] == "fallback"


def test_sorts_of_a_machine_that_has_kernels_for_them() -> None:
    machine = Capabilities("sorts", sorts=True)
    cells = {row.name: row.cells for row in coverage.coverage([torch.float32], machine, device=True)}
    assert cells["aten.sort"]["float32"] == "native" and cells["aten.kthvalue"]["float32"] == "partly"


def test_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
    file = tmp_path / "ops.json"
    arguments = ["--family", "activation", "--dtype", "float32", "--dtype", "complex64", "--json", str(file)]
    assert main(["ops", "--target", "opencl", *arguments]) == 0
    rows = {row["name"]: row["cells"] for row in json.loads(file.read_text())["operators"]}
    assert rows["aten.hardswish"] == {"float32": "native", "complex64": "unsupported"}
    assert "native" in capsys.readouterr().out
    assert main(["ops", "--target", "no-such-target"]) == 1
    assert "there is no target" in capsys.readouterr().err


# ---- the page --------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# As a user would: this types into the search box and chooses from the lists.
USER = """<script>
for (const [id, value] of [["text", "SOFTMAX data"], ["dtype", "float64"], ["cell", "fallback"]]) {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input", {bubbles: true}));
}
</script>"""


@pytest.fixture(scope="module")
def written(single: dict[str, coverage.Operator], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "ops.html"
    cells = dict.fromkeys(single["aten.mm"].cells, "native")
    hostile = coverage.Operator("aten.</script><b>softmax", "softmax", 1, cells)
    file.write_text(coverage.page([*single.values(), hostile], "single", coverage.CELLS_OF_A_DEVICE))
    return file


def test_the_page_needs_nothing_from_elsewhere(written: Path, single: dict[str, coverage.Operator]) -> None:
    text = written.read_text()
    assert not re.search(r"https?:|src=|@import|url\(", text) and text.count("</script>") == 2
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert len(json.loads(data)["operators"]) == len(single) + 1


def shown(address: str, folder: Path) -> list[str]:
    """The operators that a browser shows."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, address], capture_output=True, text=True, timeout=120, check=True)
    (count,) = re.findall(r">(\d+) of \d+ operators<", done.stdout)
    rows = [html.unescape(name) for hidden, name in re.findall(
        r"<tr[^>]*?( hidden=\"\")?><td[^>]*>(.*?)</td>", done.stdout) if not hidden]
    assert len(rows) == int(count)
    return rows


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")
def test_the_page_in_a_browser(written: Path, single: dict[str, coverage.Operator], tmp_path: Path) -> None:
    def wanted(text: str, dtype: str | None = None, cell: str | None = None) -> list[str]:
        names = (row.name.removeprefix("aten.") for row in single.values()
                 if cell is None or (row.cells[dtype] if dtype else cell) == cell)
        return [name for name in names if all(word in name for word in text.lower().split())]

    page = written.as_uri()
    assert len(shown(page, tmp_path)) == len(single) + 1
    assert shown(f"{page}#text=softmax", tmp_path) == [*wanted("softmax"), "</script><b>softmax"]
    assert shown(f"{page}#text=pool&family=no-such-family", tmp_path) == wanted("pool")  # not in the list: any
    used = tmp_path / "used.html"
    used.write_text(written.read_text().replace("</body>", USER + "</body>"))
    found = shown(used.as_uri(), tmp_path)
    assert found == wanted("softmax data", "float64", "fallback") and found
