"""The Python examples of the README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_examples_of_the_readme() -> None:
    scope: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), scope)
