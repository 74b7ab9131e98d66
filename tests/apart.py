"""Runs test files in separate processes, because a process can name PyTorch's open device type only once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from patience import output_of

ROOT = Path(__file__).parents[1]


def run_apart(cases: Path, *options: str, **environment: str) -> None:
    # The new process must not be a worker of pytest-xdist, even if this one is.
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist",
               f"--rootdir={ROOT}", *options, str(cases)]
    said = output_of(command, plain | environment, 600, ROOT)
    summary = said.strip().splitlines()[-1]
    assert " passed" in summary and " failed" not in summary, said
