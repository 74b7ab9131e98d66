"""The C++ compiler of this machine: finds it, tests which flags it supports, and runs it.

The result of a probe is kept in the cache on disk under the identity of the compiler's file, so that a process that
finds all its kernels there starts no compiler at all, not even to ask for its version.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.targets.background import Closing, OutOfTime, run
from flambeau.targets.cache import DiskCache

T = TypeVar("T")
log = logging.getLogger(__name__)

# Without errno and floating-point traps, loops with sqrt or a choice become vectors; no result changes.
_MATH = ("-fno-math-errno", "-fno-trapping-math")
# Integers wrap around, as in eager.
_WRAP = ("-fwrapv",)
# a*b+c has two roundings, as in eager; where one is wanted, the kernel says fma.
_REQUIRED = ("-std=c++17", "-O3", "-fPIC", "-shared", *_MATH, *_WRAP, "-ffp-contract=off")


@dataclass(frozen=True)
class _Option:
    """Flags that kernels can do without; `loss` tells the user what is lost without them."""

    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    loss: str | None = None


def _options() -> dict[str, _Option]:
    return {
        "native": _Option(flags=("-march=native",)),
        # A select that decides the next comparison becomes two paths with a comparison each, and a loop with such paths
        # stays scalar (the positions of maxima: 6x slower).
        "paths": _Option(flags=("-fno-thread-jumps",)),
        # Jamming two outer steps into one vector loop turns contiguous reads into gathers (embedding bags: 4x slower).
        "jam": _Option(flags=("-fno-loop-unroll-and-jam",)),
        # g++ makes pow(x, 0.5) in a vector loop a root, which differs for minus zero and minus infinity.
        "powers": _Option(flags=("-fno-builtin-pow", "-fno-builtin-powf")),
        # The library's AVX-512 functions of doubles start by filling mask register 1, and processors wait for its old
        # value. If that is computed from the last result, vectors follow one another (a Huber loss: 2.3x slower).
        "mask": _Option(flags=("-ffixed-k1",)),
        "openmp": _Option(
            flags=("-fopenmp",), libraries=_openmp_libraries(),
            loss="has no OpenMP: kernels run on one thread. Install the compiler's OpenMP runtime (libgomp)"),
        # Vector loops even without OpenMP.
        "simd": _Option(flags=("-fopenmp-simd",)),
        # The vector forms of sin and similar functions, where the C library has them.
        "mvec": _Option(libraries=("-lmvec",)),
    }


# Messages of compiler, linker and loader that are the disk's fault, not the text's.
_DISK_SYMPTOMS = {
    "No space left on device": "no space left",
    "failed to map segment from shared object": "mounted noexec",
}

# It declares the functions it calls: parsing <cmath> takes longer than everything else.
_PROBE = """
#include <stdint.h>
extern "C" double exp(double) noexcept;
extern "C" double flambeau_probe(const double* x, int64_t n) {
  double sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp(x[i]);
  return sum;
}
"""


@dataclass(frozen=True)
class Toolchain:
    """A working compiler, with the flags it takes."""

    compiler: str
    version: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    losses: tuple[str, ...]
    seconds: int = 600  # the time limit of a compilation

    def identity(self) -> str:
        """Returns everything besides the text that decides the machine code, and where it may run."""
        return "\n".join((self.version, *self.flags, *self.libraries, cpu_identity()))

    def compile(self, text: str, name: str, disk: DiskCache, load: Callable[[Path], T], include: Path | None = None
                ) -> tuple[T, bytes]:
        """Returns the result of `load` for the shared library built from C++ text, and the library's bytes.

        It is loaded before it is stored, so that nothing that does not load gets into the cache. Raises CompileError
        with the compiler's output, or what `load` raises.
        """
        while True:
            with disk.workspace() as folder:
                try:
                    library = self._compile(text, folder / f"{name}.so", include)
                    return load(library), library.read_bytes()
                except (CompileError, OSError) as error:
                    reasons = [reason for symptom, reason in _DISK_SYMPTOMS.items() if symptom in str(error)]
                    if not reasons or not disk.give_up(folder, reasons[0]):
                        raise

    def _compile(self, text: str, library: Path, include: Path | None) -> Path:
        source = library.with_suffix(".cpp")
        source.write_text(text)
        folders = [f"-I{include}"] if include else []
        command = [self.compiler, *self.flags, *folders, str(source), "-o", str(library), *self.libraries]
        result = _run(command, library.parent, self.seconds)
        if result.returncode < 0:
            raise CompilerKilled(f"{self.compiler} was ended by {signal.Signals(-result.returncode).name}")
        if result.returncode:
            raise CompileError(result.stdout.strip().replace(str(source), library.stem), target="cpu")
        return library


class CompilerKilled(CompileError):
    """The compiler was killed from outside, or for taking too long: compiling parts of the text would not help."""


_FINAL = (CompilerKilled, Closing)


def find_toolchain(setting: str, disk: DiskCache) -> Toolchain:
    """Returns the compiler that `setting` names, probed unless this process or an earlier one has done so."""
    found = shutil.which(setting)
    if found is None:
        raise CompileError(f"the C++ compiler {setting!r} was not found", target="cpu",
                           hint="install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
                           "conda: conda install gxx), or name another in FLAMBEAU_CXX")
    status = os.stat(found)
    compiler = os.path.abspath(found)
    seconds = config.compile_timeout
    identity = f"{os.path.realpath(found)} {status.st_size} {status.st_mtime_ns}"
    return replace(_toolchain(compiler, identity, disk, seconds), seconds=seconds)


@cache
def cpu_identity() -> str:
    """Returns what `-march=native` depends on: its code must not be loaded on a machine with other instructions."""
    x86 = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    arm = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
    rows = [[part.strip() for part in line.split(":", 1)] for line in text.splitlines() if ":" in line]
    told = dict.fromkeys(f"{key}: {value}" for key, value in rows if key in x86 + arm)  # cores may differ
    if told:
        return "\n".join(told)
    uname = os.uname()  # other architectures name other things: such a machine shares its kernels with no other
    return f"{uname.machine} {uname.nodename}"


@cache
def _toolchain(compiler: str, file_identity: str, disk: DiskCache, seconds: int) -> Toolchain:
    asked = repr((compiler, file_identity, _REQUIRED, _options(), _PROBE, cpu_identity()))
    key = hashlib.sha256(asked.encode()).hexdigest()
    toolchain = _stored(compiler, disk.read(key, ".probe"))
    if toolchain is None:
        toolchain = _probe(compiler, disk, seconds)
        fields = (toolchain.version, toolchain.flags, toolchain.libraries, toolchain.losses)
        disk.put(key, json.dumps(fields).encode(), ".probe")
    for loss in toolchain.losses:
        warnings.warn(f"the C++ compiler {compiler} {loss}.", stacklevel=4)
    return toolchain


def _stored(compiler: str, data: bytes | None) -> Toolchain | None:
    """Returns the probe result of an earlier process; None if the entry is malformed."""
    try:
        version, *lists = json.loads(data or b"")
    except ValueError:
        return None
    if len(lists) != 3 or not all(isinstance(x, str) for some in ([version], *lists) for x in some):
        return None
    flags, libraries, losses = map(tuple, lists)
    return Toolchain(compiler, version, flags, libraries, losses)


def _probe(compiler: str, disk: DiskCache, seconds: int) -> Toolchain:
    options = _options()
    with disk.workspace() as folder:
        version = _run([compiler, "--version"], folder, seconds).stdout

    def attempt(names: Sequence[str]) -> Toolchain:
        chosen = [options[name] for name in names]
        toolchain = Toolchain(
            compiler, version, flags=(*_REQUIRED, *(flag for option in chosen for flag in option.flags)),
            libraries=(*(library for option in chosen for library in option.libraries), "-lm"),
            losses=tuple(option.loss for option in options.values() if option not in chosen and option.loss),
            seconds=seconds)
        toolchain.compile(_PROBE, "-".join(("probe", *names)), disk, lambda path: ctypes.CDLL(str(path)))
        return toolchain

    def works(names: Sequence[str]) -> bool:
        try:
            attempt(names)
        except _FINAL:  # the next attempt would end in the same way
            raise
        except (CompileError, OSError):
            return False
        return True

    try:
        return attempt(list(options))
    except _FINAL:
        raise
    except (CompileError, OSError):
        usable = [name for name in options if works([name])]
    try:
        return attempt(usable)
    except (CompileError, OSError) as error:
        raise CompileError(f"the C++ compiler {compiler} does not work: {error}", target="cpu",
                           hint="`flambeau doctor` tells more; FLAMBEAU_CXX names another compiler") from error


def _run(command: list[str], folder: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    # In the C locale messages can be recognised. The compiler's own temporary files go to the folder of the build, so
    # that none remain even if the compiler is killed.
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    try:
        return run(command, environment, seconds)
    except OutOfTime as error:
        raise CompilerKilled(error.message, target="cpu", hint=error.hint) from error
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}", target="cpu") from error


def _openmp_libraries() -> tuple[str, ...]:
    """Returns linker flags for the OpenMP runtime inside the torch wheel, if it has a name of its own.

    Two runtimes in one process would be two pools of threads that compete for cores, and torch.set_num_threads would
    reach only one of them. A runtime with the usual name is shared without help: the loader takes the one that is
    already loaded.
    """
    torch = find_spec("torch")  # torch is not imported: only the name of a file is needed
    if torch is None or torch.origin is None:
        return ()
    folder = Path(torch.origin).parent
    found = [*folder.glob("lib/libgomp-*.so*"), *folder.parent.glob("torch.libs/libgomp-*.so*")]
    return (f"-Wl,--as-needed,{found[0]}",) if found else ()


def whole_text(path: Path) -> str:
    """Returns a text with its included files from the same folder, so that one hash is enough."""
    return re.sub(r'^#include "([^"]+)"$', lambda found: whole_text(path.parent / found[1]), path.read_text(),
                  flags=re.MULTILINE)


def python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


@dataclass(frozen=True)
class Extension:
    """C++ code that is compiled once, and kept on disk under everything it depends on. `more`: dependencies that are
    not in the text.

    It is a Python module, or the result of `load` for the library.
    """

    name: str
    text: str
    toolchain: Toolchain
    disk: DiskCache
    load: Callable[[Path], Any] | None = None
    more: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        parts = (self.text, self.toolchain.identity(), *self.more, sys.version, str(sysconfig.get_config_var("SOABI")))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def stored(self) -> Any:
        """Returns what an earlier process compiled; None if there is nothing that loads."""
        path = self.disk.get(self.key, ".so")
        try:
            return None if path is None else self._loaded(path)
        except (ImportError, OSError) as error:  # deleted by another process just now, or on a disk mounted noexec
            log.info("the cached %s does not load, and is built again: %s", self.name, error)
            return None

    def build(self) -> Any:
        """Compiles it. Raises CompileError, ImportError or OSError if that does not work."""
        made, data = self.toolchain.compile(self.text, self.name, self.disk, self._loaded, python_headers())
        self.disk.put(self.key, data, ".so")
        return made

    def _loaded(self, path: Path) -> Any:
        return load_extension(self.name, path) if self.load is None else self.load(path)


def load_extension(name: str, path: Path) -> ModuleType:
    """Loads a library as a Python module of this name. Raises ImportError if it is none."""
    loader = ExtensionFileLoader(name, str(path))
    module = module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    loader.exec_module(module)
    return module
