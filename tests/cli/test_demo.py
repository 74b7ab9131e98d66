"""`flambeau demo`: trains with each backend, shows them side by side, and reports a backend that fails."""

from __future__ import annotations

import os

import pytest

from flambeau.bench import harness
from flambeau.bench.models import SUITE
from flambeau.cli import demo, main
from flambeau.config import config


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SIZES", {"gpt": SUITE["gpt"].sizes["tiny"]})
    monkeypatch.setattr(demo, "SECONDS", 0.0)


def test_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    folder, environment = config.cache_dir, dict(os.environ)
    assert main(["demo", "--no-inductor", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "a transformer, loss" in printed and "What to try next" in printed
    assert "inductor" not in printed
    assert "forward: " in printed and "backward: " in printed and "kernel(s)" in printed
    assert config.cache_dir == folder and dict(os.environ) == environment


def test_a_failing_peer_is_shown_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = harness.compiled

    def without_peers(function, backend):  # type: ignore[no-untyped-def]
        if backend == "inductor":
            raise RuntimeError("no such compiler")
        return compiled(function, "eager")

    monkeypatch.setattr(harness, "compiled", without_peers)
    monkeypatch.setattr(demo, "get_ready", lambda backend: None)
    assert main(["demo", "--steps", "1"]) == 0
    assert "inductor failed: RuntimeError: no such compiler" in capsys.readouterr().out


def test_differences_are_the_largest() -> None:
    import torch

    eager = demo.Run(losses=[1.0, 0.5], parameters={"w": torch.tensor([1.0, 2.0])})
    other = demo.Run(losses=[1.0, 0.25], parameters={"w": torch.tensor([1.0, 2.5])})
    assert demo.differences(other, eager) == (0.25, 0.5)


def test_steps_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0"]) == 1
    assert "at least 1" in capsys.readouterr().err
