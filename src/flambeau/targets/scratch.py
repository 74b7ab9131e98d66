"""Temporary folders in a cache: one for each process, which shows whether the process is alive.

The folder is locked for as long as the process lives, however it ends. A lock that can be taken belongs to a dead
process, on this machine or on another one that shares the disk, and its folder is removed. So nothing has to be guessed
from ages or process numbers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flambeau.targets.background import at_exit, closing, fork_safe, held, hold, release

NAME = "tmp"
_OLD = 86400  # seconds; where a disk has no locks, folders that were not written for a day count as abandoned


class Scratch:
    """The temporary folders of this process below `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home / NAME
        self._lock = fork_safe(threading.Lock())
        self._path: Path | None = None
        self._pid = 0
        self.sweep()

    def path(self) -> Path:
        """Returns the folder of this process."""
        with self._lock:
            # A forked child has a folder of its own. A folder that was deleted under the process is made again.
            if self._path is None or self._pid != os.getpid() or not self._path.is_dir():
                self._path, self._pid = self._make(), os.getpid()
            return self._path

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Makes a fresh folder, until the block ends."""
        made = tempfile.mkdtemp(dir=self.path())
        try:
            yield Path(made)
        finally:
            shutil.rmtree(made, ignore_errors=True)
            self._leave()

    def write(self, data: bytes, target: Path) -> None:
        """Writes a whole file, which appears in its place in one step."""
        handle, temporary = tempfile.mkstemp(dir=self.path())
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            self._leave()

    def sweep(self) -> None:
        """Removes the folders of dead processes."""
        with suppress(OSError):
            for item in list(os.scandir(self.home)):
                with suppress(OSError):
                    _remove_dead(item.path)
            self.home.rmdir()  # fails while other processes use it

    def _make(self) -> Path:
        while True:
            self.home.mkdir(mode=0o700, exist_ok=True)
            try:
                path = Path(tempfile.mkdtemp(dir=self.home))
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process found it empty, or not locked yet, and removed it
                if self.home.parent.is_dir():
                    continue
                raise
            with suppress(OSError):  # a disk without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    break
            os.close(descriptor)
        hold(descriptor)
        self._descriptor = descriptor
        at_exit(self._remove)
        return path

    def _remove(self) -> None:
        with self._lock:
            path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            release(self._descriptor)
            os.close(self._descriptor)
            with suppress(OSError):
                self.home.rmdir()

    def _leave(self) -> None:
        """Removes the folder if the process is ending, since nobody does so later."""
        if closing():
            self._remove()


def _remove_dead(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with held(descriptor):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # its process is alive
            except OSError:
                if time.time() - os.fstat(descriptor).st_mtime < _OLD:
                    return
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
