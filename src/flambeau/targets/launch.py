"""How Python calls a kernel: through a small extension module, compiled once, or else through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from flambeau.errors import CompileError
from flambeau.targets.base import Launch, Plan, Step
from flambeau.targets.cache import DiskCache
from flambeau.targets.toolchain import Toolchain

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("launcher.cpp")


@dataclass(frozen=True)
class Launcher:
    """Makes launches from the addresses of loaded functions, and plans from launches."""

    launch: Callable[[int, str], Launch]
    plan: Callable[[Sequence[Step]], Plan]


def stored_launcher(toolchain: Toolchain, disk: DiskCache) -> Launcher | None:
    """The extension if it is in the cache already; the ctypes form where no extension can be compiled."""
    if not (_include() / "Python.h").exists():
        log.info("Python.h is not installed: kernels are called through ctypes, 3 microseconds slower")
        return CTYPES
    path = disk.get(_key(toolchain), ".so")
    try:
        return None if path is None else _load(path)
    except ImportError as error:  # deleted by another process just now, or on a disk mounted noexec
        log.info("the cached launcher does not load, and is built again: %s", error)
        return None


def build_launcher(toolchain: Toolchain, disk: DiskCache) -> Launcher:
    """Compile the extension."""
    try:
        launcher, data = toolchain.compile(_SOURCE.read_text(), "launcher", disk, _load, _include())
    except (CompileError, ImportError, OSError) as error:
        log.warning(
            "kernels are called through ctypes, 3 microseconds slower: no launcher was built: %s", error
        )
        return CTYPES
    disk.put(_key(toolchain), data, ".so")
    return launcher


def _include() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _key(toolchain: Toolchain) -> str:
    parts = (_SOURCE.read_text(), toolchain.identity(), sys.version, str(sysconfig.get_config_var("SOABI")))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _load(path: Path) -> Launcher:
    loader = ExtensionFileLoader("launcher", str(path))
    module: ModuleType = module_from_spec(ModuleSpec("launcher", loader, origin=str(path)))
    loader.exec_module(module)
    return Launcher(module.Launch, module.Plan)


class _CtypesLaunch:
    """The same as `Launch` of the extension."""

    _PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)

    def __init__(self, address: int, name: str) -> None:
        self.address = address
        self.name = name
        self._kernel = self._PROTOTYPE(address)

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int:
        code: int = self._kernel(
            (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(sizes))(*sizes)
        )
        return code

    def __repr__(self) -> str:
        return f"<Launch {self.name}>"


class _CtypesPlan:
    """The same as `Plan` of the extension."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = [(launch, tuple(pointers), tuple(sizes)) for launch, pointers, sizes in steps]
        slots = [slot for _, pointers, _ in self._steps for slot, _ in pointers]
        if any(slot < 0 for slot in (*slots, *(slot for _, _, sizes in self._steps for slot in sizes))):
            raise ValueError("a slot is negative")

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> tuple[int, int] | None:
        for at, (launch, where, which) in enumerate(self._steps):
            addresses = [pointers[slot] + offset for slot, offset in where]
            if code := launch(addresses, [sizes[slot] for slot in which]):
                return at, code
        return None


CTYPES = Launcher(_CtypesLaunch, _CtypesPlan)
