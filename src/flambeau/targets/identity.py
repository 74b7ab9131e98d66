"""Identifies what a compiled program depends on besides its source: versions, our own source code, the machine."""

from __future__ import annotations

import hashlib
import sys
import time
from functools import cache
from pathlib import Path

import torch

import flambeau

from .base import Target

LOADED = time.time()
SOURCES = (".py", ".h", ".cpp")


class Uncacheable(Exception):
    """Raised with the reason why something has no key."""


def identity(target: Target) -> tuple[str, ...]:
    """Returns versions, source digest and machine: equal in two processes only if both compile alike for the target."""
    return torch.__version__, str(torch.version.git_version), sys.version, source_digest(), machine(target)


@cache
def source_digest() -> str:
    """A hash of our own source."""
    root = Path(flambeau.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in SOURCES):
        if path.stat().st_mtime > LOADED:  # edited since: this process may run the older text
            raise Uncacheable(f"{path.name} was changed after it may have been imported")
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def machine(target: Target) -> str:
    """Returns what the scheduler knows of the target. Sets are sorted, since their order differs between processes."""
    facts = vars(target.capabilities()).items()
    plain = [(name, sorted(map(str, x)) if isinstance(x, frozenset) else x) for name, x in facts]
    return target.identity() + repr(plain)
