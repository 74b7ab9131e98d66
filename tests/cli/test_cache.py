"""`flambeau cache`: says where and how much, and clears."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from flambeau.cli import main
from flambeau.config import config
from flambeau.targets.cache import DiskCache


def test_empty_cache_then_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(cache_dir=tmp_path):
        assert main(["cache"]) == 0
        assert capsys.readouterr().out.split() == (
            f"location {tmp_path} entries 0 size 0.0 MiB of {config.cache_limit_mb} MiB".split()
        )
        assert main(["cache", "--clear"]) == 0
        assert capsys.readouterr().out == f"deleted 0 entries from {tmp_path}\n"


KEY = "ab" * 32


def exported(tmp_path: Path) -> Path:
    with config.override(cache_dir=tmp_path / "one"):
        cache = DiskCache()
        cache.put(KEY, b"some code", ".so")
        cache.put(KEY, b"1", ".chosen")
        assert main(["cache", "--export", str(tmp_path / "kernels")]) == 0
    return tmp_path / "kernels"


def test_another_machine_takes_over_what_was_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = exported(tmp_path)
    assert capsys.readouterr().out == f"wrote 2 entries to {file}\n"
    with config.override(cache_dir=tmp_path / "other"):
        there = DiskCache()
        there.put(KEY, b"2", ".chosen")  # stays
        assert main(["cache", "--import", str(file)]) == 0
        assert "added 1 new entries" in capsys.readouterr().out
        assert (there.read(KEY, ".so"), there.read(KEY, ".chosen")) == (b"some code", b"2")


def no_zip(file: Path) -> str:
    file.write_bytes(b"no zip")
    return "not an exported cache"


def cut_short(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:-30])
    return "not an exported cache"


def another_name(file: Path) -> str:
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("../../evil.so", b"code")
    return "evil"


def another_content(file: Path) -> str:
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("cd" * 32 + ".so", b"code" * 40)
    return "cd" * 32


def of_others(file: Path) -> str:
    file.chmod(0o666)
    return "alone can write"


@pytest.mark.parametrize("change", [no_zip, cut_short, another_name, another_content, of_others])
def test_a_file_that_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any) -> None:
    file = exported(tmp_path)
    wrong = change(file)
    with config.override(cache_dir=tmp_path / "other"):
        DiskCache().put(KEY, b"2", ".chosen")
        assert main(["cache", "--import", str(file)]) == 1
        said = capsys.readouterr().err
        assert str(file) in said and wrong in said
        assert DiskCache().names() == [KEY + ".chosen"] and DiskCache().read(KEY, ".chosen") == b"2"
