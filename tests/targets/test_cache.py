"""The cache on disk: what it returns is what was put in, or nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from flambeau.errors import CacheError
from flambeau.targets import cache as cache_module
from flambeau.targets.cache import DiskCache


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name.startswith("tmp-")]


def test_an_entry_comes_back(root: Path) -> None:
    cache = DiskCache(root)
    assert cache.get(key(1), ".so") is None and cache.read(key(1), ".so") is None
    path = cache.put(key(1), b"data", ".so")
    assert path is not None and path.parent == root
    assert cache.get(key(1), ".so") == path
    assert cache.read(key(1), ".so") == b"data"
    assert cache.get(key(1), ".ref") is None
    assert path.read_bytes().startswith(b"data")
    assert temporaries(root) == []


def test_another_object_and_the_last_writer(root: Path) -> None:
    DiskCache(root).put(key(1), b"first", ".so")
    DiskCache(root).put(key(1), b"second", ".so")
    assert DiskCache(root).read(key(1), ".so") == b"second"
    assert DiskCache(root).stats().entries == 1


def test_the_directory_is_for_its_owner_alone(root: Path) -> None:
    path = DiskCache(root / "below").put(key(1), b"data", ".so")
    assert path is not None
    assert stat.S_IMODE((root / "below").stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


DAMAGE = {
    "a flipped bit": flip,
    "cut off in the data": lambda data: data[:500],
    "cut off in the seal": lambda data: data[:-10],
    "something appended": lambda data: data + b"x",
    "empty": lambda data: b"",
    "a wrong checksum": lambda data: data[:-65] + b"0" * 64 + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_deleted(root: Path, damage) -> None:
    path = DiskCache(root).put(key(1), os.urandom(1000), ".so")
    path.write_bytes(damage(path.read_bytes()))
    cache = DiskCache(root)
    assert cache.get(key(1), ".so") is None
    assert not path.exists()
    cache.put(key(1), b"again", ".so")
    assert cache.read(key(1), ".so") == b"again"


def test_an_entry_deleted_by_another_process_is_a_miss(root: Path) -> None:
    cache = DiskCache(root)
    cache.put(key(1), b"data", ".so").unlink()
    assert cache.get(key(1), ".so") is None


@pytest.mark.parametrize("name", ["../" + "0" * 61 + ".so", "0" * 63 + ".so", "tmp-" + "0" * 60 + ".so"])
def test_a_key_is_a_hash(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        DiskCache(root).put(name.removesuffix(".so"), b"", ".so")


def symlink(root: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    root.symlink_to(elsewhere)


REFUSED = {
    "symbolic link": symlink,
    "a dangling symbolic link": lambda root, elsewhere: root.symlink_to(elsewhere),
    "not a directory": lambda root, elsewhere: root.write_text(""),
    "written by other users": lambda root, elsewhere: (root.mkdir(), root.chmod(0o777)),
    "written by the group": lambda root, elsewhere: (root.mkdir(), root.chmod(0o770)),
}


@pytest.mark.parametrize("prepare", REFUSED.values(), ids=REFUSED.keys())
def test_an_unsafe_directory_is_refused(root: Path, tmp_path: Path, prepare) -> None:
    prepare(root, tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="not safe") as caught:
        DiskCache(root)
    assert "FLAMBEAU_CACHE_DIR" in str(caught.value)


def test_a_foreign_directory_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskCache(root)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        DiskCache(root)


def assert_private(cache: DiskCache, caught: list[warnings.WarningMessage]) -> None:
    """The cache works, outside its root, and said so once."""
    path = cache.put(key(2), b"two", ".so")
    assert path is not None and cache.root not in path.parents
    assert cache.get(key(2), ".so") == path and cache.read(key(2), ".so") == b"two"
    with cache.workspace() as folder:
        assert cache.root not in folder.parents
        (folder / "file").write_text("")
    assert cache.stats().entries >= 1
    assert len(caught) == 1 and "cannot be used" in str(caught[0].message)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_private(DiskCache(tmp_path / "file" / "cache"), caught)


def refuse(root: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make new files under root fail, as on a full or read-only disk (where permissions do not stop root)."""

    def failing(function):
        def called(*args, dir=None, **kwargs):
            if dir == root:
                raise OSError(code, os.strerror(code))
            return function(*args, dir=dir, **kwargs)

        return called

    for name in ("mkstemp", "mkdtemp"):
        monkeypatch.setattr(cache_module.tempfile, name, failing(getattr(cache_module.tempfile, name)))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_directory_that_cannot_be_written(root: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(root)
    cache.put(key(1), b"one", ".so")
    refuse(root, code, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_private(cache, caught)
        assert cache.read(key(1), ".so") == b"one"  # still there, and still good


def test_a_disk_that_fills_up_in_the_middle_of_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(root)
    fdopen = os.fdopen

    class Full:
        def __init__(self, file) -> None:
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *exception) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[:10])
            if Path(os.readlink(f"/proc/self/fd/{self.file.fileno()}")).parent == root:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.write(data[10:])

    monkeypatch.setattr(os, "fdopen", lambda *args: Full(fdopen(*args)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_private(cache, caught)
    assert list(root.iterdir()) == []


def test_without_any_space_nothing_is_stored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(root)

    def full(*args: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module, "_write", full)
    with pytest.warns(UserWarning, match="cannot be used"):
        assert cache.put(key(1), b"data", ".so") is None
    assert cache.get(key(1), ".so") is None


def test_the_private_directory_ends_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    program = (
        "import sys; from pathlib import Path; from flambeau.targets.cache import DiskCache\n"
        "print(DiskCache(Path(sys.argv[1])).put('0' * 64, b'data', '.so'))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "file" / "cache")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    path = Path(output.strip())
    assert path.name == "0" * 64 + ".so" and not path.parent.exists()


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_the_least_recently_used_go_first(root: Path) -> None:
    cache = DiskCache(root, limit=10_000)
    for number in range(8):
        age(cache.put(key(number), bytes(1000), ".so"), 1000 - number)
    cache.get(key(0), ".so")  # counts as use
    cache.read(key(1), ".so")
    assert cache.stats().entries == 8
    for number in range(8, 11):
        cache.put(key(number), bytes(1000), ".so")
    left = [number for number in range(11) if (root / f"{key(number)}.so").exists()]
    assert cache.stats().size <= 10_000
    assert {0, 1, 10} <= set(left) and 2 not in left and 3 not in left


def test_an_entry_above_the_limit_lives_until_the_next(root: Path) -> None:
    cache = DiskCache(root, limit=1000)
    cache.put(key(1), bytes(5000), ".so")
    assert cache.get(key(1), ".so") is not None
    cache.put(key(2), bytes(10), ".so")
    cache.put(key(3), bytes(10), ".so")
    assert cache.get(key(1), ".so") is None and cache.get(key(3), ".so") is not None


def test_only_entries_are_ever_deleted(root: Path) -> None:
    cache = DiskCache(root, limit=100)
    mine = [root / "letter.txt", root / "notes"]
    for path in mine:
        path.write_bytes(bytes(1000))
    cache.put(key(1), bytes(1000), ".so")
    cache.put(key(2), bytes(1000), ".so")
    assert cache.clear() == 1
    assert all(path.exists() for path in mine)


def test_what_a_killed_process_left_goes_after_an_hour(root: Path) -> None:
    DiskCache(root)
    for name, seconds in {"tmp-old": 4000, "tmp-new": 1000}.items():
        (root / name).mkdir()
        (root / name / "unit.cpp").write_text("int")
        age(root / name, seconds)
    (root / "tmp-file").write_text("half")
    age(root / "tmp-file", 4000)
    DiskCache(root).put(key(1), b"data", ".so")
    assert temporaries(root) == [root / "tmp-new"]


def test_clear(root: Path) -> None:
    cache = DiskCache(root)
    for number in range(3):
        cache.put(key(number), b"data", ".so")
    entries, size = cache.stats()
    assert entries == 3 and size > 12
    assert cache.clear() == 3
    assert cache.stats() == (0, 0)
    assert cache.get(key(0), ".so") is None


WRITER = """
import sys
from pathlib import Path
from flambeau.targets.cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), limit=20_000)
for turn in range(150):
    number = turn * 7 % 40
    expected = bytes([number]) * 2000
    found = cache.read(f"{number:064x}", ".so")
    assert found in (None, expected), number
    cache.put(f"{number:064x}", expected, ".so")
"""


def test_processes_that_write_read_and_evict_at_once(root: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", WRITER, str(root)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.wait(timeout=60) == 0, process.stderr.read()
    cache = DiskCache(root, limit=20_000)
    assert temporaries(root) == []
    assert cache.stats().size <= 20_000 + 3 * 2100
    for path in root.iterdir():
        assert cache.get(path.stem, path.suffix) == path
