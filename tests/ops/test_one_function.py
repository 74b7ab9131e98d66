"""An operator of another library is one function with its facts: every door takes it from there."""

from __future__ import annotations

from pathlib import Path

from apart import run_apart


def test_one_function_is_all() -> None:
    """Runs in a separate process, because operators cannot be unregistered."""
    run_apart(Path(__file__).with_name("one_function.py"))
