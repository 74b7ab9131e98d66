"""The bar on the terminal: after two seconds, with counts, gone at the end; and nothing anywhere else."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
import torch

from flambeau.config import config
from flambeau.runtime import progress as module
from flambeau.runtime.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(module, "SECONDS", 0.1)
    return made


def wait_for(terminal: Terminal, text: str) -> None:
    end = time.monotonic() + 10
    while text not in terminal.getvalue():
        assert time.monotonic() < end, terminal.getvalue()
        time.sleep(0.02)


def test_what_takes_long_is_shown_and_goes_away(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress("compiling parts", 3) as step:
        step()
        wait_for(terminal, "flambeau: compiling parts")
        wait_for(terminal, "1/3")
        with progress("building kernels", count=lambda: (5, 7)):
            wait_for(terminal, "flambeau: building kernels")
            wait_for(terminal, "5/7")
        step()
        wait_for(terminal, "2/3")
    assert "flambeau" not in terminal.getvalue().rpartition("\x1b[2K")[2]  # the line is empty again
    assert module._TERMINAL.bar is None


def test_what_is_quick_is_not_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 60)
    with redirect_stderr(terminal), progress("compiling parts", 3) as step:
        step()
    assert "flambeau" not in terminal.getvalue()


def test_errors_take_the_bar_away(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="no"), redirect_stderr(terminal), progress("compiling parts"):
        raise ValueError("no")
    assert module._TERMINAL.bar is None


def test_nothing_without_a_terminal_or_against_the_setting(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def used(refresh: Callable[..., None]) -> None:
        raise AssertionError("a bar")

    monkeypatch.setattr(module, "new_bar", used)
    with redirect_stderr(terminal), config.override(progress=False), progress("compiling parts"):
        pass
    terminal.isatty = lambda: False  # type: ignore[method-assign]
    with redirect_stderr(terminal), progress("compiling parts"):
        pass


def test_compiles_are_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    torch._dynamo.reset()
    f = torch.compile(lambda x: (x * 3.25).cos() + 7, backend="flambeau")
    with redirect_stderr(terminal):
        f(torch.randn(3, 5))
    assert "flambeau: compiling a graph" in terminal.getvalue()
    assert module._TERMINAL.bar is None
