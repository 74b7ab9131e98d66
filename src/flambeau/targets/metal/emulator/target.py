"""A target that runs Metal kernels on CPU tensors: compiled by g++, executed thread by thread.

    FLAMBEAU_TARGET=metal-emulator python model.py

The texts are those of the target for Macs. An error in one (threads that diverge at a barrier, races, accesses out of
bounds, reads of unwritten threadgroup memory, groups or memory beyond the limits of a Mac) raises an EmulatorError.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.codegen.source import RangeSource, items_function
from flambeau.config import config
from flambeau.errors import CompileError, Error

from ...base import Allocator, Build, Launch, Plan, Source, Step
from ...cache import DiskCache
from ...cpu.target import CpuTarget
from ...launch import PythonPlan
from ...toolchain import Extension, Toolchain, find_toolchain
from .binding import bound

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel

FOLDER = Path(__file__).parent
INCLUDE = FOLDER / "include"
# Little is optimised: a kernel runs once or twice, and a loop that leaves its array must not be cut short.
# runner.cpp replaces the instrumentation's own library.
FLAGS = ("-std=gnu++14", "-O1", "-fPIC", "-shared", "-nostdlib", "-w", "-fsanitize=thread,bounds", "-fno-exceptions",
         "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fsigned-char",
         "-fno-aggressive-loop-optimizations", "-ftrivial-auto-var-init=pattern",
         "--param=tsan-instrument-func-entry-exit=0", f"-I{INCLUDE}")


class EmulatorError(Error):
    """A kernel does something that a Mac cannot do, or would not report."""


class EmulatorTarget(CpuTarget):
    name = "metal-emulator"

    def capabilities(self) -> Capabilities:
        from flambeau.codegen.simt.metal import capabilities

        return capabilities(self.name)

    def render(self, kernel: AnyKernel, name: str) -> RangeSource:  # type: ignore[override]
        from flambeau.codegen.simt.metal import render
        from flambeau.ir.program import AttentionKernel, TableKernel

        assert not isinstance(kernel, (AttentionKernel, TableKernel)), "a kernel of other machines"
        source = render(kernel, name)
        # The extents of all buffers come with every launch; the runner checks accesses, not the kernel's text.
        return replace(source, bounded=True, sizes=source.sizes + 2 * len(source.itemsizes))

    bounded = render  # type: ignore[assignment]

    def toolchain(self, disk: DiskCache) -> Toolchain:
        return instrumented(disk)

    def build(self, sources: Sequence[Source]) -> Build:
        texts = {s.name: s for s in sources if isinstance(s, RangeSource)}
        build = super().build([bound(s) for s in texts.values()])

        def made(name: str) -> Launch | CompileError:
            launch = build.made(name)
            return launch if isinstance(launch, CompileError) else EmulatorLaunch(texts[name], launch)

        return Build(build.waiting, made)

    def _prepare_launcher(self, toolchain: Toolchain, disk: DiskCache, jobs: int) -> None:
        """Does nothing: kernels are called through ctypes, so a fast launcher would make no difference."""

    def plan(self, steps: Sequence[Step]) -> Plan:
        return PythonPlan(steps)

    def queue(self) -> None:
        """None, so that no run reuses memory in which another left its data."""

    def fresh(self, memory: torch.Tensor) -> None:
        """Fill memory with nonsense (NaN for floats), so that a result that no thread wrote is noticed."""
        torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()).fill_(0xff)

    def allocator(self, device: torch.device) -> Allocator:
        def made(*layout: Any) -> torch.Tensor:
            self.fresh(memory := torch.empty_strided(*layout[:2], dtype=layout[2]))
            return memory

        return made


class EmulatorLaunch:
    def __init__(self, source: RangeSource, launch: Launch) -> None:
        self.name = source.name
        self._source, self._launch, self._items = source, launch, items_function(source)

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int:
        # A Mac's groups are whole, too: kernels rely on all threads of the last one.
        counts = self._items(1, *sizes)
        threads = [-(-n // part.group) * part.group for n, part in zip(counts, self._source.ranges, strict=True)]
        return raised(self._launch(list(pointers), [*sizes, *threads]), ", ".join(self._source.origins))


_RUNNER: list[ctypes.CDLL] = []


def raised(code: int, what: str) -> int:
    """The code of a launch. Raises EmulatorError if the runner reports an error."""
    if code == -1:
        raise EmulatorError(f"the kernel of {what}: {_RUNNER[0].flm_message().decode()}", target=EmulatorTarget.name)
    return code


def instrumented(disk: DiskCache) -> Toolchain:
    """The compiler, with the flags that the emulator's kernels need."""
    plain = find_toolchain(config.compiler, disk)
    runner(plain, disk)
    return replace(plain, flags=FLAGS, libraries=(), version=f"{plain.version} {contents()}")


def runner(toolchain: Toolchain, disk: DiskCache) -> ctypes.CDLL:
    """The library that the emulator's kernels call, loaded so that all of them find its symbols."""
    if not _RUNNER:
        def load(path: Path) -> ctypes.CDLL:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            library.flm_message.restype = ctypes.c_char_p
            return library

        found = Extension("metal_runner", (FOLDER / "runner.cpp").read_text(), toolchain, disk, load)
        _RUNNER.append(found.stored() or found.build())
    return _RUNNER[0]


@cache
def contents() -> str:
    """A hash of the emulator's headers, for the keys of kernels."""
    parts = [path.read_bytes() for path in sorted(INCLUDE.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
