"""Device code of packages: machine code of Triton kernels, or OpenCL sources that a driver compiles.

A kernel becomes a `DeviceKernel`: the functions to launch, the condition for each choice of them, and their numbers of
groups, all as Python expressions over the kernel's sizes. `plan.py` translates the expressions for the runtime. The
code itself is a section of words and modules (docs/reference/package-format.md).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flambeau.codegen.source import BlockSource, RangeSource
from flambeau.errors import CompileError, Error, OptionError
from flambeau.ir.program import AnyKernel
from flambeau.targets.base import KeyedSource, Source, Target, get_target
from flambeau.targets.cuda.target import checks_data
from flambeau.targets.cuda.triton_compile import Code, Facts, TritonCompiler
from flambeau.targets.metal.library import whole
from flambeau.targets.opencl.compile import unit_text

from .container import ALIGN, packed, text_words


@dataclass(frozen=True)
class Choice:
    """Functions to launch one after the other if `condition` is not zero (always, if it is empty)."""

    condition: str
    parts: tuple[tuple[int, tuple[str, str, str]], ...]  # (function, numbers of groups in three dimensions)


@dataclass(frozen=True)
class DeviceKernel:
    itemsizes: tuple[int, ...]
    checks: bool
    choices: tuple[Choice, ...]
    workspace: str = ""  # bytes


@dataclass
class Function:
    """A function of the device code: its module and name, and the parameters of its launch."""

    name: str
    threads: int
    module: int = 0
    shared: int = 0
    scratch: int = 0


@dataclass
class DeviceCode(ABC):
    """The kernels of all methods for one target, without duplicates. `target` lowers graphs and renders sources."""

    name: str
    target: Target
    functions: list[Function] = field(default_factory=list)
    known: dict[Any, Any] = field(default_factory=dict)
    kernels: dict[Any, tuple[str, str]] = field(default_factory=dict)  # operators and dtypes of each entry
    is_device = True

    @property
    @abstractmethod
    def features(self) -> str:
        """The kind of device and the features that it must have, separated by spaces."""

    @abstractmethod
    def add(self, kernel: AnyKernel, source: Source) -> DeviceKernel: ...

    @abstractmethod
    def modules(self) -> list[tuple[str, bytes]]:
        """Pairs of a device (empty: any) and a module's content. Called after all kernels were added."""

    @cached_property
    def code(self) -> bytes:
        """The content of the package's section."""
        modules = self.modules()
        words: list[int] = [len(modules)]
        # The tables come before the modules, so the modules' offsets are filled in once the tables' length is known.
        holes = []
        for of, data in modules:
            words += text_words(of)
            holes.append(len(words))
            words += [0, len(data)]
        words.append(len(self.functions))
        for f in self.functions:
            words += [f.module, *text_words(f.name), f.threads, f.shared, f.scratch]
        at = 8 * (1 + len(words))
        body = b""
        for hole, (_, data) in zip(holes, modules, strict=True):
            begin = -(-at // ALIGN) * ALIGN
            words[hole] = begin
            body += bytes(begin - at) + data
            at = begin + len(data)
        return packed([len(words), *words]) + body

    def kernel_bytes(self, entry: Any) -> int:
        """The total size of the modules that a kernel's functions are in."""
        sizes = [len(data) for _, data in self.modules()]
        return sum(sizes[self.functions[f].module] for c in entry.choices for f, _ in c.parts)


# ---- NVIDIA ----------------------------------------------------------------------------------------------------------


class CudaCode(DeviceCode):
    """"cuda:sm_90": Triton kernels compiled for that GPU and later ones of its generation. Exporting needs no GPU."""

    def __init__(self, name: str) -> None:
        super().__init__(name, get_target("cuda-alone"))
        arch = name.partition(":")[2].removeprefix("sm_")
        if not arch.isdigit() or int(arch) < 80:
            raise OptionError(f"{name!r} is no target", hint='NVIDIA GPUs go by their generation: "cuda:sm_90"')
        self.arch = int(arch)
        self.compiler = TritonCompiler()
        self.codes: list[Future[Code | CompileError]] = []

    @property
    def features(self) -> str:
        return f"cuda sm_{self.arch}"

    def add(self, kernel: AnyKernel, source: Source) -> DeviceKernel:
        assert isinstance(source, BlockSource)
        # The facts that a kernel may rely on are tested at each call, as they are outside of packages. But addresses
        # are always multiples of 16 here, because the runtime copies tensors that are not aligned.
        usual = [k for k in range(len(source.sizes)) if source.usual >> k & 1]
        narrow = source.narrow
        even = " and ".join([f"n{k} % 16 < 1" for k in usual] + [narrow] * bool(narrow))
        facts = [(even, Facts(True, source.usual, False))] if usual else []
        facts.append((narrow, Facts(True, 0, False)))
        facts += [("", Facts(True, 0, True))] if narrow else []
        choices = tuple(Choice(condition, tuple((self.function(source, k, fact), groups(part.grid))
                                                for k, part in enumerate(source.parts))) for condition, fact in facts)
        itemsizes = tuple(p.dtype.itemsize for p in kernel.params)
        return DeviceKernel(itemsizes, checks_data(source), choices, source.workspace)

    def function(self, source: BlockSource, part: int, facts: Facts) -> int:
        one = self.compiler.compile(source, source.parts[part], facts, self.arch)
        if id(one) not in self.known:
            self.known[id(one)] = len(self.codes)
            self.codes.append(one)
            self.functions.append(Function("", 0))
        found: int = self.known[id(one)]
        return found

    def modules(self) -> list[tuple[str, bytes]]:
        out: dict[bytes, int] = {}
        for function, future in zip(self.functions, self.codes, strict=True):
            made = future.result()
            if isinstance(made, CompileError):
                raise made
            function.name, function.threads, function.shared, function.scratch = (
                made.name, 32 * made.warps, made.shared, made.scratch)
            function.module = out.setdefault(made.code, len(out))
        return [("", data) for data in out]


def groups(grid: str) -> tuple[str, str, str]:
    """The numbers of groups of a launch in three dimensions, as expressions."""
    given = [x.strip() for x in grid.split(",")] if grid.count("(") == 0 else [grid]
    x, y, z, *_ = [*given, "1", "1"]
    return x, y, z


# ---- texts -----------------------------------------------------------------------------------------------------------


class TextCode(DeviceCode):
    """Kernels in a C language as one source text, which the device's driver compiles when the package is loaded."""

    language: str

    def add(self, kernel: AnyKernel, source: Source) -> DeviceKernel:
        assert isinstance(source, RangeSource)
        key = hashlib.sha256("\0".join((source.text, *source.headers)).encode()).hexdigest()
        if key not in self.known:
            one = KeyedSource(source, key)
            first = len(self.functions)
            self.functions += [Function(r.function.replace("KERNEL_NAME", one.symbol), r.group) for r in source.ranges]
            self.known[key] = (one, first)
        first = self.known[key][1]
        parts = tuple((first + k, (f"({r.items} + {r.group - 1}) // {r.group}", "1", "1"))
                      for k, r in enumerate(source.ranges))
        return DeviceKernel(source.itemsizes, source.checks, (Choice("", parts),))

    @property
    def sources(self) -> list[KeyedSource[RangeSource]]:
        return [one for one, _ in self.known.values()]

    def kernel_bytes(self, entry: Any) -> int:
        first = entry.choices[0].parts[0][0]
        return next(len(one.text) for one, begin in self.known.values() if begin == first)


class OpenClCode(TextCode):
    """"opencl" (any GPU), "opencl:cpu" (any CPU) and "opencl:here": the device of this machine, for which the package
    holds the binary of its driver in addition to the source."""

    def __init__(self, name: str) -> None:
        from flambeau.targets.opencl.portable import CPUS, GPUS, PortableOpenCl

        kind = name.partition(":")[2]
        if kind not in ("", "gpu", "cpu", "here"):
            raise OptionError(f"{name!r} is no target", hint='there are "opencl", "opencl:cpu" and "opencl:here"')
        self.here = kind == "here"
        super().__init__(name, get_target("opencl") if self.here else PortableOpenCl(CPUS if kind == "cpu" else GPUS))
        self.needs: set[str] = set()  # extensions

    @property
    def device(self) -> Any:
        return self.target.device  # type: ignore[attr-defined]

    @property
    def features(self) -> str:
        return " ".join(["opencl", "cpu" if self.device.threads else "gpu", *sorted(self.needs)])

    def add(self, kernel: AnyKernel, source: Source) -> DeviceKernel:
        from flambeau.codegen.simt.kernel import dtypes_of

        assert isinstance(source, RangeSource)
        if torch.float64 in dtypes_of(kernel) or len(source.headers) > 1:  # type: ignore[arg-type]
            self.needs.add("cl_khr_fp64")
        if "atom_cmpxchg" in source.text:
            self.needs.add("cl_khr_int64_base_atomics")
        return super().add(kernel, source)

    @cached_property
    def built(self) -> list[tuple[str, bytes]]:
        if not self.here or not self.known:
            return []
        import pyopencl

        device = self.device
        try:
            program = pyopencl.Program(device.context, unit_text(self.sources)).build(
                list(device.options), cache_dir=False)  # type: ignore[arg-type]
            binary: bytes = program.get_info(pyopencl.program_info.BINARIES)[0]
        except pyopencl.Error as error:
            raise Error(f"the driver does not compile the kernels: {error}", target=self.name) from error
        return [(identity(device), binary)]

    def modules(self) -> list[tuple[str, bytes]]:
        return [("", unit_text(self.sources).encode()), *self.built]


def identity(device: Any) -> str:
    """The identity of a device and its driver, built in the same way as in flambeau_opencl.c."""
    d = device.device
    given = (d.name, d.version, d.driver_version)
    return "|".join([d.platform.name, *(x.rstrip(" ") for x in given), " ".join(device.options)])


class MetalCode(TextCode):
    """"metal": one source text for every Apple GPU, checked as far as is possible without one."""

    def __init__(self, name: str) -> None:
        super().__init__(name, get_target("metal"))

    @property
    def features(self) -> str:
        return "metal"

    def modules(self) -> list[tuple[str, bytes]]:
        return [("", whole([one.text for one in self.sources]).encode())]


CODES: dict[str, Callable[[str], DeviceCode]] = {"cuda": CudaCode, "opencl": OpenClCode, "metal": MetalCode}
