"""The cache on disk: checked, bounded, and safe with many processes at once.

    cache = DiskCache()                       # at config.cache_dir, up to config.cache_limit_mb
    path = cache.put(key, data, ".so")        # key: 64 hex digits, the sha256 of all that went into `data`
    path = cache.get(key, ".so")              # None: not there, or it was damaged and has been deleted

An entry is one file, `<key><suffix>`: the data, then a line with the sha256 of name and data. The line is at the end
because the loader of shared libraries ignores it there, and in the same file because two files cannot be replaced in
one step. Files appear by rename only, so a reader never sees half an entry.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flambeau.config import config
from flambeau.errors import CacheError
from flambeau.targets.background import at_exit, fork_safe, held
from flambeau.targets.scratch import Scratch
from flambeau.targets.trust import folder_problem, open_file

log = logging.getLogger(__name__)

counts: Counter[str] = Counter()  # numbers of entries that this process has read and written
_SEAL = b"\n// flambeau sha256 "
_SEAL_LENGTH = len(_SEAL) + 64 + 1
_ENTRY = re.compile(r"[0-9a-f]{64}\.[a-z]+")
# A full cache is trimmed to this share, so that the next entries do not each pay for a scan of the directory.
_TRIMMED = 0.8
_ASK_AGAIN = 0.05  # seconds between attempts to get a lock that another process has


class CacheStats(NamedTuple):
    entries: int
    size: int


class Distrusted(OSError):
    """Raised for a directory that other users can write to: its files are neither read nor loaded."""


class DiskCache:
    """Sealed files under `root`, of about `limit` bytes at most; the least recently used are deleted first.

    An entry runs with the user's rights, so it is read only from where nobody else can write (`trust.py`), which is
    checked each time. A directory that others can write to is not used, and one that cannot be written (read-only, no
    space) is only read: new entries then go to a temporary one that ends with the process, with a warning that says
    what to do.
    """

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        self.root = Path(config.cache_dir if root is None else root).absolute()
        self.limit = config.cache_limit_mb * 2**20 if limit is None else limit
        self._shared: _Folder | None = None  # the root, if it can be trusted
        self._private: _Folder | None = None  # used instead of it, or in addition to it
        self._verified: set[Path] = set()
        self._unscanned: int | None = None  # bytes written since the last scan; None before the first
        self._lock = fork_safe(threading.Lock())
        try:
            _make(Path(os.path.realpath(self.root)))
            self._shared = _Folder(self.root)
        except OSError as error:
            self._fall_back(None, error)

    def get(self, key: str, suffix: str) -> Path | None:
        """Returns the file of an entry and marks it as used now. Its content is checked once per process."""
        name = key + suffix
        for folder in self._folders():
            path = folder.path / name
            if self._read(folder, name, path not in self._verified) is not None:
                self._verified.add(path)
                counts["read"] += 1
                return path
            self._verified.discard(path)
        return None

    def read(self, key: str, suffix: str) -> bytes | None:
        """Returns the data of an entry, without the seal."""
        for folder in self._folders():
            if (data := self._read(folder, key + suffix)) is not None:
                counts["read"] += 1
                return data
        return None

    def put(self, key: str, data: bytes, suffix: str) -> Path | None:
        """Stores an entry. Returns None if not even the temporary directory can store it."""
        name = key + suffix
        if not _ENTRY.fullmatch(name):
            raise ValueError(f"not the name of a cache entry: {name!r}")
        for _ in range(2):
            folder = self._writable()
            path = folder.path / name
            try:
                folder.check()
                folder.scratch.write(data + _seal(name, data), path)
            except OSError as error:
                self._fall_back(folder, error)
                continue
            self._verified.add(path)
            self._account(len(data) + _SEAL_LENGTH, path)
            counts["written"] += 1
            return path
        return None

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Makes a fresh directory for a compiler to write to, until the block ends."""
        folder = self._writable()
        try:
            folder.check()
            folder.scratch.path()
        except OSError as error:
            self._fall_back(folder, error)
        with self._writable().scratch.folder() as made:
            yield made

    def folder(self) -> Path:
        """Makes a fresh directory that ends with the process."""
        return Path(tempfile.mkdtemp(dir=self._writable().scratch.path()))

    def give_up(self, workspace: Path, reason: str) -> bool:
        """Reports that a compiler cannot use a workspace. Returns whether the next one is somewhere else."""
        if self._private is not None and self._private.path in workspace.parents:
            return False
        self._fall_back(self._shared, OSError(reason))
        return True

    @contextmanager
    def alone(self, name: str, seconds: float) -> Iterator[None]:
        """Lets one process of a job do something while the others wait for its result, so many seconds at most."""
        try:
            handle = os.open(self._writable().path / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # a folder that cannot be written: each process for itself
            yield
            return
        until = time.monotonic() + seconds
        try:
            with held(handle):
                while time.monotonic() < until:
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(_ASK_AGAIN)
                    except OSError:  # a disk without locks
                        break
                try:
                    yield
                finally:
                    # Closing is not enough while a child that was forked meanwhile has the same lock open.
                    with suppress(OSError):
                        fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)

    def names(self) -> list[str]:
        """Returns the names of all entries."""
        return sorted({path.name for path, _ in self._entries()})

    def sealed(self, name: str) -> bytes | None:
        """Returns an entry with its seal, as stored."""
        key, _, suffix = name.partition(".")
        data = self.read(key, f".{suffix}")
        return None if data is None else data + _seal(name, data)

    def stats(self) -> CacheStats:
        sizes = [status.st_size for _, status in self._entries()]
        return CacheStats(len(sizes), sum(sizes))

    def clear(self) -> int:
        """Deletes every entry; returns how many there were."""
        removed = sum(_unlink(path) for path, _ in self._entries())
        self._verified.clear()
        return removed

    def _read(self, folder: _Folder, name: str, whole: bool = True) -> bytes | None:
        """Returns the data of a sealed file and marks it as used now; a file with a wrong seal is deleted.

        Without `whole`, a file that was read before is only checked to exist and to be this user's.
        """
        if not _ENTRY.fullmatch(name):  # the name came out of another entry
            return None
        try:
            folder.check()
            descriptor = open_file(folder.descriptor, name)
        except Distrusted as error:
            self._fall_back(folder, error)
            return None
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the cache entry %s is not used: %s", folder.path / name, error)
            return None
        with open(descriptor, "rb") as file:
            sealed = file.read() if whole else b""
            with suppress(OSError):  # a read-only directory has no order to keep
                os.utime(descriptor)
        if not whole or (data := unsealed(name, sealed)) is not None:
            return data if whole else b""
        log.warning("damaged cache entry %s deleted; it will be built again", folder.path / name)
        _unlink(folder.path / name)
        return None

    def _writable(self) -> _Folder:
        folder = self._private or self._shared
        assert folder is not None
        return folder

    def _folders(self) -> tuple[_Folder, ...]:
        # The entries of a read-only directory stay useful.
        return tuple(folder for folder in (self._private, self._shared) if folder is not None)

    def _fall_back(self, failed: _Folder | None, error: OSError) -> None:
        """Writes to a temporary directory from now on, unless another thread arranged that already."""
        with self._lock:
            if isinstance(error, Distrusted) and failed is self._shared:
                self._shared = None
            if self._private is not None:
                return
            self._private = _temporary_folder()
        if isinstance(error, Distrusted):
            way_out = f"Make it yours alone (chown, chmod go-w), or set {_VARIABLE} to a directory that is."
        else:
            way_out = f"Set {_VARIABLE} to another directory."
        warnings.warn(f"the kernel cache {self.root} cannot be used ({error.strerror or error}): this process keeps "
                      f"its kernels in a temporary directory, and the next one compiles them again. {way_out}",
                      stacklevel=3)

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in self._folders():
            for path, status in _scan(folder.path):
                # Only entries are ever deleted, wherever a user points the cache to.
                if _ENTRY.fullmatch(path.name):
                    yield path, status

    def _account(self, size: int, newest: Path) -> None:
        with self._lock:
            first = self._unscanned is None
            self._unscanned = (self._unscanned or 0) + size
            if not first and self._unscanned <= self.limit // 32:
                return
            self._unscanned = 0
        self._trim(newest)

    def _trim(self, newest: Path) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(status.st_size for _, status in entries)
        if total <= self.limit:
            return
        # Another process may delete or read the same files: a deleted one is a miss for a later reader, and stays
        # readable for one that has it open or mapped.
        for path, status in entries:
            if total <= self.limit * _TRIMMED:
                break
            if path != newest:
                _unlink(path)
                total -= status.st_size


_VARIABLE = "FLAMBEAU_CACHE_DIR"


@cache
def shared_cache(root: Path, limit_mb: int) -> DiskCache:
    """Returns one object for each directory and process: it knows which entries were verified, and how full the cache
    is."""
    return DiskCache(root, limit_mb * 2**20)


class _Folder:
    """An open directory that this user alone can write, by its real path. Raises OSError if it is not one."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.check()
        except OSError:
            os.close(self.descriptor)
            raise
        self.scratch = Scratch(self.path)

    def check(self) -> None:
        """Raises Distrusted if somebody else could write there by now, or if the path leads somewhere else."""
        if problem := folder_problem(self.path):
            raise Distrusted(f"it is not safe to load code from: {problem}")
        if not os.path.samestat(os.lstat(self.path), os.fstat(self.descriptor)):
            raise Distrusted("it was replaced while it was in use")


def _make(folder: Path) -> None:
    """Makes a folder and missing parents, for this user alone whatever the umask says."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _temporary_folder() -> _Folder:
    problems = []
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")):
        try:
            made = Path(tempfile.mkdtemp(prefix="flambeau-", dir=place))
            at_exit(lambda made=made: shutil.rmtree(made, ignore_errors=True))  # type: ignore[misc]
            return _Folder(made)
        except OSError as error:
            problems.append(f"{place}: {error}")
    raise CacheError(f"there is no place for compiled kernels: {'; '.join(problems)}",
                     hint=f"set {_VARIABLE} to a directory that is yours alone (chmod 700)")


def _scan(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        found = list(os.scandir(directory))
    except OSError:
        return  # never made, or gone: no entries
    for item in found:
        with suppress(FileNotFoundError):
            yield Path(item.path), item.stat(follow_symlinks=False)


def _seal(name: str, data: bytes) -> bytes:
    """The seal covers the name as well: data under another key is not valid there."""
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(data)
    return _SEAL + digest.hexdigest().encode() + b"\n"


def unsealed(name: str, sealed: bytes) -> bytes | None:
    """Returns the data of an entry; None if it is not an entry, or was changed."""
    data = sealed[:-_SEAL_LENGTH]
    return data if _ENTRY.fullmatch(name) and sealed[-_SEAL_LENGTH:] == _seal(name, data) else None


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False  # another process was faster, or the directory is read-only
    return True
