"""The cache on disk: checked, bounded, and safe with many processes at once.

    cache = DiskCache()                       # at config.cache_dir, up to config.cache_limit_mb
    path = cache.put(key, data, ".so")        # key: 64 hex digits, the sha256 of all that went into `data`
    path = cache.get(key, ".so")              # None: not there, or it was damaged and has been deleted

An entry is one file, `<key><suffix>`: the data, then a line with its sha256. The line stands at the end
because the loader of shared libraries ignores it there, and in the same file because two files cannot be
replaced in one step. Files appear by rename only, so a reader never sees half an entry.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flambeau.config import config
from flambeau.errors import CacheError

log = logging.getLogger(__name__)

_SEAL = b"\n// flambeau sha256 "
_SEAL_LENGTH = len(_SEAL) + 64 + 1
_ENTRY = re.compile(r"[0-9a-f]{64}\.[a-z]+")
_TEMPORARY = "tmp-"
_TEMPORARY_SECONDS = 3600
# A full cache is trimmed to this share, so that the next entries do not each pay for a scan of the directory.
_TRIMMED = 0.8


class CacheStats(NamedTuple):
    entries: int
    size: int


class DiskCache:
    """Sealed files under `root`, at most about `limit` bytes, the least recently used go first.

    The directory belongs to its owner alone: a library from here runs with the user's rights, so a place that
    somebody else could have written to is refused with a CacheError. A directory that cannot be written
    (read-only, no space) is not an error: new entries then go to a temporary one that ends with the process.
    """

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        self.root = Path(config.cache_dir if root is None else root).absolute()
        self.limit = config.cache_limit_mb * 2**20 if limit is None else limit
        self._private: Path | None = None
        self._verified: set[Path] = set()
        self._unscanned: int | None = None  # bytes written since the last scan; None before the first
        self._lock = threading.Lock()
        self._open_root()

    def get(self, key: str, suffix: str) -> Path | None:
        """The file of an entry, which counts as used now. Its content is checked once per process."""
        for directory in self._directories():
            path = directory / (key + suffix)
            if path not in self._verified and _unsealed(path) is None:
                continue
            if _touch(path):
                self._verified.add(path)
                return path
            self._verified.discard(path)
        return None

    def read(self, key: str, suffix: str) -> bytes | None:
        """The data of an entry, without the seal."""
        for directory in self._directories():
            path = directory / (key + suffix)
            if (data := _unsealed(path)) is not None:
                _touch(path)
                return data
        return None

    def put(self, key: str, data: bytes, suffix: str) -> Path | None:
        """Store an entry. None where not even the temporary directory takes it."""
        name = key + suffix
        if not _ENTRY.fullmatch(name):
            raise ValueError(f"not the name of a cache entry: {name!r}")
        sealed = data + _SEAL + hashlib.sha256(data).hexdigest().encode() + b"\n"
        for _ in range(2):
            directory = self._writable
            try:
                path = _write(directory, name, sealed)
            except OSError as error:
                self._fall_back(directory, error)
                continue
            self._verified.add(path)
            self._account(len(sealed), path)
            return path
        return None

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A fresh directory for a compiler to write to, until the block ends."""
        directory = self._writable
        try:
            made = tempfile.mkdtemp(prefix=_TEMPORARY, dir=directory)
        except OSError as error:
            self._fall_back(directory, error)
            made = tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._writable)
        try:
            yield Path(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def give_up(self, workspace: Path, reason: str) -> bool:
        """Told that a workspace is of no use to the compiler; whether the next one is somewhere else."""
        if workspace.parent == self._private:
            return False
        self._fall_back(workspace.parent, OSError(reason))
        return True

    def stats(self) -> CacheStats:
        sizes = [status.st_size for _, status in self._entries()]
        return CacheStats(len(sizes), sum(sizes))

    def clear(self) -> int:
        """Delete every entry, and say how many there were."""
        removed = sum(_unlink(path) for path, _ in self._entries())
        self._verified.clear()
        return removed

    def _open_root(self) -> None:
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.root.mkdir(mode=0o700)
            status = self.root.lstat()
        except OSError as error:
            self._fall_back(self.root, error)
            return
        problems = {
            "is a symbolic link": stat.S_ISLNK(status.st_mode),
            "is not a directory": not stat.S_ISDIR(status.st_mode),
            f"belongs to user {status.st_uid}, not to user {os.geteuid()}": status.st_uid != os.geteuid(),
            "can be written by other users": bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)),
        }
        if found := [problem for problem, applies in problems.items() if applies]:
            raise CacheError(f"the kernel cache {self.root} is not safe to load code from: it {found[0]}",
                             hint="set FLAMBEAU_CACHE_DIR to a directory that is yours alone (chmod 700)")

    @property
    def _writable(self) -> Path:
        return self._private or self.root

    def _directories(self) -> tuple[Path, ...]:
        # What a read-only directory already holds stays useful.
        return (self.root,) if self._private is None else (self._private, self.root)

    def _fall_back(self, failed: Path, error: OSError) -> None:
        """Write to a temporary directory from now on, unless another thread arranged that already."""
        with self._lock:
            if failed != self._writable or self._private is not None:
                return
            self._private = Path(tempfile.mkdtemp(prefix="flambeau-"))
            atexit.register(_remove_own, self._private, os.getpid())
        warnings.warn(f"the kernel cache {self.root} cannot be used ({error.strerror or error}): this process keeps "
                      "its kernels in a temporary directory, and the next one compiles them again. "
                      "Set FLAMBEAU_CACHE_DIR to another directory.", stacklevel=3)

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for directory in self._directories():
            for path, status in _scan(directory):
                # Nothing else is ever deleted, wherever a user points the cache to.
                if _ENTRY.fullmatch(path.name):
                    yield path, status

    def _account(self, size: int, newest: Path) -> None:
        with self._lock:
            first = self._unscanned is None
            self._unscanned = (self._unscanned or 0) + size
            if not first and self._unscanned <= self.limit // 32:
                return
            self._unscanned = 0
        if first:
            self._remove_abandoned()
        self._trim(newest)

    def _trim(self, newest: Path) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(status.st_size for _, status in entries)
        if total <= self.limit:
            return
        # Another process may delete or read the same files: a deleted one is a miss for a reader that comes
        # later, and lives on for a reader that has it open or mapped.
        for path, status in entries:
            if total <= self.limit * _TRIMMED:
                break
            if path != newest:
                _unlink(path)
                total -= status.st_size

    def _remove_abandoned(self) -> None:
        """What killed processes left half-written: an hour is longer than any build."""
        oldest = time.time() - _TEMPORARY_SECONDS
        for path, status in _scan(self._writable):
            if path.name.startswith(_TEMPORARY) and status.st_mtime < oldest:
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    _unlink(path)


@cache
def shared_cache(root: Path, limit_mb: int) -> DiskCache:
    """One object for each directory and process: it knows what was verified already, and how full it is."""
    return DiskCache(root, limit_mb * 2**20)


def _scan(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        found = list(os.scandir(directory))
    except OSError:
        return  # never made, or gone: no entries
    for item in found:
        with suppress(FileNotFoundError):
            yield Path(item.path), item.stat(follow_symlinks=False)


def _write(directory: Path, name: str, data: bytes) -> Path:
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, directory / name)
    except BaseException:
        _unlink(Path(temporary))
        raise
    return directory / name


def _unsealed(path: Path) -> bytes | None:
    """The data of a sealed file; a file whose seal does not fit is deleted."""
    try:
        sealed = path.read_bytes()
    except OSError:
        return None  # not there, or not readable: a miss either way
    data, seal = sealed[:-_SEAL_LENGTH], sealed[-_SEAL_LENGTH:]
    if seal == _SEAL + hashlib.sha256(data).hexdigest().encode() + b"\n":
        return data
    log.warning("damaged cache entry %s deleted; it will be built again", path)
    _unlink(path)
    return None


def _touch(path: Path) -> bool:
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a read-only directory has no order to keep
    return True


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False  # another process was faster, or the directory is read-only
    return True


def _remove_own(directory: Path, pid: int) -> None:
    # A forked child inherits the exit handlers, not the directory.
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
