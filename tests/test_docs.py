"""The Python examples of the README and of pages run as they stand, and tests that a page names are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from flambeau.report import numerics
from torch_suite import report

README = Path(__file__).parent.parent / "README.md"
CONSTRAINTS = (README.parent / "constraints.txt").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/numerics.md", "docs/cuda-graphs.md"])
def test_examples(page: str) -> None:
    file = README.parent / page
    blocks = re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(file), "exec"), scope)
    assert blocks


def test_tests_that_the_page_of_the_device_names() -> None:
    page = (README.parent / "docs" / "device.md").read_text()
    files = {path.name: path.read_text() for path in (README.parent / "tests" / "frontends").glob("*_cases.py")}
    files |= {name: (README.parent / "tests" / "frontends" / name).read_text()
              for name in ("device_areas.py", "device_streams.py")}
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    named = [(test, where) for tests, where in rows for test in re.findall(r"`(\w+)\*?`", tests)]
    assert len(named) > 25
    for test, where in named:
        assert any(f"def {test}" in files[file] for file in re.findall(r"`(\w+\.py)`", where)), test


def test_the_table_of_torchs_tests_is_as_it_is_written() -> None:
    page = (README.parent / "docs" / "device.md").read_text()
    assert page == report.page(page, json.loads((README.parent / "results" / "torch-tests.json").read_text()))


@pytest.mark.skipif(f"torch=={torch.__version__.split('+')[0]}" not in CONSTRAINTS,
                    reason="the page lists the operators of the torch in constraints.txt")
def test_the_page_of_operators_is_as_it_is_written() -> None:
    assert (README.parent / "docs" / "exact-operators.md").read_text() == numerics.page()  # else: make docs
