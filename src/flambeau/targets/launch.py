"""How Python calls a kernel: through a small extension module, compiled once, or else through ctypes.

Targets whose kernels are started in another way have an extension of their own (`stored_extension`,
`build_extension`) in the same form.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from flambeau.errors import CompileError
from flambeau.targets.background import Closing
from flambeau.targets.base import Launch, Plan, Step
from flambeau.targets.cache import DiskCache
from flambeau.targets.toolchain import Toolchain, load_extension, whole_text

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_NAME = "launcher"


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
    module = stored_extension(_NAME, toolchain, disk)
    return None if module is None else Launcher(module.Launch, module.Plan)


def build_launcher(toolchain: Toolchain, disk: DiskCache) -> Launcher:
    """Compile the extension."""
    try:
        module = build_extension(_NAME, toolchain, disk)
    except Closing:
        raise
    except (CompileError, ImportError, OSError) as error:
        log.warning("kernels are called through ctypes, 3 microseconds slower: no launcher was built: %s", error)
        return CTYPES
    return Launcher(module.Launch, module.Plan)


# ---- extension modules: <name>.cpp beside this file ----------------------------------------------------


def extension(name: str, toolchain: Toolchain, disk: DiskCache) -> ModuleType:
    """The module, stored by an earlier process or compiled now."""
    return stored_extension(name, toolchain, disk) or build_extension(name, toolchain, disk)


def stored_extension(name: str, toolchain: Toolchain, disk: DiskCache) -> ModuleType | None:
    """The module if an earlier process compiled it."""
    path = disk.get(_key(name, toolchain), ".so")
    try:
        return None if path is None else load_extension(name, path)
    except ImportError as error:  # deleted by another process just now, or on a disk mounted noexec
        log.info("the cached %s does not load, and is built again: %s", name, error)
        return None


def build_extension(name: str, toolchain: Toolchain, disk: DiskCache) -> ModuleType:
    """Compile the module; CompileError, ImportError or OSError if that does not work."""
    module, data = toolchain.compile(_text(name), name, disk, lambda path: load_extension(name, path), _include())
    disk.put(_key(name, toolchain), data, ".so")
    return module


def _include() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _text(name: str) -> str:
    return whole_text(_FOLDER / f"{name}.cpp")


def _key(name: str, toolchain: Toolchain) -> str:
    parts = (_text(name), toolchain.identity(), sys.version, str(sysconfig.get_config_var("SOABI")))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _CtypesLaunch:
    """The same as `Launch` of the extension."""

    _PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)

    def __init__(self, address: int, name: str) -> None:
        self.name = name
        self._kernel = self._PROTOTYPE(address)

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int:
        code: int = self._kernel((ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(sizes))(*sizes))
        return code

    def __repr__(self) -> str:
        return f"<Launch {self.name}>"


class PythonPlan:
    """The same as `Plan` of the extension, for any launches."""

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


CTYPES = Launcher(_CtypesLaunch, PythonPlan)
