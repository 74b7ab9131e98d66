"""The cache on disk: it returns exactly what was put in, or nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from flambeau.targets import cache as cache_module
from flambeau.targets import scratch
from flambeau.targets.cache import DiskCache


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def temporaries(root: Path) -> list[Path]:
    """The files left in the temporary folders of processes."""
    return [path for folder in (root / "tmp").glob("*") for path in folder.iterdir()]


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


def sealed(name: str, data: bytes) -> bytes:
    return data + cache_module._seal(name, data)


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


def above(root: Path, mode: int) -> Path:
    """A cache inside a folder with this mode."""
    root.mkdir()
    root.chmod(mode)
    return root / "cache"


def link_to_open_folder(root: Path) -> Path:
    elsewhere = root.with_name("elsewhere")
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    root.symlink_to(elsewhere)
    return root


UNSAFE: dict[str, Callable[[Path], Path]] = {
    "a symbolic link to what others can write": link_to_open_folder,
    "written by other users": lambda root: (root.mkdir(), root.chmod(0o777), root)[-1],
    "written by other users, and sticky": lambda root: (root.mkdir(), root.chmod(0o1777), root)[-1],
    "written by the group": lambda root: (root.mkdir(), root.chmod(0o770), root)[-1],
    "below what other users can write": lambda root: above(root, 0o777),
    "below what the group can write": lambda root: above(root, 0o775),
}


@pytest.mark.parametrize("prepare", UNSAFE.values(), ids=UNSAFE.keys())
def test_what_others_can_write_is_not_used(root: Path, prepare: Callable[[Path], Path]) -> None:
    """One warning that says what to do, and a private folder; nothing is read from there or written there."""
    place = prepare(root)
    place.mkdir(exist_ok=True)
    (place / f"{key(1)}.so").write_bytes(sealed(f"{key(1)}.so", b"theirs"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = DiskCache(place)
        assert cache.get(key(1), ".so") is None and cache.read(key(1), ".so") is None
        assert_private(cache, caught)
    assert "can be written by other users" in str(caught[0].message)
    assert "chmod go-w" in str(caught[0].message) and "FLAMBEAU_CACHE_DIR" in str(caught[0].message)
    assert [path.name for path in place.iterdir()] == [f"{key(1)}.so"]


def test_safe_places(root: Path) -> None:
    """Below a sticky folder, as /tmp is; through a symbolic link to a folder that is this user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = DiskCache(above(root, 0o1777)).put(key(1), b"data", ".so")
        link = root.with_name("link")
        link.symlink_to(root / "cache")
        assert DiskCache(link).get(key(1), ".so") == path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("given", ["cache", "above", "entry"])
def test_what_belongs_to_somebody_else(root: Path, given: str) -> None:
    path = DiskCache(root / "cache").put(key(1), b"data", ".so")
    assert path is not None
    os.chown({"cache": path.parent, "above": root, "entry": path}[given], 1234, -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert DiskCache(root / "cache").get(key(1), ".so") is None
    assert given == "entry" or "belongs to user 1234" in str(caught[0].message)


def test_a_folder_that_is_opened_to_others_later(root: Path) -> None:
    """It is looked at each time that something is read."""
    cache = DiskCache(root)
    cache.put(key(1), b"data", ".so")
    assert cache.get(key(1), ".so") is not None
    root.chmod(0o775)
    with pytest.warns(UserWarning, match="can be written by other users"):
        assert cache.get(key(1), ".so") is None
    path = cache.put(key(1), b"data", ".so")
    assert path is not None and root not in path.parents
    root.chmod(0o700)
    cache = DiskCache(root)
    root.rename(root.with_name("moved"))
    root.mkdir(mode=0o700)
    with pytest.warns(UserWarning, match="replaced"):
        assert cache.get(key(1), ".so") is None


@pytest.mark.parametrize("change", [
    lambda path: path.chmod(0o620),
    lambda path: path.chmod(0o602),
    lambda path: (path.rename(path.with_name("real")), path.symlink_to("real")),
    lambda path: (path.unlink(), path.mkdir()),
    lambda path: (path.unlink(), os.mkfifo(path)),
], ids=["group", "others", "a link", "a folder", "a pipe"])
def test_an_entry_that_is_not_this_users_file(root: Path, change: Callable[[Path], object]) -> None:
    path = DiskCache(root).put(key(1), b"data", ".so")
    assert path is not None
    change(path)
    cache = DiskCache(root)
    assert cache.get(key(1), ".so") is None and cache.read(key(1), ".so") is None


def test_an_entry_under_another_name(root: Path) -> None:
    path = DiskCache(root).put(key(1), b"data", ".so")
    assert path is not None
    path.rename(root / f"{key(2)}.so")
    assert DiskCache(root).get(key(2), ".so") is None


@pytest.mark.parametrize("name", ["../secret", "tmp", "0" * 64 + "/x"])
def test_a_name_out_of_another_entry(root: Path, name: str) -> None:
    cache = DiskCache(root)
    (root.parent / "secret.so").write_bytes(sealed("secret.so", b"data"))
    assert cache.get(name, ".so") is None and cache.read(name, ".so") is None


def test_what_is_made_on_the_way_is_for_its_owner_alone(root: Path) -> None:
    before = os.umask(0o002)
    try:
        path = DiskCache(root / "a" / "b").put(key(1), b"data", ".so")
    finally:
        os.umask(before)
    assert path is not None and stat.S_IMODE((root / "a").stat().st_mode) == 0o700


def assert_private(cache: DiskCache, caught: list[warnings.WarningMessage]) -> None:
    """Checks that the cache works outside its root, after one warning."""
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
    """Makes the creation of files under a folder fail, as on a full or read-only disk. Permissions would not stop the
    root user."""

    def failing(function):
        def called(*args, dir=None, **kwargs):
            if root in Path(dir).parents:
                raise OSError(code, os.strerror(code))
            return function(*args, dir=dir, **kwargs)

        return called

    for name in ("mkstemp", "mkdtemp"):
        monkeypatch.setattr(scratch.tempfile, name, failing(getattr(scratch.tempfile, name)))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_directory_that_cannot_be_written(root: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(root)
    cache.put(key(1), b"one", ".so")
    refuse(root, code, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_private(cache, caught)
        assert cache.read(key(1), ".so") == b"one"  # still stored and valid


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
            if root in Path(os.readlink(f"/proc/self/fd/{self.file.fileno()}")).parents:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.write(data[10:])

    monkeypatch.setattr(os, "fdopen", lambda *args: Full(fdopen(*args)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_private(cache, caught)
    assert temporaries(root) == [] and [path.name for path in root.iterdir()] == ["tmp"]


def test_without_any_space_nothing_is_stored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(root)

    def full(*args: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scratch.Scratch, "write", full)
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


LEFT = """
import os, sys
from pathlib import Path
from flambeau.targets.cache import DiskCache
cache = DiskCache(Path(sys.argv[1]))
with cache.workspace() as folder:
    (folder / "unit.cpp").write_text("int")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_goes_with_the_next_one(root: Path) -> None:
    """Of two processes that are at work, one is killed: its folder goes, that of the other stays."""
    command = [sys.executable, "-c", LEFT, str(root)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == b"ready\n"
    assert len(temporaries(root)) == 2
    both[0].kill()
    both[0].wait()
    DiskCache(root)
    assert len(temporaries(root)) == 1
    both[1].communicate(timeout=60)
    assert list(root.iterdir()) == []


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
    for path in root.glob("*.so"):
        assert cache.get(path.stem, path.suffix) == path
