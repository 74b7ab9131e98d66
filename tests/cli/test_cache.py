"""`flambeau cache`: says where and how much, and clears."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.cli import main
from flambeau.config import config


def test_empty_cache_then_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(cache_dir=tmp_path):
        assert main(["cache"]) == 0
        assert capsys.readouterr().out.split() == (
            f"location {tmp_path} entries 0 size 0.0 MiB of {config.cache_limit_mb} MiB".split()
        )
        assert main(["cache", "--clear"]) == 0
        assert capsys.readouterr().out == f"deleted 0 entries from {tmp_path}\n"
