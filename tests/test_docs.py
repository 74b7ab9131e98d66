"""The Python examples of pages run as they stand, and tests that a page names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flambeau.report.numerics import page

README = Path(__file__).parent.parent / "README.md"
PAGES = (README, README.parent / "docs" / "cuda-graphs.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples(page: Path) -> None:
    scope: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)


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


def test_the_page_of_numerics_is_as_it_is_written() -> None:
    assert (README.parent / "docs" / "numerics.md").read_text() == page()  # else: make docs
