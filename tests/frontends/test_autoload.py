"""`import torch` is enough for the device, and costs nobody anything: each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for the path in which a package is installed that has this project's entry point."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    info = tmp_path / "flambeau_device-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flambeau-device\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()))
    return tmp_path


def run(script: str, installed: Path | None = None, **environment: str) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(installed or ""), os.environ.get("PYTHONPATH", ""))))
    given = os.environ | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if installed else "0"} | environment
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], env=given, capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_use_starts_the_device(installed: Path) -> None:
    run("""
import sys, torch
assert not {"pyopencl", "flambeau.frontends.device", "flambeau.targets.base"} & set(sys.modules)
assert torch.device("flambeau", 1).type == "flambeau" and not torch.flambeau.is_initialized()
torch.manual_seed(11)
x = torch.ones(3, requires_grad=True)
torch.optim.SGD([x]).step()  # asks whether an accelerator is available
x.sum().backward()
assert torch.accelerator.is_available() and torch.accelerator.device_count() >= 1
assert not torch.flambeau.is_initialized()

loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
assert all(batch.is_pinned() for batch in loader)  # PyTorch pins without starting a device
assert torch.flambeau.is_initialized() and "pin_memory" not in torch.Tensor.__dict__
assert torch.flambeau.initial_seed() == 11  # the seed came before the device
assert torch.ones(2, device="flambeau").add(1).cpu().tolist() == [2, 2]
""", installed)


def test_what_starts_it(installed: Path) -> None:
    said = run("""
import os, torch
for use in (lambda: torch.zeros(2, device="flambeau"), lambda: torch.flambeau.Stream("flambeau"),
            lambda: torch.nn.Linear(2, 2).to("flambeau"), torch.flambeau.current_device):
    if not (child := os.fork()):
        use()
        assert torch.flambeau.is_initialized()
        assert torch.randn(2, device="flambeau", generator=torch.Generator(device="flambeau")).shape == (2,)
        print("started", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
""", installed)
    assert said.split() == ["started"] * 4


def test_a_fork_after_a_look_at_the_devices(installed: Path) -> None:
    said = run("""
import os, torch
assert torch.accelerator.is_available()
if not (child := os.fork()):
    try:
        torch.ones(2, device="flambeau")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
""", installed)
    assert "forked after OpenCL was used" in said and "spawn" in said


def test_without_pyopencl(installed: Path) -> None:
    run("""
import sys
sys.modules["pyopencl"] = None
import torch, warnings
assert not torch.accelerator.is_available() and torch.flambeau.device_count() == 0
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    list(torch.utils.data.DataLoader(torch.arange(4.0), pin_memory=True))
assert any("no accelerator is found" in str(w.message) for w in said)
import flambeau
for use in (lambda: torch.ones(2).to("flambeau"), lambda: torch.flambeau.Stream("flambeau")):
    try:
        use()
    except flambeau.UnsupportedError as error:
        assert "PyOpenCL cannot be imported" in str(error) and "pip install 'flambeau[opencl]'" in str(error)
    else:
        raise AssertionError("no error")
""", installed)


def test_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    run("""
import torch, flambeau
assert not torch.flambeau.is_available()
try:
    torch.ones(2).to("flambeau")
except flambeau.CompileError as error:
    assert "no-such-compiler" in str(error)
else:
    raise AssertionError("no error")
assert torch.ones(2).sum().item() == 2
""", installed, FLAMBEAU_CXX="no-such-compiler", FLAMBEAU_CACHE_DIR=str(tmp_path / "cache"))


def test_it_keeps_out_of_the_way() -> None:
    run("""
import torch
from types import SimpleNamespace
from flambeau.frontends import autoload

def name():
    autoload.autoload()
    return torch._C._get_privateuse1_backend_name()

plain = autoload.entry_points
autoload.entry_points = lambda group: [SimpleNamespace(name="flambeau"), SimpleNamespace(name="other")]
assert name() == "privateuseone"  # another package's device
autoload.entry_points = plain
counted, torch._C._accelerator_getAccelerator = torch._C._accelerator_getAccelerator, lambda: torch.device("cuda")
torch.cuda.device_count = lambda: 1
assert name() == "privateuseone"  # PyTorch's own
torch.cuda.device_count = lambda: 0
torch.utils.rename_privateuse1_backend("other")
assert name() == "other" and not hasattr(torch, "flambeau")
""")
