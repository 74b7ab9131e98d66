"""What a session sees: graphs, breaks, recompilations, times and bytes of steps; FLAMBEAU_DEBUG prints it at exit."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flambeau.config import config
from flambeau.debug.clocks import TIMED
from flambeau.debug.session import Session
from flambeau.report.session import Overview, overview_of, show

SCRIPT = """
import torch

@torch.compile(backend="flambeau")
def f(x, k):
    y = torch.softmax(x + k, -1)
    print("broken here")
    return torch.cumsum(y, 0)

for k in (1, 2):
    f(torch.randn(6, 8), k)
"""


@pytest.fixture
def seen() -> Overview:
    @torch.compile(backend="flambeau")
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x @ w, -1)
        torch._dynamo.graph_break()
        return torch.frac(y) * 2

    torch.compiler.reset()
    with config.override(graph_cache=False), Session() as session:
        for _ in range(TIMED + 3):
            f(torch.randn(16, 32), torch.randn(32, 8))
        f(torch.randn(17, 32), torch.randn(32, 8))
    return overview_of(session)


def test_overview(seen: Overview) -> None:
    assert seen.compiled == 4 and len(seen.graphs) == 4 and seen.found == 0
    assert [g.calls for g in seen.graphs] == [TIMED + 3, TIMED + 3, 1, 1]
    first = seen.graphs[0]
    assert first.what.startswith("forward of f, test_session.py:")
    kernel, product = sorted(first.rows, key=lambda r: r.kind)
    assert kernel.kind == "kernel" and product.name == "aten.mm" and product.kind == "library"
    # A row of 16 floats of the product is read, and one of the softmax written.
    assert kernel.bytes == first.calls * 2 * 16 * 8 * 4
    assert product.bytes == first.calls * (16 * 32 + 32 * 8 + 16 * 8) * 4
    assert kernel.seconds > 0 and kernel.limit > 0 and "softmax" in kernel.title and kernel.title in kernel.text
    assert seen.breaks.total() == 2 and "test_session.py" in next(iter(seen.breaks))
    assert any("size mismatch" in why for why in seen.recompiled)
    assert seen.phases["Dynamo"] > 0


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_is_shown(seen: Overview, level: int) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    show(console, seen, level)
    text = console.export_text()
    assert "4 compiled, 0 found on disk" in text and "of the limit" in text
    assert ("loops outer" in text) is (level >= 2)
    assert ("int64_t bad" in text) is (level >= 3)


def test_nothing_is_left_after_a_session() -> None:
    f = torch.compile(torch.sin, backend="flambeau")
    x = torch.randn(10)
    f(x)
    with Session() as session:  # of a graph that was there before
        torch.testing.assert_close(f(x), x.sin())
    f(x)
    program, = session.clocks.read()
    assert program.calls == 1 and program.parts


def test_the_environment_variable(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = os.environ | {"FLAMBEAU_DEBUG": "3", "FLAMBEAU_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "broken here\nbroken here\n"
    for words in ("FLAMBEAU_DEBUG=3", "script.py:7", "recompiled", "cumsum", 'extern "C"'):
        assert words in done.stderr, done.stderr


def test_torchs_logs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = os.environ | {"TORCH_LOGS": "+flambeau,kernel_code", "FLAMBEAU_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "[__kernel_code] extern" in done.stderr and "operators became 1 kernel(s)" in done.stderr
    assert "[__output_code]" not in done.stderr
