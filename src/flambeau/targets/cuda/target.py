"""The target for NVIDIA GPUs: Triton kernels, compiled in worker processes, launched by the CUDA driver.

Each kernel exists in variants that differ in their assumptions about arguments (`Facts`); every call checks which
variant it may use. The variant for the captured sizes and aligned pointers is compiled in the background, the others
when a call needs them.

Launches are asynchronous, and so are errors: a kernel that finds a fault in its data (an index out of range) writes it
to host memory. The next launch on any device reads it there without waiting, and raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from flambeau.codegen.source import FLAGS, BlockSource
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.ir.dtypes import FP8
from flambeau.ir.tuning import BLOCKS
from flambeau.torch_compat import cuda as torch_cuda
from flambeau.torch_compat import memory as torch_memory

from ..background import Pool
from ..base import Allocator, Build, Convolution, Launch, Plan, Recorder, Run, Source, Step, Target
from ..cache import DiskCache, shared_cache
from ..launch import extension
from ..search import OpenPlan, is_open, offered
from ..toolchain import find_toolchain
from . import libdevice
from .triton_compile import Code, Facts, TritonCompiler

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel

_EXTENSION = "cuda_launcher"
_DRIVER = "libcuda.so.1"
_TIMED = 4  # launches timed together: a single one is hardly longer than the clock's resolution
_SHORT, _TIMED_SHORT = 2e-5, 16  # a launch shorter than so many seconds is timed in batches of so many
_BUSY = 1 << 28  # bytes to write before that, once or more
_BUSY_S = 5e-5  # seconds that this takes at least
_MOST_BUSY = 40  # at most so many writes: a host that takes longer has waited for something else
_GRANULE = 1 << 20  # bytes; workspaces grow in steps of at least this size

# compute capability from which on GPUs have a copy engine for tensors, and kernels that wait for earlier ones
_COPIES = 90
_SMALL_FLOATS = 89  # compute capability from which on GPUs multiply 8-bit floats
_RARE = 50  # calls for each convolution of a graph, beyond which its layout is not worth examining

_Codes = tuple["Future[Code | CompileError]", ...]


def multiplies_fast(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16) or (dtype is torch.float32 and torch.backends.cudnn.allow_tf32)


class BlockTarget(Target):
    """A target whose kernels are written in Triton."""

    names_kernels = True

    def render(self, kernel: AnyKernel, name: str) -> BlockSource:
        from flambeau.codegen.triton.kernel import render

        return render(kernel, name)

    def variants(self, kernel: AnyKernel, source: Source) -> Source:
        from flambeau.codegen.triton.block_variants import variants

        assert isinstance(source, BlockSource)
        return variants(kernel, source)


class CudaTarget(BlockTarget):
    """The CUDA target. `arch` and `driver` are those of the machine, unless a test says otherwise."""

    name = "cuda"
    times = True
    # A launch of our kernel takes the host some microseconds more than one of torch's: sizes from which on the kernels
    # themselves take longer than that.
    wins: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("cumulative", "max pooling", "average pooling", "adaptive pooling", "unpooling", "resizing",
                         "grid sampling", "volume sampling", "writes by row", "writes by element"), 1 << 18),
        **dict.fromkeys(("softmax", "layer norm", "dropout", "draws", "statistics", "extrema"), 1 << 20),
        # of indices, each of which is a row
        **dict.fromkeys(("embedding gradient", "embedding bags", "embedding bag gradients"), 1 << 12),
    }

    def __init__(self, arch: int | None = None, driver: str = _DRIVER) -> None:
        self._arch = arch
        self._driver = driver
        self._compiler = TritonCompiler()
        self._extension: Future[ModuleType] | None = None
        self._open: ModuleType | None = None
        self._lock = threading.Lock()
        self._workspaces: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._flags: dict[tuple[int, int], torch.Tensor] = {}
        self._functions: dict[tuple[int, str, bytes], int] = {}

    # ---- what it is ------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        from flambeau.codegen.triton.dialect import CAPABILITIES

        known = self._arch or torch.cuda.is_available()  # packages are made on any machine
        arch = self.arch(0 if self._arch else self.current_device()) if known else _COPIES
        rounded = {"product": torch.backends.cuda.matmul.fp32_precision == "tf32",
                   "convolution": torch.backends.cudnn.allow_tf32}
        return replace(CAPABILITIES, name=self.name, gpu_eager=True, inexact=libdevice.inexact(),
                       dtypes=CAPABILITIES.dtypes if arch >= _SMALL_FLOATS else CAPABILITIES.dtypes - FP8,
                       tf32=frozenset(kind for kind, is_rounded in rounded.items() if is_rounded),
                       arena_most=1 << 20)  # torch's allocator caches memory, and has small blocks up to that size

    def identity(self) -> str:
        return f"{self.name} {self.arch(self.current_device())}"

    def arch(self, device: int) -> int:
        """The compute capability times ten."""
        return self._arch or _capability(device)

    def processors(self, device: int) -> int:
        return BLOCKS.processors if self._arch else _processors(device)

    def channels_last(self, convolutions: Sequence[Convolution], calls: int) -> Mapping[Convolution, float]:
        """Chooses channels-last for all plain image convolutions of a graph, or for none: cuDNN's fast units need that
        order, and cuDNN would reorder other inputs itself, and back."""
        images = [c for c in convolutions if c.name == "conv2d"]
        few = self.capabilities().tuning.convolved_channels
        if calls > _RARE * len(images) or not all(multiplies_fast(c.dtype) and c.groups == 1 for c in images):
            return {}
        return {c: 0 if c.is_product or max(c.channels) <= few else c.moved for c in images}

    @cached_property
    def current_device(self) -> Callable[[], int]:
        torch.cuda.init()
        device: Callable[[], int] = torch_cuda.get_device
        return device

    @cached_property
    def current_stream(self) -> Callable[[int], int]:
        """Returns the address of a device's current stream."""
        stream: Callable[[int], int] = torch_cuda.current_raw_stream
        return stream

    # ---- kernels ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self._compiler.prepare()
        self._prepare_extension()

    def build(self, sources: Sequence[Source]) -> Build:
        self._prepare_extension()
        device = self.current_device()
        kernels: dict[str, CudaKernel] = {}
        codes: dict[str, _Codes] = {}
        for source in sources:
            assert isinstance(source, BlockSource)
            kernels[source.name] = CudaKernel(self, source)
            codes[source.name] = kernels[source.name].start(device, True, source.usual, False)

        def made(name: str) -> Launch:
            kernels[name].loaded(codes[name], device)  # a kernel that does not load fails now, not at the first call
            return offered(kernels[name].source, kernels[name].launch())

        return Build(codes, made)

    def plan(self, steps: Sequence[Step]) -> Plan:
        plan: Plan = OpenPlan(self, steps) if is_open(steps) else self.launcher().Plan(steps)
        return plan

    def codes(self, source: BlockSource, facts: Facts, device: int) -> _Codes:
        """Starts to compile every part; returns the futures of their machine code."""
        arch = self.arch(device)
        return tuple(self._compiler.compile(source, part, facts, arch, arch >= _COPIES) for part in source.parts)

    def function(self, code: Code, device: int) -> int:
        """Loads machine code into a device, once; returns the function."""
        key = (device, code.name, code.code)
        if key not in self._functions:
            try:
                self._functions[key] = self.launcher().load(code.code, code.name, code.shared, device)
            except RuntimeError as error:
                raise CompileError(f"the kernel {code.name} does not load: {error}", target=self.name) from error
        return self._functions[key]

    # ---- memory and devices ----------------------------------------------------------------------------

    def allocator(self, device: torch.device) -> Allocator:
        # Allocates on the current device, in half the time of torch.empty_strided, which parses keywords.
        allocate: Allocator = torch_memory.empty_strided_cuda
        return allocate

    def queue(self) -> Hashable | None:
        # A captured graph runs again at any time: no other kernel may use its memory.
        if torch_cuda.is_current_stream_capturing():
            return None
        device = self.current_device()
        return device, self.current_stream(device)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.cuda.device(device)

    def guarded(self, run: Run, device: torch.device) -> Run:
        exchange, back = torch_cuda.exchange_device, torch_cuda.maybe_exchange_device
        index = device.index or 0

        def run_on_device(args: list[Any]) -> list[Any]:
            before = exchange(index)
            try:
                return run(args)
            finally:
                back(before)

        return run_on_device

    @cached_property
    def _recorder(self) -> Recorder:
        from .recorder import CudaRecorder

        return CudaRecorder(self)

    def recorder(self) -> Recorder:
        return self._recorder

    def flags(self, device: int, stream: int) -> int:
        """Returns flag words for the kernels of one stream. These run one after the other, and each finds and leaves
        zeros."""
        if (device, stream) not in self._flags:
            self._flags[device, stream] = torch.zeros(FLAGS, dtype=torch.int32, device=self.empty(
                1, torch.device("cuda")).device)
        return self._flags[device, stream].data_ptr()

    def workspace(self, device: int, stream: int, nbytes: int) -> int:
        """Returns memory for the kernels of one stream, which run one after the other.

        Outgrown memory is kept, since a captured graph may still write to it. The size doubles, so that it is not
        outgrown often.
        """
        pieces = self._workspaces.setdefault((device, stream), [])
        if not pieces or pieces[-1].numel() < nbytes:
            grown = 2 * pieces[-1].numel() if pieces else _GRANULE
            pieces.append(self.empty(max(nbytes, grown), torch.device("cuda")))
        return pieces[-1].data_ptr()

    # ---- the search for block shapes -------------------------------------------------------------------

    def chip(self) -> str:
        return torch.cuda.get_device_name(self.current_device())

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        shared = _Memory({"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 2})
        return torch.as_tensor(shared, device="cuda") if nbytes else torch.empty(0, dtype=torch.uint8)

    def seconds(self, run: Callable[[], object]) -> float:
        found = self._seconds(run, _TIMED)
        return self._seconds(run, _TIMED_SHORT) if found < _SHORT else found

    def _seconds(self, run: Callable[[], object], times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        run()
        host = (time.perf_counter() - begin) * times
        # Keeps the device busy while the host launches; otherwise the events would measure the host's work.
        memory = self.empty(_BUSY, torch.device("cuda"))
        for _ in range(1 + min(int(host / _BUSY_S), _MOST_BUSY)):
            memory.zero_()
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    # ---- the launcher ----------------------------------------------------------------------------------

    def launcher(self) -> ModuleType:
        """Returns the extension, with the driver open; waits for its compiler at the first use after an install."""
        with self._lock:
            if self._open is None:
                assert self._extension is not None
                try:
                    module = self._extension.result()
                    module.open(self._driver, self.current_device, self.current_stream, self.workspace, self.flags)
                except (CompileError, ImportError, OSError) as error:
                    raise CompileError(
                        f"the launcher of CUDA kernels does not work: {error}", target=self.name,
                        hint="it needs the NVIDIA driver (`nvidia-smi` finds it), a C++ compiler and Python's headers "
                        "(Debian, Ubuntu: apt install g++ python3-dev)") from error
                self._open = module
            return self._open

    def _prepare_extension(self) -> None:
        with self._lock:
            if self._extension is None:
                # Settings are read here, because an override holds only in the caller's thread.
                disk = shared_cache(config.cache_dir, config.cache_limit_mb)
                self._extension = Pool(1, "launcher").submit(_extension, config.compiler, disk)


def _extension(compiler: str, disk: DiskCache) -> ModuleType:
    return extension(_EXTENSION, find_toolchain(compiler, disk), disk)


class CudaKernel:
    """A source and its variants, as the native launch asks for them."""

    def __init__(self, target: CudaTarget, source: BlockSource) -> None:
        self.target = target
        self.source = source
        self._launch: Launch | None = None

    def start(self, device: int, *facts: Any) -> _Codes:
        """Starts to compile a variant."""
        return self.target.codes(self.source, Facts(*facts), device)

    def make(self, device: int, *facts: Any) -> list[tuple[int, ...]]:
        """Returns (function, warps, shared bytes, scratch bytes, whether it waits for earlier kernels) of each part of
        a variant, followed for each of its tensor maps by the number of its words and the words."""
        return self.loaded(self.start(device, *facts), device)

    def loaded(self, codes: _Codes, device: int) -> list[tuple[int, ...]]:
        parts = []
        early = self.target.arch(device) >= _COPIES
        for future, part in zip(codes, self.source.parts, strict=True):
            code = future.result()
            if isinstance(code, CompileError):
                raise code
            words = [n for m in code.maps for n in (len(m), *m)]
            parts.append((self.target.function(code, device), code.warps, code.shared, code.scratch,
                          part.waits and early, *words))
        return parts

    def launch(self) -> Launch:
        if self._launch is None:
            shape = shape_function(self.source, self.target.processors(self.target.current_device()))
            self._launch = self.target.launcher().Launch(
                self.source.title or self.source.name, shape, self.start, self.make, checks_data(self.source),
                self.source.words, maps_function(self.source), self.source.cleared, self.source.signals)
        return self._launch


class _Memory:
    """An address in the form that torch accepts."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def shape_function(source: BlockSource, units: int = 1) -> Callable[..., tuple[int, ...]]:
    """Returns a function of the sizes: the bytes of the workspace, whether indices are wide, then each part's grid in
    three dimensions."""
    names = ", ".join(f"n{k}" for k in range(len(source.sizes)))
    grids = "".join(f"*grid({part.grid}), " for part in source.parts)
    scope: dict[str, Any] = {"grid": grid, "units": units}
    exec(f"def shape({names}): return ({source.workspace or 0}, not ({source.narrow or True}), {grids})", scope)
    shape: Callable[..., tuple[int, ...]] = scope["shape"]
    return shape


def maps_function(source: BlockSource) -> Callable[..., tuple[int, ...]] | None:
    """Returns a function of the sizes: for each part the number of its tensor maps, and for each of them pointer, first
    byte, rank, shape and strides in bytes. None if there are no maps."""
    if not any(part.maps for part in source.parts):
        return None
    names = ", ".join(f"n{k}" for k in range(len(source.sizes)))
    words = []
    for part in source.parts:
        words.append(str(len(part.maps)))
        for m in part.maps:
            words += map(str, (m.pointer, m.start * m.itemsize, len(m.shape), *m.shape))
            words += [f"{m.itemsize} * {step}" for step in m.steps]
    scope: dict[str, Any] = {}
    exec(f"def maps({names}): return ({', '.join(words)},)", scope)
    maps: Callable[..., tuple[int, ...]] = scope["maps"]
    return maps


def grid(x: int, y: int = 1, z: int = 1) -> tuple[int, int, int]:
    """Returns a grid in three dimensions."""
    return x, y, z


def checks_data(source: BlockSource) -> bool:
    """Whether some part writes to `bad`, rather than only taking it as an argument."""
    return source.text.count("bad") > len(source.parts)


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
