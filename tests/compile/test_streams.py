"""Streams in compiled functions, in a separate process, because a process can name PyTorch's open device type once."""

from __future__ import annotations

from pathlib import Path

import pytest

from apart import run_apart

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")


def test_streams() -> None:
    run_apart(Path(__file__).parent / "stream_cases.py")
