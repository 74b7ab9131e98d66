"""Two processes with the device: collectives, and training that ends where one process with the whole batch does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

CASES = Path(__file__).with_name("distributed_cases.py")


@pytest.mark.parametrize(("backend", "names"), [
    ("flambeau", ("ddp", "fsdp")),
    ("cpu:gloo,flambeau:flambeau", ("reductions", "moves", "messages", "groups")),
])
def test_two_processes(backend: str, names: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(CASES), backend]
    done = subprocess.run([*command, *names], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert [line for line in done.stdout.splitlines() if line.endswith(" done")] == [f"{name} done" for name in names]
