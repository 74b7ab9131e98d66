"""Saved tensors on the host, in a process of its own: a process can give PyTorch's open device type a name once."""

from __future__ import annotations

from pathlib import Path

import pytest

from apart import run_apart

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")


def test_offload() -> None:
    run_apart(Path(__file__).parent / "offload_cases.py")
