"""The device "flambeau", in a process of its own: a process can give PyTorch's open device type a name once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apart import run_apart

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

HERE = Path(__file__).parent
TWO = "pthread pthread"  # devices of PoCL's, each with a context of its own


def test_device() -> None:
    run_apart(HERE / "device_cases.py")


def test_identity() -> None:
    run_apart(HERE / "device_identity.py")


def test_operators() -> None:
    run_apart(HERE / "device_op_cases.py")


def test_detection() -> None:
    run_apart(HERE / "device_detection.py")


def test_any_shape() -> None:
    run_apart(HERE / "any_shape_cases.py")


@pytest.mark.sweep
def test_any_shape_many_times() -> None:
    run_apart(HERE / "any_shape_cases.py", FLAMBEAU_TEST_ROUNDS="10")


@pytest.mark.sweep
def test_models() -> None:
    run_apart(HERE / "device_models.py")


def test_areas_of_the_checklist() -> None:
    run_apart(HERE / "device_areas.py", POCL_DEVICES=TWO)


def test_errors() -> None:
    run_apart(HERE / "device_errors.py")


# Gradients of some samples amplify any rounding, the CPU's own as well.
ILL_CONDITIONED = {"linalg_householder_product"}


def test_streams() -> None:
    run_apart(HERE / "device_streams.py", POCL_DEVICES=TWO, FLAMBEAU_TEST_ROUNDS="10")


@pytest.mark.sweep
def test_streams_many_times() -> None:
    run_apart(HERE / "device_streams.py", POCL_DEVICES=TWO, FLAMBEAU_TEST_ROUNDS="200")


@pytest.mark.sweep
def test_the_operator_database_on_the_device(tmp_path: Path) -> None:
    found = tmp_path / "entries.json"
    command = [sys.executable, "-m", "flambeau.testing.device_opinfo", "--limit", "3", "--json", str(found)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    report = json.loads(found.read_text())
    assert {row["name"] for row in report["rows"]} <= ILL_CONDITIONED, done.stdout
    assert report["summary"]["float32"]["native"] >= 320, done.stdout


def test_nothing_happens_unasked() -> None:
    script = """
import torch, flambeau
import flambeau.compile.backend
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
assert not hasattr(torch, "flambeau")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_backward_on_the_cpu_came_first() -> None:
    """It starts the engine's threads, one for each device that there is by then."""
    script = """
import torch, flambeau
torch.ones(3, requires_grad=True).square().sum().backward()
flambeau.enable_device()
for k in range(torch.flambeau.device_count()):
    x = torch.ones(3, device=f"flambeau:{k}", requires_grad=True)
    x.square().sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
"""
    environment = {**os.environ, "POCL_DEVICES": TWO}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, env=environment)


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
