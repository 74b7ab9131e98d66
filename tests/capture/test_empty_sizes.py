"""Sizes that only the run knows, down to 0 and 1, in every family of operators: as in eager, and never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("empty_sizes.py")


def run(*arguments: str) -> None:
    """In a process of its own, so that a crash has a name: the last line says what was under way."""
    done = subprocess.run([sys.executable, str(CASES), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "TRITON_INTERPRET": "1"}, text=True, timeout=900, check=False)
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-30:])


def test_few_families_on_every_target() -> None:
    run("quick", "cpu", "opencl", "interpreter")


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["cpu", "opencl", "interpreter"])
def test_every_family(target: str) -> None:
    run("all", target)
