"""Models on several processes train the same when they are compiled, on the CPU and on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("parallel_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(("device", "name"), [
    *(("cpu", name) for name in ("ddp", "fsdp", "tensor_parallel", "communication")),
    *(("flambeau", name) for name in ("loader", "ddp", "fsdp", "tensor_parallel", "automatic", "offloaded",
                                      "communication")),
])
def test_processes(processes: int, device: str, name: str) -> None:
    if device == "flambeau":
        pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*command, str(CASES), device, name], env=os.environ | {"OMP_NUM_THREADS": "1"},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False)
    assert done.returncode == 0 and f"{name} done" in done.stdout, done.stdout
