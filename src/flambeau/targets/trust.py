"""Decides which files may be loaded as code: those that only this user or root can have written.

    problem = folder_problem(path)                       # None, or what is wrong with it or a folder above it
    descriptor = open_file(folder_descriptor, name)      # PermissionError if somebody else could have written it

A folder is this user's alone if no other user can write to it, and none can rename or replace a folder above it. In a
folder with the sticky bit (/tmp) everybody may write, but nobody can rename what belongs to another user: so it may be
above a folder that belongs to this user. Where this holds for the real path of a folder, without symbolic links, the
path leads to the same files until this user, or root, changes that. So a file that was read and checked by descriptor
may be loaded by its path.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def folder_problem(path: Path) -> str | None:
    """Returns what is wrong with a folder, given by its real path, or with one above it; None if it is safe."""
    for folder in (*reversed(path.parents), path):
        status = os.lstat(folder)
        shown = "it" if folder == path else str(folder)
        if not stat.S_ISDIR(status.st_mode):
            return f"{shown} is not a directory"
        if status.st_uid not in (_ROOT, os.geteuid()):
            return f"{shown} belongs to user {status.st_uid}, not to user {os.geteuid()}"
        if status.st_mode & _OTHERS and not (status.st_mode & stat.S_ISVTX and folder != path):
            return f"{shown} can be written by other users"
    return None


def open_file(folder: int, name: str) -> int:
    """Opens a file in an open folder for reading. Raises PermissionError if another user could have written it."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid in (_ROOT, os.geteuid()) and not status.st_mode & _OTHERS:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{name} is not a file that user {os.geteuid()} alone can write")
