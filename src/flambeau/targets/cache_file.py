"""Exports and imports the cache on disk as one file, for another machine.

    count = export(cache, Path("kernels.zip"))
    new = load(cache, Path("kernels.zip"))         # CacheError says what is wrong with it; then nothing was taken

The file is a plain zip of entries, each under its name and with its seal, as in the cache. Compiled kernels run with
the rights of the user who loads them, and a seal says that an entry is complete, not who made it: a file is accepted
only if nobody but this user, or root, can have written it. Keys include compiler and machine, so entries that do not
fit a machine are never loaded.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from flambeau.errors import CacheError

from .cache import DiskCache, unsealed
from .trust import open_file


def export(cache: DiskCache, path: Path) -> int:
    """Writes every intact entry to a file, which appears by rename. Returns their number."""
    count = 0
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, delete=False) as file:
            try:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                    for name in cache.names():
                        if (sealed := cache.sealed(name)) is not None:
                            archive.writestr(zipfile.ZipInfo(name), sealed, zipfile.ZIP_DEFLATED)
                            count += 1
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror or error}") from error
    return count


def load(cache: DiskCache, path: Path) -> int:
    """Import the entries that are missing, after the whole file was checked. Returns their number."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            descriptor = open_file(folder, path.name)
        finally:
            os.close(folder)
    except OSError as error:
        hint = None if isinstance(error, FileNotFoundError) else "only you may be able to write it (chown, chmod go-w)"
        raise CacheError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    try:
        with open(descriptor, "rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(m.file_size for m in members) > cache.limit:
                raise CacheError(f"{path} is larger than the limit of the cache ({cache.limit >> 20} MiB)",
                                 hint="FLAMBEAU_CACHE_LIMIT_MB sets the limit")
            for member in members:  # all are checked before any is imported
                if unsealed(member.filename, archive.read(member)) is None:
                    raise CacheError(f"{path} is damaged or not an exported cache: the checksum of the entry "
                                     f"{member.filename!r} is wrong; nothing was imported")
            known = {*cache.names()}
            new = [m for m in members if m.filename not in known]
            for member in new:
                data = unsealed(member.filename, archive.read(member))
                key, _, suffix = member.filename.partition(".")
                if data is None or cache.put(key, data, f".{suffix}") is None:
                    raise CacheError(f"the entry {member.filename} of {path} could not be stored")
            return len(new)
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"{path} is damaged or not an exported cache: {error}; nothing was imported") from error
