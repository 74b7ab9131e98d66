"""`import torch` is enough for the device, and is no slower for programs that do not use it."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest

from patience import output_of

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("autoload_cases.py")
NAMES = ("the_first_use_starts_the_device", "an_accelerator_is_recommended", "programs_do_not_mean_it",
         "a_fork_after_a_look_at_the_devices", "there_is_no_pyopencl", "there_is_no_compiler", "a_stream_starts_it",
         "loading_starts_it", "a_compiled_step_asks_for_it", "hugging_face_takes_what_is_in_use",
         "hugging_face_takes_what_is_asked_for")


def run(*command: str, path: Path | None = None) -> str:
    """With the entry point that is on the path, or without any."""
    given = os.environ | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if path else "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", path or "", os.environ.get("PYTHONPATH", "")))),
    }
    return output_of([sys.executable, "-W", "error::UserWarning", *command], given, 300)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By each case. A package with this project's entry point is installed in a folder on the path."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    installed = tmp_path_factory.mktemp("installed")
    info = installed / "flambeau_device-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flambeau-device\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()))
    parts = (part.partition("\n") for part in run(str(CASES), path=installed).split("case ")[1:])
    return {name: text for name, _, text in parts}


@pytest.mark.parametrize("name", NAMES)
def test_autoload(said: dict[str, str], name: str) -> None:
    assert set(said) == set(NAMES)
    assert said[name].split()[-1] == "passed", said[name]


def test_it_keeps_out_of_the_way() -> None:
    run("-c", """
import torch
from types import SimpleNamespace
from flambeau.device import autoload

def name():
    autoload.autoload()
    return torch._C._get_privateuse1_backend_name()

plain = autoload.entry_points
autoload.entry_points = lambda group: [SimpleNamespace(name="flambeau"), SimpleNamespace(name="other")]
assert name() == "privateuseone"  # another package's device
autoload.entry_points = plain
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
torch.cuda.device_count = lambda: 1
assert name() == "privateuseone"  # PyTorch's own
torch.cuda.device_count = lambda: 0
torch.utils.rename_privateuse1_backend("other")
assert name() == "other" and not hasattr(torch, "flambeau")
""")
