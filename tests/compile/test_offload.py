"""Saved tensors on the host, in a separate process, because a process can name PyTorch's open device type only once."""

from __future__ import annotations

from pathlib import Path

import pytest

from apart import run_apart

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")


def test_offload() -> None:
    run_apart(Path(__file__).parent / "offload_cases.py")
