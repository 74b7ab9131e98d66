"""CPU machine code of packages: the kernels as one shared object, and the runtime that loads it.

Neither needs OpenMP, libtorch or Python: kernels use threads through a table of functions that the runtime passes.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from flambeau.codegen.source import LIBRARY, KernelSource
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.ir.program import AnyKernel
from flambeau.targets.base import KeyedSource, Source, get_target
from flambeau.targets.cache import DiskCache, shared_cache
from flambeau.targets.cpu.target import kernel_key, unit_text
from flambeau.targets.toolchain import Toolchain, find_toolchain, whole_text

RELATIVE = (8, 1027)  # R_X86_64_RELATIVE, R_AARCH64_RELATIVE
RUNTIME = Path(__file__).parent / "runtime"
FILES = ("checksums.c", "threads.c", "machine.c", "read.c", "run.c", "weights.c", "device.c")
# Equal sources link to equal bytes, without anything that the loader does not need.
_LINK = ("-Wl,--as-needed,--build-id=none,--hash-style=gnu,-O1,--gc-sections,-z,noseparate-code", "-s")
_SMALL = ("-fvisibility=hidden", "-ffunction-sections", "-fno-asynchronous-unwind-tables")
# Instruction sets that a compiler announces in its macros and that the runtime can detect (machine.c).
FEATURES = ("sse3", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "avx2", "fma", "bmi", "bmi2", "avx512f", "avx512cd",
            "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512vnni", "avx512vbmi2", "avx512bitalg",
            "avx512vpopcntdq", "avx512ifma")


def toolchain_of(target: str) -> tuple[Toolchain, DiskCache]:
    """The compiler with the flags of a target, and its cache: "cpu" is this machine, "cpu:x86-64-v3" any such CPU."""
    march = target.partition(":")[2]
    disk = shared_cache(config.cache_dir, config.cache_limit_mb)
    found = find_toolchain(config.compiler, disk)
    if march:
        flags = [f for f in found.flags if not f.startswith("-march=")]
        found = replace(found, flags=(*flags, f"-march={march}"))
    return found, disk


def features(toolchain: Toolchain) -> str:
    """The architecture and instruction sets that a CPU needs to run this compiler's code, separated by spaces."""
    march = [f for f in toolchain.flags if f.startswith("-march=")]
    said = subprocess.run([toolchain.compiler, *march, "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True,
                          text=True, check=False)
    if said.returncode:
        raise CompileError(f"{toolchain.compiler} does not take {' '.join(march)}: {said.stderr.strip()}", target="cpu")
    there = {name.lower() for name in re.findall(r"#define __(\w+?)__ 1", said.stdout)}
    return " ".join((platform.machine(), *(f for f in FEATURES if f in there)))


def built(text: str, toolchain: Toolchain, disk: DiskCache) -> bytes:
    """Compiles a source text to a shared object, or takes it from the cache on disk."""
    key = hashlib.sha256("\0".join(("package", text, *toolchain.flags, toolchain.identity())).encode()).hexdigest()
    if (kept := disk.read(key, ".so")) is not None:
        return kept
    # The file is named after its content, because the compiler writes the name into its output.
    _, data = toolchain.compile(text, "package", disk, lambda path: None, LIBRARY)
    disk.put(key, data, ".so")
    return data


class CpuCode:
    """The kernels of all methods for one CPU target, without duplicates."""

    is_device = False

    def __init__(self, name: str) -> None:
        self.name, self.target = name, get_target("cpu-alone")
        self.toolchain, self.disk = toolchain_of(name)
        self.features = features(self.toolchain)
        self.found: dict[str, tuple[KeyedSource[KernelSource], int, int, int]] = {}
        self.kernels: dict[Any, tuple[str, str]] = {}  # operators and dtypes of each entry

    def add(self, kernel: AnyKernel, source: Source) -> int:
        """Adds a kernel, unless it is there already, and returns its position in the code's table."""
        assert isinstance(source, KernelSource)
        one = KeyedSource(source, kernel_key(source, self.toolchain.identity()))
        row = (one, len(kernel.params), len(kernel.sizes), len(self.found))
        return self.found.setdefault(one.key, row)[3]

    @cached_property
    def code(self) -> bytes:
        """The content of the package's section: a shared object."""
        kernels = [one for one, *_ in self.found.values()]
        rows = ", ".join(f"{{{one.symbol}, {pointers}, {sizes}}}" for one, pointers, sizes, _ in self.found.values())
        declared = "".join(f"int64_t {one.symbol}(void**, const int64_t*);\n" for one in kernels)
        shim = whole_text(RUNTIME / "kernels.cpp")
        text = (f'{unit_text(kernels)}\n{shim}\nextern "C" {{\n{declared}'
                f"static const flam_kernel rows[] = {{{rows or '{nullptr, 0, 0}'}}};\n"
                f"const flam_code flam_table = {{{len(kernels)}, rows}};\n}}\n")
        # Kernels throw nothing. Exception tables would be the only reason to link the C++ library.
        flags = (*self.toolchain.flags, *_SMALL, "-fno-exceptions", "-nostartfiles", *_LINK)
        libraries = tuple(x for x in self.toolchain.libraries if x.startswith("-l"))
        return built(text, replace(self.toolchain, flags=flags, libraries=libraries), self.disk)

    def kernel_bytes(self, entry: Any) -> int:
        """The size of a kernel's machine code, measured up to the start of the next kernel."""
        starts, end = kernel_places(self.code)
        if entry >= len(starts):
            return 0
        return min([s for s in starts if s > starts[entry]] + [end]) - starts[entry]


def kernel_places(library: bytes) -> tuple[list[int], int]:
    """The addresses of the kernels in a shared object (ELF), in the order of its table, and the end of its executable
    code. The addresses are found in the relocations: no other ones point into executable code."""
    first, size, count = struct.unpack_from("<Q", library, 32)[0], *struct.unpack_from("<HH", library, 54)
    segments = [struct.unpack_from("<IIQQQQQ", library, first + k * size) for k in range(count)]
    loaded = [(s[3], s[3] + s[5], s[2] - s[3], s[1] & 1) for s in segments if s[0] == 1]
    dynamic = next((library[s[2]: s[2] + s[5]] for s in segments if s[0] == 2), b"")
    tags = dict(struct.iter_unpack("<QQ", dynamic))
    table, length = tags.get(7, 0), tags.get(8, 0)
    moved = next((by for begin, end, by, _ in loaded if begin <= table < end), 0)
    relocations = struct.iter_unpack("<QQq", library[table + moved: table + moved + length])
    found = [to for _, to in sorted((where, to) for where, kind, to in relocations if kind & 0xFFFFFFFF in RELATIVE)]
    code = [(begin, end) for begin, end, _, runs in loaded if runs]
    kernels = [to for to in found if any(begin <= to < end for begin, end in code)]
    return kernels, max((end for _, end in code), default=0)


def runtime_text() -> str:
    return "".join(whole_text(RUNTIME / name) for name in FILES)


def build_runtime(target: str = "cpu", flags: Sequence[str] = ()) -> bytes:
    """The runtime as a shared library, for any CPU of the architecture."""
    toolchain, disk = toolchain_of(target)
    own = ("-x", "c", "-std=c11", "-Os", "-fPIC", "-shared", "-pthread", "-ftls-model=initial-exec", *_SMALL, *_LINK,
           *flags)
    return built(runtime_text(), replace(toolchain, flags=own, libraries=()), disk)


def build_device_runtime(kind: str) -> bytes:
    """The runtime's additional shared library for a kind of device."""
    toolchain, disk = toolchain_of("cpu")
    own = ("-x", "c", "-std=c11", "-Os", "-fPIC", "-shared", "-pthread", *_SMALL, *_LINK)
    return built(whole_text(RUNTIME / f"flambeau_{kind}.c"), replace(toolchain, flags=own, libraries=()), disk)


@cache
def _hasher() -> Any:
    from .client import runtime_library  # the runtime that also loads packages

    library = runtime_library(build_runtime())
    return library.flam_hash


def quick_checksum(data: bytes | memoryview) -> int:
    view = memoryview(data)
    if not len(view):
        return int(_hasher()(None, 0))
    kept = view if not view.readonly else bytearray(view)
    return int(_hasher()((ctypes.c_char * len(view)).from_buffer(kept), len(view)))
