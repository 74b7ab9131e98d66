"""The interface of a machine: a `Target` builds kernels, runs them, and owns memory.

    target = get_target("cpu")
    build = target.build(sources)        # compilers run in the background
    kernels = build.wait()               # name -> Launch, or the CompileError of that one kernel
    kernels["k"]([x.data_ptr(), y.data_ptr()], [x.numel()])

A package adds a target with an entry point in the group `flambeau.targets` that names a class or function
without arguments, or by calling `register_target`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from flambeau.codegen.source import BlockSource, KernelSource, RangeSource, called
from flambeau.config import config
from flambeau.errors import CompileError, OptionError, UnsupportedError
from flambeau.targets.background import Closing

if TYPE_CHECKING:
    import torch

    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel

Source: TypeAlias = KernelSource | BlockSource | RangeSource  # which of them, the target decides
Run: TypeAlias = Callable[[list[Any]], list[Any]]  # a program's function: it clears the list of its arguments

Allocator: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], "torch.dtype"], "torch.Tensor"]


class Launch(Protocol):
    """A loaded kernel. Addresses and sizes are lists or tuples of ints; the result is the kernel's code."""

    @property
    def name(self) -> str: ...

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int: ...


# One launch of a plan: the kernel; for each of its pointers a slot of the caller's pointer table and an
# offset in bytes; for each of its sizes a slot of the caller's size table.
Step: TypeAlias = tuple[Launch, Sequence[tuple[int, int]], Sequence[int]]


class Plan(Protocol):
    """Launches in a row, without Python in between; None, or the (step, code) of the first that failed.

    Where launches are asynchronous, what failed is an earlier one: the same step of an earlier call, or step -1 for
    another plan's.
    """

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> tuple[int, int] | None: ...


class Build:
    """Kernels that are being compiled: for each name what it waits for, and `made`, which then gives the kernel."""

    def __init__(self, waiting: Mapping[str, Sequence[Future[Any]]],
                 made: Callable[[str], Launch | CompileError]) -> None:
        self.waiting, self.made = waiting, made

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        done, total = self.count()
        return done == total

    def count(self) -> tuple[int, int]:
        """How many are done, and of how many."""
        return sum(all(f.done() for f in futures) for futures in self.waiting.values()), len(self.waiting)

    def wait(self) -> dict[str, Launch | CompileError]:
        """Every source's name with its kernel, or with the reason why that one has none."""
        out: dict[str, Launch | CompileError] = {}
        for name in self.waiting:
            try:
                out[name] = self.made(name)
            except Closing:
                raise
            except CompileError as error:
                out[name] = error
        return out


def failed(made: Future[Any]) -> bool:
    """Whether what was compiled is to be tried again: the reason may have been the machine and not the text."""
    return made.done() and (made.exception() is not None or isinstance(made.result(), CompileError))


S = TypeVar("S", KernelSource, RangeSource)


@dataclass(frozen=True)
class KeyedSource(Generic[S]):
    """A source, and the hash of all that its machine code depends on, after which a function without a name is
    called."""

    source: S
    key: str

    @property
    def symbol(self) -> str:
        return self.source.title or f"k_{self.key[:16]}"

    @property
    def shown(self) -> str:
        return self.source.title or self.source.name

    @property
    def text(self) -> str:
        return self.source.text.replace("KERNEL_NAME", self.symbol)


def not_compiled(what: str, reason: str, target: str, text: Path | None) -> CompileError:
    """The error of a kernel whose text was kept, where there was a place for it."""
    return CompileError(f"{what} did not compile:\n{reason}", target=target,
                        hint=f"its source is in {text}" if text else None)


class Recording(ABC):
    """The launches of one run, with all their addresses. `results` lie in memory of the recording's own."""

    results: list[Any]

    @abstractmethod
    def replay(self) -> None:
        """Launch them again: whatever lies at the addresses now is read, and `results` are overwritten."""


class Recorder(ABC):
    """How a target records runs (runtime/recording.py says which, and when a recording may be replayed)."""

    @abstractmethod
    def place(self) -> Hashable | None:
        """What orders the replays of now; a recording is replayed where it was made. None: nothing can be recorded."""

    @abstractmethod
    def record(self, run: Run, inputs: list[Any], group: Hashable = None) -> Recording:
        """Run it once, and keep what it launched, which does not keep the inputs alive.

        Recordings of one group share memory: intermediates of one may lie where results of a later one are."""

    def forget(self, group: Hashable) -> None:  # noqa: B027 - most keep nothing
        """Give back the memory of a group, of which no recording is left."""

    def check(self) -> None:  # noqa: B027 - most have nothing to say
        """Raise what earlier replays found wrong with their data, as far as it is known."""

    def settle(self) -> None:
        """The same of all that was launched. What `record` raises after it has to do with the recording."""
        self.check()


@dataclass(frozen=True)
class Convolution:
    """One of a graph, as far as the order of its image in memory matters; `channels`: of the weight, both ways;
    `moved`: bytes of what it reads and writes."""

    name: str
    dtype: torch.dtype
    channels: tuple[int, int]
    window: tuple[int, ...]
    groups: int
    moved: int
    is_product: bool


class Target(ABC):
    """One kind of machine."""

    name: ClassVar[str]
    # For each group of eager operators (eager/operator_forms.py) in which its kernels beat those that torch has for the
    # same device: from how many elements on they do.
    wins: ClassVar[Mapping[str, int]] = {}
    addresses: ClassVar[bool] = True  # launches take addresses; otherwise the tensors themselves
    names_kernels: ClassVar[bool] = False  # after what they compute; others put in names of their own
    times: ClassVar[bool] = False  # what it runs by itself can be timed beside what a library has for it
    opaque: ClassVar[bool] = False  # no other target can read the memory of its devices

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the passes before codegen must know of the machine."""

    def identity(self) -> str:
        """Which machine it is, as far as programs for it differ and the capabilities do not say."""
        return self.name

    def machine(self) -> str:
        """The same for people."""
        return self.name

    def chip(self) -> str:
        """Which one it is, as far as times on it differ."""
        return self.identity()

    def channels_last(self, convolutions: Sequence[Convolution], calls: int) -> Mapping[Convolution, float]:
        """Those of a graph of so many calls that torch's library does fastest where channels are contiguous, and how
        many bytes of copies are as much as that saves."""
        return {}

    def seconds(self, run: Callable[[], object]) -> float:
        """How long takes what is launched inside."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    @abstractmethod
    def render(self, kernel: AnyKernel, name: str) -> Source:
        """The text of a kernel, in the language that `build` takes."""

    def named(self, kernels: Sequence[AnyKernel], sources: Sequence[Source]) -> list[Source]:
        """Their sources, called after what they compute where this target does so."""
        return [called(k, s) for k, s in zip(kernels, sources, strict=True)] if self.names_kernels else [*sources]

    def bounded(self, kernel: AnyKernel, name: str) -> Source:
        """The text of one that checks its accesses (`Source.bounded`), where there is such a text."""
        return self.render(kernel, name)

    def variants(self, kernel: AnyKernel, source: Source) -> Source:
        """The text of a kernel with others beside it that compute the same, for the fastest to be found at a call."""
        return source

    @abstractmethod
    def build(self, sources: Sequence[Source]) -> Build:
        """Start to compile what is not compiled yet. CompileError if there is nothing to compile with."""

    @abstractmethod
    def plan(self, steps: Sequence[Step]) -> Plan:
        """Join launches of this target's kernels."""

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Uninitialised memory for what lies between the kernels of a graph, as a uint8 tensor: on the graph's device,
        which is not always the same one if the target computes for the CPU as well."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def allocator(self, device: torch.device) -> Allocator:
        """Makes tensors of a shape, strides and dtype on a device, without contents."""
        import torch

        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def fresh(self, memory: torch.Tensor) -> None:  # noqa: B027 - most have nothing to say
        """Memory that nothing has touched yet, and that may be large: how the system should provide it."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to start
        """Kernels will be built soon: whatever takes time to start may start now, in the background."""

    def queue(self) -> Hashable | None:
        """What kernels of now wait for each other in: one may use the memory of another that was launched before it.

        None: nobody may, ever.
        """
        return ()

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Inside, that device is the current one."""
        return nullcontext()

    def guarded(self, run: Run, device: torch.device) -> Run:
        """The same function, on that device."""
        return run

    def recorder(self) -> Recorder | None:
        """Records runs, to replay them without the host's part of launching. None: it cannot."""
        return None

    def driver(self) -> Any:
        """Its machines as a device of PyTorch's (device/core.py says what that takes)."""
        raise UnsupportedError(f"the target {self.name} has no driver, so it cannot be a PyTorch device")

    def on_its_memory(self) -> Target | None:
        """What compiles for the memory of its driver. None: operators of the device run on the CPU."""
        return None


_FACTORIES: dict[str, Callable[[], Target]] = {}
_BUILT_IN = {
    "cpu": "flambeau.targets.cpu.target:CpuTarget",
    "cpu-alone": "flambeau.targets.cpu.alone:LibraryFreeCpu",
    "cuda": "flambeau.targets.cuda.target:CudaTarget",
    "cuda-alone": "flambeau.targets.cuda.alone:LibraryFreeCuda",
    "interpreter": "flambeau.targets.cuda.interpreter:InterpreterTarget",
    "metal": "flambeau.targets.metal.target:MetalTarget",
    "metal-emulator": "flambeau.targets.metal.emulator.target:EmulatorTarget",
    "mps": "flambeau.targets.metal.target:MetalTarget",
    "opencl": "flambeau.targets.opencl.target:OpenClTarget",
}
_TARGETS: dict[str, Target] = {}
DEVICE = "flambeau"  # as a target: kernels on the memory of the device that PyTorch has from us


def register_target(name: str, factory: Callable[[], Target]) -> None:
    """Make a target known; one that has the name already is replaced."""
    _FACTORIES[name] = factory
    _TARGETS.pop(name, None)


def target_names() -> list[str]:
    """Every name that `get_target` takes."""
    return sorted({*_FACTORIES, *_BUILT_IN, *entry_points(group="flambeau.targets").names})


def get_target(name: str) -> Target:
    """The target of that name; one object per process."""
    if name not in _TARGETS:
        _TARGETS[name] = _factory(name)()
    return _TARGETS[name]


def device_target() -> Target:
    """The target whose machines are the device that PyTorch has from us."""
    return get_target(config.device)


def target_for(device: torch.device) -> str | None:
    """The name of the target that runs on a device: that of the device's type, if there is one."""
    if device.type == DEVICE:
        return DEVICE if device_target().on_its_memory() is not None else None
    known = device.type in _FACTORIES or device.type in _BUILT_IN or device.type in target_names()
    return device.type if known else None


def _factory(name: str) -> Callable[[], Target]:
    if name in _FACTORIES:
        return _FACTORIES[name]
    if name == DEVICE and (there := device_target().on_its_memory()) is not None:
        return lambda: there
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name].split(":")
        factory: Callable[[], Target] = getattr(import_module(module), attribute)
        return factory
    for entry in entry_points(group="flambeau.targets", name=name):
        loaded: Callable[[], Target] = entry.load()
        return loaded
    raise OptionError(f"there is no target {name!r}", hint=f"targets: {', '.join(target_names())}")
