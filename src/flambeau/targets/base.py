"""The interface of a machine: a `Target` builds kernels, runs them, and owns memory.

    target = get_target("cpu")
    build = target.build(sources)        # compilers run in the background
    kernels = build.wait()               # name -> Launch, or the CompileError of that one kernel
    kernels["k"]([x.data_ptr(), y.data_ptr()], [x.numel()])

A package adds a target with an entry point in the group `flambeau.targets` that names a class or function without
arguments, or by calling `register_target`.
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

Source: TypeAlias = KernelSource | BlockSource | RangeSource  # the target decides which of them
Run: TypeAlias = Callable[[list[Any]], list[Any]]  # a program's function: it clears the list of its arguments

Allocator: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], "torch.dtype"], "torch.Tensor"]


class Launch(Protocol):
    """A loaded kernel. Addresses and sizes are lists or tuples of ints; the result is the kernel's fault code."""

    @property
    def name(self) -> str: ...

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int: ...


# One launch of a plan: the kernel; for each of its pointers a slot of the caller's pointer table and an
# offset in bytes; for each of its sizes a slot of the caller's size table.
Step: TypeAlias = tuple[Launch, Sequence[tuple[int, int]], Sequence[int]]


class Plan(Protocol):
    """A sequence of launches, without Python in between. Returns None, or the (step, code) of the first failure.

    Where launches are asynchronous, an earlier launch failed: the same step of an earlier call, or step -1 for another
    plan's.
    """

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> tuple[int, int] | None: ...


class Build:
    """Kernels that are being compiled: for each name the futures it waits for, and `made`, which then returns the
    kernel."""

    def __init__(self, waiting: Mapping[str, Sequence[Future[Any]]],
                 made: Callable[[str], Launch | CompileError]) -> None:
        self.waiting, self.made = waiting, made

    def done(self) -> bool:
        """Whether `wait` would return immediately."""
        done, total = self.count()
        return done == total

    def count(self) -> tuple[int, int]:
        """Returns the number of finished kernels, and of all."""
        return sum(all(f.done() for f in futures) for futures in self.waiting.values()), len(self.waiting)

    def wait(self) -> dict[str, Launch | CompileError]:
        """Returns the kernel of every source's name, or the error why it has none."""
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
    """Whether a result should be built again: the cause may have been the machine and not the text."""
    return made.done() and (made.exception() is not None or isinstance(made.result(), CompileError))


S = TypeVar("S", KernelSource, RangeSource)


@dataclass(frozen=True)
class KeyedSource(Generic[S]):
    """A source, and the hash of everything that its machine code depends on. A function without a title is named after
    the hash."""

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
    """Returns the error of a kernel, with the path of its text if that was stored."""
    return CompileError(f"{what} did not compile:\n{reason}", target=target,
                        hint=f"its source is in {text}" if text else None)


class Recording(ABC):
    """The launches of one run, with all their addresses. `results` are in memory that the recording owns."""

    results: list[Any]

    @abstractmethod
    def replay(self) -> None:
        """Repeats the launches: they read the current contents of these addresses, and overwrite `results`."""


class Recorder(ABC):
    """Records runs of a target (runtime/recording.py decides which, and when a recording may be replayed)."""

    @abstractmethod
    def place(self) -> Hashable | None:
        """Returns the queue that orders replays now; a recording is replayed where it was made. None: nothing can be
        recorded."""

    @abstractmethod
    def record(self, run: Run, inputs: list[Any], group: Hashable = None) -> Recording:
        """Runs it once, and records its launches, without keeping the inputs alive.

        Recordings of one group share memory: intermediates of one may be where results of a later one are.
        """

    def forget(self, group: Hashable) -> None:  # noqa: B027 - most keep nothing
        """Frees the memory of a group, of which no recording is left."""

    def check(self) -> None:  # noqa: B027 - most have nothing to say
        """Raises the faults that earlier replays found in their data, as far as they are known."""

    def settle(self) -> None:
        """Raises the faults of everything that was launched so far, and may wait for it. Errors that `record` raises
        afterwards belong to the recording."""
        self.check()


@dataclass(frozen=True)
class Convolution:
    """A convolution of a graph, as far as the memory order of its image matters. `channels`: both channel counts of the
    weight; `moved`: the bytes that it reads and writes."""

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
    # For each group of eager operators (eager/operator_forms.py) in which its kernels beat torch's for the same device:
    # the number of elements from which on they do.
    wins: ClassVar[Mapping[str, int]] = {}
    addresses: ClassVar[bool] = True  # launches take addresses; otherwise the tensors themselves
    names_kernels: ClassVar[bool] = False  # named after their operators; other targets use names of their own
    times: ClassVar[bool] = False  # it can time its own kernels against a library's
    opaque: ClassVar[bool] = False  # no other target can read the memory of its devices

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Returns what the passes before codegen need to know of the machine."""

    def identity(self) -> str:
        """Identifies the machine, as far as programs for it differ and the capabilities do not say."""
        return self.name

    def machine(self) -> str:
        """Names the machine for people."""
        return self.name

    def chip(self) -> str:
        """Identifies the chip, as far as times on it differ."""
        return self.identity()

    def channels_last(self, convolutions: Sequence[Convolution], calls: int) -> Mapping[Convolution, float]:
        """Returns those convolutions of a graph with so many calls that torch's library does fastest with contiguous
        channels, each with the bytes of copies that cost as much as that saves."""
        return {}

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the time that the launches of `run` take."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    @abstractmethod
    def render(self, kernel: AnyKernel, name: str) -> Source:
        """Returns the text of a kernel, in the language that `build` takes."""

    def named(self, kernels: Sequence[AnyKernel], sources: Sequence[Source]) -> list[Source]:
        """Returns the sources, named after what they compute where this target does so."""
        return [called(k, s) for k, s in zip(kernels, sources, strict=True)] if self.names_kernels else [*sources]

    def bounded(self, kernel: AnyKernel, name: str) -> Source:
        """Returns a kernel text that checks its accesses (`Source.bounded`), where there is one."""
        return self.render(kernel, name)

    def variants(self, kernel: AnyKernel, source: Source) -> Source:
        """Returns the text of a kernel with alternatives that compute the same; the fastest is found at a call."""
        return source

    @abstractmethod
    def build(self, sources: Sequence[Source]) -> Build:
        """Starts to compile what is not compiled yet. Raises CompileError if there is nothing to compile with."""

    @abstractmethod
    def plan(self, steps: Sequence[Step]) -> Plan:
        """Joins launches of this target's kernels."""

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Returns uninitialised memory for intermediates of a graph, as a uint8 tensor: on the graph's device, which is
        not always the same one if the target computes for the CPU as well."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def allocator(self, device: torch.device) -> Allocator:
        """Returns a function that makes uninitialised tensors of a shape, strides and dtype on a device."""
        import torch

        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def fresh(self, memory: torch.Tensor) -> None:  # noqa: B027 - most have nothing to say
        """Tells the target of memory that was never touched and may be large, so that it can advise the system."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to start
        """Announces that kernels will be built soon: slow starts may begin now, in the background."""

    def queue(self) -> Hashable | None:
        """Identifies the queue in which current kernels run in order: a kernel may use the memory of one launched
        before it.

        None: no kernel may ever do that.
        """
        return ()

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes that device the current one within this block."""
        return nullcontext()

    def guarded(self, run: Run, device: torch.device) -> Run:
        """Returns the same function, run on that device."""
        return run

    def recorder(self) -> Recorder | None:
        """Returns the recorder of runs, which replays them without the host's part of launching. None: there is
        none."""
        return None

    def driver(self) -> Any:
        """Returns its machines as a device of PyTorch's (see device/core.py)."""
        raise UnsupportedError(f"the target {self.name} has no driver, so it cannot be a PyTorch device")

    def on_its_memory(self) -> Target | None:
        """Returns the target that compiles for the memory of its driver. None: operators of the device run on the
        CPU."""
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
DEVICE = "flambeau"  # a target name: kernels on the memory of the PyTorch device that we register


def register_target(name: str, factory: Callable[[], Target]) -> None:
    """Registers a target; one with the same name is replaced."""
    _FACTORIES[name] = factory
    _TARGETS.pop(name, None)


def target_names() -> list[str]:
    """Every name that `get_target` takes."""
    return sorted({*_FACTORIES, *_BUILT_IN, *entry_points(group="flambeau.targets").names})


def get_target(name: str) -> Target:
    """Returns the target of that name; one object per process."""
    if name not in _TARGETS:
        _TARGETS[name] = _factory(name)()
    return _TARGETS[name]


def device_target() -> Target:
    """The target whose machines are the PyTorch device that we register."""
    return get_target(config.device)


def target_for(device: torch.device) -> str | None:
    """Returns the name of the target that runs on a device: that of the device's type, if there is one."""
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
