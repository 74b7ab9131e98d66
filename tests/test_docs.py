"""The code blocks of the README and of all pages run; links, tables and generated pages are up to date."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import warm
from flambeau import cli
from flambeau.cli import doctor, reference
from flambeau.compile import backend
from flambeau.config import SETTINGS
from flambeau.report import numerics, performance
from torch_suite import report

README = Path(__file__).parent.parent / "README.md"
CONSTRAINTS = (README.parent / "constraints.txt").read_text()


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


PAGES = [page for page in (README, *sorted((README.parent / "docs").rglob("*.md"))) if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page: Path, tmp_path: Path) -> None:
    """All examples of a page, one after the other, as a program of their own: one of them may start the device."""
    (tmp_path / "examples.py").write_text("\n".join(blocks(page)))
    status, printed = warm.run(["python", "examples.py"], tmp_path)
    assert status == 0, printed


def commands(page: Path) -> list[list[str]]:
    """The lines that begin with `flambeau` or `make` in blocks that are not Python, without variables and comments."""
    found = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.splitlines() if kind in ("", "console") else ():
            words = shlex.split(re.split(r"\s{3,}|\s+# ", line.removeprefix("$ "))[0].replace("'", ""))
            words = words[next((k for k, w in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", w)), 0):]
            if len(words) > 1 and words[0] in ("flambeau", "make") and re.match(r"[a-z]", words[1]):
                found.append(words)
    return found


TEXTS = [*sorted(README.parent.glob("*.md")), *sorted((README.parent / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)], ids=lambda page: page.name)
def test_commands(page: Path) -> None:
    """Commands on a page have the options that it names, and make has the targets."""
    targets = set(re.findall(r"^([\w-]+):", (README.parent / "Makefile").read_text(), re.MULTILINE))
    for program, name, *rest in commands(page):
        if program == "make":
            assert name in targets, name
            continue
        parser = argparse.ArgumentParser(prog=f"flambeau {name}", exit_on_error=False)
        module = importlib.import_module(f"flambeau.cli.{name}")
        module.add_arguments(parser)
        for action in parser._actions:
            action.type = None  # the files need not exist
        parser.parse_args(module.split(rest)[0] if hasattr(module, "split") else rest)


def test_settings_on_pages_exist() -> None:
    known = {s.env for s in SETTINGS} | doctor.ASIDE
    for page in TEXTS:
        assert set(re.findall(r"\bFLAMBEAU_[A-Z]+(?:_[A-Z]+)*\b", page.read_text())) <= known, page


def test_the_tables_of_the_readme_name_what_there_is() -> None:
    named = re.findall(r"^\| (`.*?) \|", README.read_text().split("## Options")[1], re.MULTILINE)
    words = {word for cell in named for word in re.findall(r"`(?:flambeau )?(\w+)`", cell)}
    assert words <= backend.OPTIONS.keys() | cli.COMMANDS.keys() and len(words & cli.COMMANDS.keys()) > 10


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs name them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """What a page links to is there, headings included."""
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_the_page_of_the_architecture_has_the_tree() -> None:
    """It names all folders, the files that it names exist, and no folder has too many files."""
    source = README.parent / "src" / "flambeau"
    page = (README.parent / "docs" / "concepts" / "architecture.md").read_text()
    rooms = {path.parent.relative_to(source) for path in source.rglob("*.py")} - {Path()}
    tops = {str(room) for room in rooms if len(room.parts) == 1}
    table, beside = re.split(r"\nOther folders", page, maxsplit=1)
    assert set(re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)) | set(
        re.findall(r"`(\w+)/`", beside.partition("\n\n")[0])) == tops
    for name in set(re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|h))`", page)):
        assert any((base / name).exists() for base in (source, source.parent, README.parent)), name
    crowded = {str(room): n for room in rooms if (n := len(list((source / room).glob("*.py")))) > 16}
    assert set(crowded) <= {"bench", "ops", "torch_compat"}, crowded  # one file per family, benchmark or part of torch


def test_tests_that_the_page_of_the_device_names() -> None:
    page = (README.parent / "docs" / "guides" / "device.md").read_text()
    files = {path.name: path.read_text() for path in (README.parent / "tests" / "device").glob("*_cases.py")}
    files |= {name: (README.parent / "tests" / "device" / name).read_text()
              for name in ("device_areas.py", "device_streams.py")}
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    named = [(test, where) for tests, where in rows for test in re.findall(r"`(\w+)\*?`", tests)]
    assert len(named) > 25
    for test, where in named:
        assert any(f"def {test}" in files[file] for file in re.findall(r"`(\w+\.py)`", where)), test


def test_the_table_of_torchs_tests_is_as_it_is_written() -> None:
    page = (README.parent / "docs" / "guides" / "device.md").read_text()
    assert page == report.page(page, json.loads((README.parent / "results" / "torch-tests.json").read_text()))


@pytest.mark.parametrize("file", reference.PAGES)
def test_pages_of_the_reference_are_as_they_are_written(file: str) -> None:
    if file == "commands.md" and sys.version_info >= (3, 13):
        pytest.skip("argparse of Python 3.13 writes its help in another way")
    assert (README.parent / "docs" / "reference" / file).read_text() == reference.PAGES[file]()  # else: make docs


def test_pages_of_results_are_as_they_are_written(tmp_path: Path) -> None:
    performance.write(README.parent / "results", tmp_path)
    for page in tmp_path.iterdir():
        assert (README.parent / "docs" / "results" / page.name).read_text() == page.read_text(), "make docs"


@pytest.mark.skipif(f"torch=={torch.__version__.split('+')[0]}" not in CONSTRAINTS,
                    reason="the page lists the operators of the torch in constraints.txt")
def test_the_page_of_operators_is_as_it_is_written() -> None:
    written = README.parent / "docs" / "reference" / "exact-operators.md"
    assert written.read_text() == numerics.page()  # else: make docs


def test_the_page_of_metal_names_what_needs_double() -> None:
    """All entries that OpenCL runs without ATen and Metal does not."""
    rows = json.loads((README.parent / "results" / "metal-operators.json").read_text())["rows"]
    page = (README.parent / "docs" / "metal.md").read_text()
    table = page.partition("## What needs double")[2].partition("\n## ")[0]
    names = {*re.findall(r"`(?:\w+\.)*(\w+)`", table), "modified_bessel", *(
        f"{kind}_polynomial" for kind in re.findall(r"[a-z]+", table[table.index("Chebyshev"):].lower()))}
    behind = {r["op"] for r in rows if "op" in r and r["samples"] and r["externs"] and not r["opencl_externs"]}
    named = f"(?:special_|nn_functional_|scaled_|shifted_)*(?:{'|'.join(sorted(names))})(?:_.*)?"
    assert behind and not {op for op in behind if not re.fullmatch(named, op)}
