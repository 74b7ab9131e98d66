"""What a machine is to the rest of Flambeau: a `Target` builds kernels, runs them and owns memory.

    target = get_target("cpu")
    build = target.build(sources)        # compilers run in the background
    kernels = build.wait()               # name -> Launch, or the CompileError of that one kernel
    kernels["k"]([x.data_ptr(), y.data_ptr()], [x.numel()])

A package adds a target with an entry point in the group `flambeau.targets` that names a class or function
without arguments, or by calling `register_target`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

from flambeau.codegen.source import KernelSource
from flambeau.errors import CompileError, OptionError

if TYPE_CHECKING:
    import torch

    from flambeau.ir.capabilities import Capabilities


class Launch(Protocol):
    """A loaded kernel. Addresses and sizes are lists or tuples of ints; the result is the kernel's code."""

    @property
    def name(self) -> str: ...

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int: ...


# One launch of a plan: the kernel; for each of its pointers a slot of the caller's pointer table and an
# offset in bytes; for each of its sizes a slot of the caller's size table.
Step: TypeAlias = tuple[Launch, Sequence[tuple[int, int]], Sequence[int]]


class Plan(Protocol):
    """Launches in a row, without Python in between; None, or the (step, code) of the first that failed."""

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> tuple[int, int] | None: ...


class Build(ABC):
    """Kernels on their way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> dict[str, Launch | CompileError]:
        """Every source's name with its kernel, or with the reason why that one has none."""


class Target(ABC):
    """One kind of machine."""

    name: ClassVar[str]

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the passes before codegen must know of the machine."""

    @abstractmethod
    def build(self, sources: Sequence[KernelSource]) -> Build:
        """Start to compile what is not compiled yet. CompileError if there is nothing to compile with."""

    @abstractmethod
    def plan(self, steps: Sequence[Step]) -> Plan:
        """Join launches of this target's kernels."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory, as a uint8 tensor."""


_FACTORIES: dict[str, Callable[[], Target]] = {}
_BUILT_IN = {"cpu": "flambeau.targets.cpu:CpuTarget"}
_TARGETS: dict[str, Target] = {}


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


def _factory(name: str) -> Callable[[], Target]:
    if name in _FACTORIES:
        return _FACTORIES[name]
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name].split(":")
        factory: Callable[[], Target] = getattr(import_module(module), attribute)
        return factory
    for entry in entry_points(group="flambeau.targets", name=name):
        loaded: Callable[[], Target] = entry.load()
        return loaded
    raise OptionError(f"no target is called {name!r}", hint=f"there are {', '.join(target_names())}")
