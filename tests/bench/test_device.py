"""The cost of the device's operators, in a process of its own: once, to see that it is measured at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")


@pytest.mark.slow
def test_calls_are_measured() -> None:
    script = """
from flambeau.bench.device import LIMITS, measure
rows = measure(count=5, rounds=2)
assert {kind for kind, *_ in rows} == set(LIMITS)
assert all(value > 0 for _, _, *values in rows for value in values)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
