"""Calls kernels from Python through a small extension module, which is compiled once, or through ctypes.

Targets whose kernels are started in another way have an extension of their own (`extension`) in the same form.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from flambeau.errors import CompileError
from flambeau.targets.background import Closing
from flambeau.targets.base import Launch, Plan, Step
from flambeau.targets.cache import DiskCache
from flambeau.targets.toolchain import Extension, Toolchain, python_headers, whole_text

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_NAME = "launcher"


@dataclass(frozen=True)
class Launcher:
    """Makes launches from the addresses of loaded functions, and plans from launches."""

    launch: Callable[[int, str], Launch]
    plan: Callable[[Sequence[Step]], Plan]


def stored_launcher(toolchain: Toolchain, disk: DiskCache) -> Launcher | None:
    """Returns the extension if it is in the cache already; the ctypes form where no extension can be compiled."""
    if not (python_headers() / "Python.h").exists():
        log.info("Python.h is not installed: kernels are called through ctypes, 3 microseconds slower")
        return CTYPES
    module = _extension(_NAME, toolchain, disk).stored()
    return None if module is None else Launcher(module.Launch, module.Plan)


def build_launcher(toolchain: Toolchain, disk: DiskCache) -> Launcher:
    """Compiles the extension."""
    try:
        module = _extension(_NAME, toolchain, disk).build()
    except Closing:
        raise
    except (CompileError, ImportError, OSError) as error:
        log.warning("kernels are called through ctypes, 3 microseconds slower: no launcher was built: %s", error)
        return CTYPES
    return Launcher(module.Launch, module.Plan)


def extension(name: str, toolchain: Toolchain, disk: DiskCache) -> ModuleType:
    """Returns the module of <name>.cpp next to this file, stored by an earlier process or compiled now."""
    found = _extension(name, toolchain, disk)
    module: ModuleType = found.stored() or found.build()
    return module


def _extension(name: str, toolchain: Toolchain, disk: DiskCache) -> Extension:
    return Extension(name, whole_text(_FOLDER / f"{name}.cpp"), toolchain, disk)


class _CtypesLaunch:
    """The ctypes counterpart of the extension's `Launch`."""

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
    """The Python counterpart of the extension's `Plan`, for any launches."""

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
