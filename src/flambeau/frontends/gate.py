"""The native gates (gate.cpp): compiled once for each torch, with the signatures of the operators they stand before."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from flambeau.config import config
from flambeau.errors import CompileError, UnsupportedError
from flambeau.targets.cache import DiskCache, shared_cache
from flambeau.targets.toolchain import Toolchain, find_toolchain

from .eager_ops import all_forms, cpp_names

log = logging.getLogger(__name__)

_NAME = "gate"
_SOURCE = Path(__file__).with_suffix(".cpp")
# Headers of torch are most of the work, and what runs often is small: -O2 takes twice the time and gains nothing.
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


class Gates(Protocol):
    """The extension module."""

    def make(self, name: str, overload: str, key: str, device: str) -> int:
        """A gate before one operator at one dispatch key; it exists until the process ends."""

    def open(self, gate: int, threshold: int, measured: int, patience: int, ask: Callable[[int, tuple[Any, ...]], None],
             capturing: Callable[[], bool] | None) -> None:
        """Put it into the dispatch table, or change its settings if it is there."""

    def close(self, gate: int) -> None:
        """Take it out: what was there before is there again."""

    def resolve(self, gate: int, slot: int, run: Callable[[list[Any]], list[Any]] | None, trial: bool) -> None:
        """What serves the calls that `ask` was asked about: run, both in turns at first, or the original."""

    def usage(self, gate: int) -> tuple[int, int, list[tuple[int, float, float]]]:
        """(calls of ours, calls of the original, for each kernel: turn, best time of the original, of ours)"""


@cache
def load_gates() -> Gates:
    """The module, out of the cache or compiled now. CompileError where there is nothing to compile with."""
    if not (_python() / "Python.h").exists():
        raise UnsupportedError("eager operators cannot be replaced: Python.h is not installed",
                               hint="install the headers of this Python (Debian, Ubuntu: apt install python3-dev)")
    disk = shared_cache(config.cache_dir, config.cache_limit_mb)
    found = find_toolchain(config.compiler, disk)
    toolchain = replace(found, flags=(*_FLAGS, f"-I{_torch() / 'include'}"), libraries=(
        f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"))
    text = source()
    key = hashlib.sha256("\0".join((text, toolchain.identity(), torch.__version__, str(torch.version.git_version),
                                    sys.version, str(sysconfig.get_config_var("SOABI")))).encode()).hexdigest()
    made = stored(disk, key)
    if made is None:
        with alone(disk):
            made = stored(disk, key) or build(toolchain, disk, text, key)
    gates: Gates = made
    return gates


def source() -> str:
    """The text with its table of operators."""
    headers, types = cpp_names(all_forms())
    return _SOURCE.read_text().replace(
        "// OPERATOR HEADERS", "\n".join(f"#include <{h}>" for h in headers)).replace(
        "// OPERATOR ROWS", "\n".join(f"    row<{t}>()," for t in types))


def stored(disk: DiskCache, key: str) -> Any:
    path = disk.get(key, ".so")
    try:
        return None if path is None else load(path)
    except ImportError:  # deleted by another process just now
        return None


@contextmanager
def alone(disk: DiskCache) -> Iterator[None]:
    """Of the processes of a job, one compiles and the others wait for what it makes."""
    try:
        handle = os.open(disk.root / f"{_NAME}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # a folder that cannot be written: each for itself
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def build(toolchain: Toolchain, disk: DiskCache, text: str, key: str) -> Any:
    log.warning("compiling the gates before eager operators for torch %s: once, some twenty seconds", torch.__version__)
    try:
        module, data = toolchain.compile(text, _NAME, disk, load, _python())
    except (CompileError, ImportError, OSError) as error:
        raise CompileError(f"the gates before eager operators did not build: {error}",
                           hint=f"torch {torch.__version__} may be newer than this version of Flambeau") from error
    disk.put(key, data, ".so")
    return module


def load(path: Path) -> Any:
    loader = ExtensionFileLoader(_NAME, str(path))
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def _python() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _torch() -> Path:
    return Path(torch.__file__).parent
