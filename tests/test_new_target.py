"""The example of docs/guides/new-target.md: installed as a package of its own, it compiles graphs and is a device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "new_target"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
                    "--no-deps", "--no-build-isolation", "--target", str(folder / "site"), str(folder / "source")],
                   check=True, timeout=120)
    return folder / "site"


def run(script: str, installed: Path, **environment: str) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(installed), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path} | environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


def test_it_compiles_graphs(installed: Path) -> None:
    run("""
import torch
from flambeau.targets.base import get_target, target_names

assert "echo" in target_names() and get_target("echo").name == "echo"

def f(x, y, i):
    return torch.softmax(x @ y, 1).cumsum(0), (x - x.mean(0)).sin().amax(1), x[i]

x, y = torch.randn(30, 20, dtype=torch.float64, requires_grad=True), torch.randn(20, 10, dtype=torch.float64)
i = torch.tensor([3, 29])
ours = torch.compile(f, backend="flambeau", options={"target": "echo"})(x, y, i)
eager = f(x, y, i)
for a, b in zip(ours, eager, strict=True):
    torch.testing.assert_close(a, b)
torch.testing.assert_close(*(torch.autograd.grad([t.square().sum() for t in out], x)[0] for out in (ours, eager)))
try:
    torch.compile(f, backend="flambeau", options={"target": "echo"})(x, y, torch.tensor([3, 30]))
except IndexError as error:
    assert "out of" in str(error)
else:
    raise AssertionError("no error")
""", installed)


def test_it_is_a_device(installed: Path) -> None:
    run("""
import copy, logging, torch, flambeau

logging.getLogger("flambeau").setLevel(logging.ERROR)
flambeau.enable_device()
assert torch.flambeau.get_device_name() == "an accelerator that does not exist"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
x, y = torch.randn(32, 4), torch.randint(2, (32,))
losses = []
ours = copy.deepcopy(model).to("flambeau")
for device, m in (("flambeau", ours), ("cpu", model)):
    optimiser = torch.optim.SGD(m.parameters(), lr=0.5)
    for _ in range(5):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(m(x.to(device)), y.to(device))
        loss.backward()
        optimiser.step()
    losses.append(loss.item())
assert abs(losses[0] - losses[1]) < 1e-4
on_the_cpu = {row.operator for row in flambeau.fallbacks()}
assert on_the_cpu and all("mm" in name for name in on_the_cpu), on_the_cpu  # products are a library's; the rest is ours
ours.load_state_dict(model.state_dict())
compiled = torch.compile(ours, backend="flambeau")  # what lies between its kernels lies on the device too
torch.testing.assert_close(compiled(x.to("flambeau")).cpu(), model(x))
ours.zero_grad()
compiled(x.to("flambeau")).square().sum().backward()
model.zero_grad()
model(x).square().sum().backward()
torch.testing.assert_close(ours[0].weight.grad.cpu(), model[0].weight.grad)
host = torch.compile(model, backend="flambeau", options={"target": "echo"})  # and for the CPU on the CPU
torch.testing.assert_close(host(x), model(x))
view = torch.arange(12.0, device="flambeau").reshape(3, 4).t()[1:]
assert view.cpu().tolist() == torch.arange(12.0).reshape(3, 4).t()[1:].tolist()
try:
    torch.empty(1 << 40, device="flambeau")
except torch.OutOfMemoryError as error:
    assert "The device has" in str(error)
else:
    raise AssertionError("no error")
""", installed, FLAMBEAU_DEVICE="echo")


def test_the_figure_that_is_published() -> None:
    (published,) = re.findall(r"\*\*(\d+) lines\*\*", (ROOT / "docs" / "guides" / "new-target.md").read_text())
    assert int(published) == len((EXAMPLE / "flambeau_echo.py").read_text().splitlines())


def test_a_device_that_no_target_has() -> None:
    from flambeau.config import config
    from flambeau.errors import OptionError, UnsupportedError
    from flambeau.targets.base import device_target

    with config.override(device="no-such-target"), pytest.raises(OptionError, match="there is no target"):
        device_target()
    with config.override(device="cpu"), pytest.raises(UnsupportedError, match="the target cpu has no driver"):
        device_target().driver()
