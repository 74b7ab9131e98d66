"""Builds OpenCL programs in the background, several kernels in each, and stores their binaries on disk.

A kernel's name is the hash of everything that its binary depends on: text, library, device, driver and options.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from flambeau.codegen.source import LIBRARY, RangeSource
from flambeau.errors import CompileError

from ..background import Pool, check
from ..base import KeyedSource, failed, not_compiled
from ..cache import DiskCache
from .device import NAME, ClDevice

if TYPE_CHECKING:
    import pyopencl

log = logging.getLogger(__name__)

_BINARY, _REFERENCE, _TEXT = ".clbin", ".ref", ".cl"
_INCLUDE = re.compile(r'^#include "(\S+)"$', re.MULTILINE)
_CPP = re.compile(r"^#ifdef __cplusplus$.*?^#endif$", re.MULTILINE | re.DOTALL)

Building: TypeAlias = "Future[pyopencl.Program | CompileError]"


Kernel: TypeAlias = KeyedSource[RangeSource]


def functions_of(kernel: Kernel) -> list[str]:
    return [r.function.replace("KERNEL_NAME", kernel.symbol) for r in kernel.source.ranges]


class ClCompiler:
    """The programs of one device by the keys of their kernels: complete, or being built.

    `keep`: whether binaries are kept on disk. PoCL compiles a kernel in three forms for its binary, which takes longer
    than everything else, and has a cache of its own.
    """

    def __init__(self, device: ClDevice, keep: bool = True) -> None:
        self._device = device
        self._keep = keep
        self._lock = threading.Lock()
        self._programs: dict[str, Building] = {}
        self._waiting: list[tuple[Kernel, DiskCache]] = []
        self._loaded: dict[str, pyopencl.Program] = {}
        # One thread: PoCL's compiler, the slowest one, holds a lock for its whole run.
        self._pool = Pool(1, "opencl")
        self._began: float | None = None  # when the driver call that has not returned yet began

    def start(self, sources: Sequence[RangeSource], disk: DiskCache) -> dict[str, tuple[Kernel, Building]]:
        """Returns every source with the program that contains it."""
        out: dict[str, tuple[Kernel, Building]] = {}
        with self._lock:
            for source in sources:
                kernel = Kernel(source, kernel_key(source, self._device.identity))
                known = self._programs.get(kernel.key)
                if known is None or failed(known):
                    known = self._programs[kernel.key] = Future()
                    stored = self._stored(kernel, disk)
                    if stored is None:
                        self._waiting.append((kernel, disk))
                    else:
                        known.set_result(stored)
                out[source.name] = kernel, known
            if self._waiting:
                self._pool.submit(self._work)
        return out

    def result(self, kernel: Kernel, made: Building, seconds: int) -> pyopencl.Program | CompileError:
        """Returns the program, or the error why there is none. A driver compiles in this process, where it cannot be
        killed: after so many seconds it is no longer waited for."""
        while True:
            try:
                return made.result(timeout=min(1, seconds))
            except TimeoutError:
                began = self._began
                if began is not None and time.monotonic() - began > seconds:
                    return CompileError(
                        f"the driver had not compiled the kernel {kernel.shown} after {seconds} seconds",
                        target=f"{NAME}, {self._device.name}", hint="FLAMBEAU_COMPILE_TIMEOUT is the limit")

    def _stored(self, kernel: Kernel, disk: DiskCache) -> pyopencl.Program | None:
        import pyopencl

        reference = disk.read(kernel.key, _REFERENCE)
        if reference is None:
            return None
        unit = reference.decode()
        if unit not in self._loaded:
            binary = disk.read(unit, _BINARY)
            if binary is None:
                return None
            try:
                self._loaded[unit] = pyopencl.Program(self._device.context, [self._device.device], [binary]).build()
            except pyopencl.Error as error:
                log.info("the cached program %s does not load, and is built again: %s", unit, error)
                return None
        return self._loaded[unit]

    def _work(self) -> None:
        """Compiles all kernels that are waiting, of all graphs together: each program takes the time to read the
        library."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        unit = [kernel for kernel, _ in waiting]
        try:
            if unit:
                self._compile(unit, waiting[0][1])
        except BaseException as error:  # raised where the kernel is waited for
            for kernel in unit:
                if not self._programs[kernel.key].done():
                    self._programs[kernel.key].set_exception(error)

    def _compile(self, unit: Sequence[Kernel], disk: DiskCache) -> None:
        import pyopencl

        check()
        text = unit_text(unit)
        self._began = time.monotonic()
        try:
            program = self._built(text)
            binaries: Any = program.get_info(pyopencl.program_info.BINARIES) if self._keep else [b""]
            binary = binaries[0]
        except pyopencl.Error as error:
            if len(unit) > 1:
                middle = len(unit) // 2
                self._compile(unit[:middle], disk)
                self._compile(unit[middle:], disk)
            else:
                self._fail(unit[0], text, str(error), disk)
            return
        finally:
            self._began = None
        key = hashlib.sha256("\0".join([text, self._device.identity]).encode()).hexdigest()
        if binary:
            disk.put(key, binary, _BINARY)
        for kernel in unit:
            if binary:
                disk.put(kernel.key, key.encode(), _REFERENCE)
            self._programs[kernel.key].set_result(program)

    def _built(self, text: str) -> pyopencl.Program:
        import pyopencl

        def built(text: str, *more: str) -> pyopencl.Program:
            # PyOpenCL's own cache on disk is disabled.
            return pyopencl.Program(self._device.context, text).build(
                [*self._device.options, *more], cache_dir=False)  # type: ignore[arg-type]

        if self._device.is_cpu and self._device.is_pocl:
            with suppress(pyopencl.Error):  # texts that call other builtins are built with the full header
                return built(library("opencl_declared.h") + text, "-D_OPENCL_H_")
        return built(text)

    def _fail(self, kernel: Kernel, text: str, reason: str, disk: DiskCache) -> None:
        path = disk.put(kernel.key, text.encode(), _TEXT)
        self._programs[kernel.key].set_result(
            not_compiled(f"the kernel {kernel.shown}", reason, f"{NAME}, {self._device.name}", path))


def kernel_key(source: RangeSource, identity: str) -> str:
    parts = (source.text, *(library(header) for header in source.headers), identity)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def unit_text(kernels: Sequence[Kernel]) -> str:
    headers = dict.fromkeys(header for kernel in kernels for header in kernel.source.headers)
    return "\n".join([*map(library, headers), *(kernel.text for kernel in kernels)])


@cache
def library(name: str) -> str:
    """Returns a header with everything it includes: drivers differ in where they look for files."""
    return _INCLUDE.sub(lambda m: library(m.group(1)), _CPP.sub("", (LIBRARY / name).read_text()))
