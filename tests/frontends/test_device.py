"""The device "flambeau", in a process of its own: a process can give PyTorch's open device type a name once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

CASES = Path(__file__).with_name("device_cases.py")


def test_device() -> None:
    # Not a worker of pytest-xdist, even if this process is one.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist",
               f"--rootdir={CASES.parents[2]}", str(CASES)]
    done = subprocess.run(command, env=environment, cwd=CASES.parents[2], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and " failed" not in done.stdout


def test_nothing_happens_unasked() -> None:
    script = """
import torch, flambeau
import flambeau.frontends.dynamo
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
assert not hasattr(torch, "flambeau")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_tensors_may_outlive_the_interpreter() -> None:
    script = """
import atexit, torch, flambeau
flambeau.enable_device()
x = torch.zeros(8, device="flambeau")
stream = torch.Stream(device="flambeau")
x.record_stream(stream)
event = stream.record_event()
atexit._keep = [x, event]
x.cycle = [x]
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_another_device_is_there_already() -> None:
    script = """
import torch, flambeau
torch.utils.rename_privateuse1_backend("other")
try:
    flambeau.enable_device()
except flambeau.Error as error:
    assert "'other' is there already" in str(error)
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
