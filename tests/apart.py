"""Runs test files in separate processes, because a process can name PyTorch's open device type only once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_apart(cases: Path, *options: str, **environment: str) -> None:
    # The new process must not be a worker of pytest-xdist, even if this one is.
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist",
               f"--rootdir={ROOT}", *options, str(cases)]
    done = subprocess.run(command, env=plain | environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    summary = done.stdout.strip().splitlines()[-1]
    assert " passed" in summary and " failed" not in summary, done.stdout
