"""The CPU target: C++ kernels, compiled in the background, several in a library, and stored on disk.

A kernel's name, in a library and in the cache, is the hash of everything that its machine code depends on. So equal
text is compiled once, whichever graph, process or day it comes from.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

import torch

from flambeau.codegen.source import LIBRARY, KernelSource
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.torch_compat import memory as torch_memory

from ..background import Closing, Pool
from ..base import Allocator, Build, Convolution, KeyedSource, Launch, Plan, Source, Step, Target, failed, not_compiled
from ..cache import DiskCache, shared_cache
from ..launch import CTYPES, Launcher, build_launcher, stored_launcher
from ..toolchain import CompilerKilled, Toolchain, find_toolchain

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel

T = TypeVar("T")
_Kernel: TypeAlias = KeyedSource[KernelSource]

log = logging.getLogger(__name__)

# Such a unit takes about three times as long to compile as the headers alone do (40 ms): smaller ones would be mostly
# headers, larger ones would leave cores idle.
_UNIT_CHARACTERS = 1_500
_ALIGNMENT = 64  # one cache line, and the widest vector register
_LARGE = 32 << 20  # bytes; the C library keeps smaller blocks when they are freed, with their pages


# Filled in by the thread that waits for the compiler.
_Address: TypeAlias = "Future[int | CompileError]"


class CpuTarget(Target):
    """The CPU target. Kernels are stored by key as futures of their address: loaded, or being compiled."""

    names_kernels = True

    name = "cpu"
    # A call of our kernel costs two microseconds more than torch's: sizes from which on the kernel makes up for it.
    wins: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("draws", "volume sampling"), 1 << 12),
        **dict.fromkeys(("cumulative", "max pooling", "average pooling", "adaptive pooling", "resizing", "statistics",
                         "writes by row", "writes by element", "reads by element"), 1 << 13),
        **dict.fromkeys(("softmax", "layer norm", "activations", "extrema"), 1 << 15),
        # of indices, each of which is a row
        **dict.fromkeys(("embedding gradient", "embedding bags", "embedding bag gradients"), 1 << 10),
    }

    def __init__(self) -> None:
        self._launcher: Future[Launcher] | None = None
        self._start()

    def capabilities(self) -> Capabilities:
        from flambeau.codegen.c.dialect import INEXACT
        from flambeau.ir.capabilities import Capabilities

        return Capabilities(name=self.name, ordered_scatter=True, tables=True, inexact=INEXACT)

    def channels_last(self, convolutions: Sequence[Convolution], calls: int) -> Mapping[Convolution, float]:
        """Chooses channels-last for transposed convolutions: oneDNN has kernels for that order, and only a plain loop
        for others, compared with which copies cost nothing (except for 1x1 windows in float32). For other convolutions
        it has kernels for both orders, and the operators that follow would often be slower."""
        known = (torch.float32, torch.bfloat16) if torch.backends.mkldnn.is_available() else ()
        return {c: math.inf for c in convolutions if c.name in ("conv_transpose2d", "conv_transpose3d")
                and c.dtype in known and (c.dtype is torch.bfloat16 or set(c.window) != {1})}

    def render(self, kernel: AnyKernel, name: str) -> KernelSource:
        from flambeau.codegen.c.kernel import render

        return render(kernel, name)

    def bounded(self, kernel: AnyKernel, name: str) -> KernelSource:
        from flambeau.codegen.c.kernel import render

        return render(kernel, name, bounded=True)

    def build(self, sources: Sequence[Source]) -> Build:
        if self._pid != os.getpid():
            self._start()
        # Settings are read here, because an override holds only in the caller's thread.
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        toolchain = self.toolchain(disk)
        jobs = config.compile_jobs

        by_name: dict[str, _Kernel] = {}
        identity = toolchain.identity()
        for source in sources:
            assert isinstance(source, KernelSource)
            kernel = _Kernel(source, kernel_key(source, identity))
            if by_name.setdefault(source.name, kernel).key != kernel.key:
                raise ValueError(f"two different kernels of one build are called {source.name!r}")
        with self._lock:
            self._prepare_launcher(toolchain, disk, jobs)
            missing = {k.key: k for k in by_name.values() if not self._known(k, disk)}
            for kernel in missing.values():
                self._kernels[kernel.key] = Future()
            futures = {name: self._kernels[kernel.key] for name, kernel in by_name.items()}
        for unit in group(list(missing.values()), jobs):
            self._pool(jobs).submit(self._compile_unit, unit, toolchain, disk)

        def made(name: str) -> Launch | CompileError:
            address = futures[name].result()
            return address if isinstance(address, CompileError) else self.launcher().launch(address, name)

        return Build({name: (future,) for name, future in futures.items()}, made)

    def toolchain(self, disk: DiskCache) -> Toolchain:
        return find_toolchain(config.compiler, disk)

    def plan(self, steps: Sequence[Step]) -> Plan:
        return self.launcher().plan(steps)

    def launcher(self) -> Launcher:
        """Returns the maker of launches and plans; waits for its compiler at the first use after an install."""
        return CTYPES if self._launcher is None else self._launcher.result()

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        memory = super().empty(nbytes, device)
        if memory.data_ptr() % _ALIGNMENT:
            # torch's own allocator aligns; one that replaced it may not.
            memory = super().empty(nbytes + _ALIGNMENT, device)
            off = -memory.data_ptr() % _ALIGNMENT
            memory = memory[off : off + nbytes]
        self.fresh(memory)
        return memory

    def fresh(self, memory: torch.Tensor) -> None:
        in_large_pages(memory)

    def allocator(self, device: torch.device) -> Allocator:
        # It takes half the time of torch.empty_strided, which parses keywords.
        allocate: Allocator = torch_memory.empty_strided_cpu
        return allocate

    def _start(self) -> None:
        """Resets the tables: initially, and in a forked child, which lacks the threads that would fill them."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._kernels: dict[str, _Address] = {}
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._pools: dict[int, Pool] = {}
        # The launches that a child inherited are of this launcher's kind.
        if self._launcher is not None and not self._launcher.done():
            self._launcher = None

    def _pool(self, jobs: int) -> Pool:
        if jobs not in self._pools:
            self._pools[jobs] = Pool(jobs, "compile")
        return self._pools[jobs]

    def _prepare_launcher(self, toolchain: Toolchain, disk: DiskCache, jobs: int) -> None:
        if self._launcher is not None:
            return
        if stored := stored_launcher(toolchain, disk):
            self._launcher = _finished(stored)
        else:
            self._launcher = self._pool(jobs).submit(build_launcher, toolchain, disk)

    def _known(self, kernel: _Kernel, disk: DiskCache) -> bool:
        """Whether the table has the kernel; loads it from disk if it is there."""
        known = self._kernels.get(kernel.key)
        if known is not None and not failed(known):
            return True
        unit = disk.read(kernel.key, ".ref")
        path = unit and disk.get(unit.decode(), ".so")
        if not unit or not path:
            return False
        try:
            address = self._address(kernel, self._library(unit.decode(), path))
        except (OSError, AttributeError) as error:  # deleted by another process just now
            log.info("cached kernel %s does not load, and is built again: %s", kernel.source.name, error)
            return False
        self._kernels[kernel.key] = _finished(address)
        return True

    def _library(self, unit: str, path: Path) -> ctypes.CDLL:
        if unit not in self._libraries:
            self._libraries[unit] = ctypes.CDLL(str(path))  # for as long as the process lives
        return self._libraries[unit]

    @staticmethod
    def _address(kernel: _Kernel, library: ctypes.CDLL) -> int:
        address = ctypes.cast(getattr(library, kernel.symbol), ctypes.c_void_p).value
        assert address is not None
        return address

    def _compile_unit(self, unit: Sequence[_Kernel], toolchain: Toolchain, disk: DiskCache) -> None:
        try:
            self._compile(unit, toolchain, disk)
        except BaseException as error:  # raised where the kernels are waited for
            for kernel in unit:
                if not self._kernels[kernel.key].done():
                    self._kernels[kernel.key].set_exception(error)

    def _compile(self, unit: Sequence[_Kernel], toolchain: Toolchain, disk: DiskCache) -> None:
        """Compiles some kernels into one library; on failure in halves, until each bad kernel is alone."""
        key = hashlib.sha256("".join(k.key for k in unit).encode()).hexdigest()

        def load(path: Path) -> list[int]:
            library = self._library(key, path)
            return [self._address(kernel, library) for kernel in unit]

        try:
            addresses, data = toolchain.compile(unit_text(unit), key, disk, load, LIBRARY)
        except Closing:
            raise
        except (CompileError, OSError, AttributeError) as error:
            if len(unit) == 1 or isinstance(error, CompilerKilled):
                self._fail(unit, str(error).replace(key, unit[0].source.name), disk)
            else:
                middle = len(unit) // 2
                self._compile(unit[:middle], toolchain, disk)
                self._compile(unit[middle:], toolchain, disk)
            return
        disk.put(key, data, ".so")
        for kernel, address in zip(unit, addresses):
            disk.put(kernel.key, key.encode(), ".ref")
            self._kernels[kernel.key].set_result(address)

    def _fail(self, unit: Sequence[_Kernel], reason: str, disk: DiskCache) -> None:
        for kernel in unit:
            path = disk.put(kernel.key, unit_text([kernel]).encode(), ".cpp")
            self._kernels[kernel.key].set_result(
                not_compiled(f"the kernel {kernel.shown}", reason, self.name, path))


def kernel_key(source: KernelSource, identity: str) -> str:
    """Returns the hash of everything that decides a kernel's machine code. Its name does not."""
    parts = (source.text, *source.headers, _headers_digest(), identity)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def group(kernels: Sequence[_Kernel], jobs: int) -> list[list[_Kernel]]:
    """Returns units of about equal length: the longest kernel first, each to the shortest unit so far."""
    total = sum(len(kernel.source.text) for kernel in kernels)
    count = min(2 * jobs, -(-total // _UNIT_CHARACTERS), len(kernels))
    units: list[list[_Kernel]] = [[] for _ in range(count)]
    lengths = [0] * count
    for kernel in sorted(kernels, key=lambda k: (-len(k.source.text), k.key)):
        shortest = lengths.index(min(lengths))
        units[shortest].append(kernel)
        lengths[shortest] += len(kernel.source.text)
    return units


def unit_text(kernels: Sequence[_Kernel]) -> str:
    headers = dict.fromkeys(header for kernel in kernels for header in kernel.source.headers)
    parts = ["#include <stdint.h>", *(f'#include "{header}"' for header in headers)]
    for kernel in kernels:
        parts.append(f"namespace n_{kernel.symbol} {{\n{kernel.text}\n}}")
    return "\n".join(parts) + "\n"


def _finished(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def in_large_pages(memory: torch.Tensor) -> None:
    """Asks for huge pages: faulting in 4 KB pages takes longer than most kernels that write there."""
    nbytes = memory.untyped_storage().nbytes()
    if nbytes < _LARGE or _madvise is None:
        return
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    # It is only advice: a system that ignores it provides small pages.
    _madvise(start, nbytes - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)


@cache
def _headers_digest() -> str:
    # All of them, because a header may include another.
    contents = [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(LIBRARY.glob("*.h"))]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()


def _advice() -> Callable[[int, int, int], int] | None:
    """Returns the C library's madvise, if it supports huge pages; else None."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function: Callable[[int, int, int], int] = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]  # type: ignore[attr-defined]
    return function


_madvise = _advice()
