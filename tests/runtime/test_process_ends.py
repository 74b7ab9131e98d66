"""Processes that end, are killed or fork while kernels are compiled, and many that start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flambeau.config import config
from flambeau.targets.cache import DiskCache
from runtime.process_ends import left_over, main, problems, start

# Seconds after the imports; the first compile takes one or two.
ENDS = [("compile", "return", 1.0), ("compile", "fork", 0.8), ("accelerate", "return", 0.3)]
MORE = [("compile", "exception", 1.5), ("compile", "SIGTERM", 1.2), ("compile", "os._exit", 1.4),
        ("compile", "late", 1.2), ("compile", "exit in a thread", 1.0), ("compile", "SIGKILL", 2.0),
        ("accelerate", "fork", 0.5), ("accelerate", "return", 0.8), ("accelerate", "exception", 1.0),
        ("device", "return", 0.5), ("device", "SIGTERM", 0.7), ("device", "os._exit", 0.6)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that no other process uses, with the kernels that were already compiled."""
    folder = tmp_path_factory.mktemp("ends") / "cache"
    folder.mkdir(mode=0o700)
    if config.cache_dir.exists():
        for path in config.cache_dir.glob("*.*"):
            if path.suffix in (".so", ".probe", ".ref"):
                os.link(path, folder / path.name)
    return folder


@pytest.mark.parametrize("what, how, seconds", [*ENDS, *(pytest.param(*e, marks=pytest.mark.slow) for e in MORE)])
def test_nothing_is_left(what: str, how: str, seconds: float, cache: Path) -> None:
    assert problems(what, how, seconds, cache) == []


@pytest.mark.sweep
def test_a_hundred_starts_and_ends(cache: Path) -> None:
    assert main(100, cache) == 0


def test_a_killed_process_leaves_nothing_to_the_next(cache: Path) -> None:
    """Its compilers end with it, and the next start deletes its folder."""
    process, mark = start("compile", "return", 60, cache)
    until = time.monotonic() + 60
    while not list(cache.glob("tmp/*/*/*.cpp")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and left_over(mark) == []
    assert list(cache.glob("tmp/*"))
    DiskCache(cache)
    assert not list(cache.glob("tmp/*"))


MANY = """
import sys
import torch
torch.set_num_threads(1)
def f(x):
    return (x.sin() * x).softmax(-1).cumsum(0) + x.exp().sum()
x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
y = torch.compile(f, backend="flambeau")(x)
y.sum().backward()
z = x.detach().clone().requires_grad_()
f(z).sum().backward()
torch.testing.assert_close(y, f(z))
torch.testing.assert_close(x.grad, z.grad)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 4])
def test_twelve_processes_on_an_empty_cache(killed: int, tmp_path: Path) -> None:
    """All finish, with the right results, also while some of them are killed; nothing is left that is not sealed."""
    root = tmp_path / "cache"
    env = {**os.environ, "FLAMBEAU_CACHE_DIR": str(root), "FLAMBEAU_VERIFY": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", MANY]
    all_ = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for _ in range(12)]
    try:
        for process in all_[:killed]:
            until = time.monotonic() + 60
            while not list(root.glob("tmp/*/*")) and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.5)
            process.kill()
        for process in all_[killed:]:
            _, said = process.communicate(timeout=400)
            assert process.returncode == 0, said
    finally:
        for process in all_:
            process.kill()
            process.communicate()
    again = subprocess.run(command, env={**env, "FLAMBEAU_LOG": "info"}, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "damaged" not in again.stderr and "does not load" not in again.stderr, again.stderr
    assert not (root / "tmp").exists()
