"""The `flambeau` command itself: help without torch, usage errors, errors without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

import flambeau
from flambeau import cli
from flambeau.cli import cache


def test_help_names_every_command_and_does_not_import_torch() -> None:
    program = """if True:
        import sys
        from flambeau.cli import main
        try:
            main(["--help"])
        finally:
            assert "torch" not in sys.modules
    """
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert all(name in answer.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"flambeau {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"flambeau {flambeau.__version__}\n"


def test_flambeau_errors_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise flambeau.CacheError("cannot be read", hint="delete it")

    monkeypatch.setattr(cache, "run", run)
    assert cli.main(["cache"]) == 1
    assert capsys.readouterr().err == "flambeau cache: cannot be read\n  hint: delete it\n"
