"""A program in its final form: plain data from which any process can make its run function.

    package = executor.write(program, ...)     # when a graph is compiled
    run = package.load()                       # there, in a later process, or out of a file

The function is straight-line Python source, so nothing is interpreted at run time. The objects that the source refers
to are in tables beside it: constants, operators, native plans over a table of pointers, and views of the arena.
"""

from __future__ import annotations

import itertools
import math
import struct
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flambeau.errors import BoundsError, CompileError
from flambeau.ir.faults import KIND, WHICH, Fault, Sites, error_of, index_of, size_of
from flambeau.ir.program import Fence
from flambeau.targets.base import Build, Launch, Plan, Run, Source, Target, get_target
from flambeau.torch_compat.autograd import keeps_graph

from .address_tables import AddressTables, Table
from .operator_calls import EXTENSION, Prepared, operator_named
from .recordable import Recordable
from .recording import function_now, recorded
from .result_checks import kept
from .streams.lookup import (
    caller_event,
    caller_stream,
    fenced,
    numbered_stream,
    own_stream,
    record,
    stream_numbers,
    wait,
)
from .streams.overlap_choice import chosen
from .watchers import Part, Watcher, one_by_one, title, watched, watching

DONATED = "donated"  # marks placeholders whose tensors only this graph uses


# From the numbers by name, and the results' shape and strides, to the run function.
Layout = tuple[tuple[int, ...], tuple[int, ...]] | tuple[None, None]
Maker = Callable[[Mapping[str, int], Layout], Run]


@dataclass(frozen=True)
class View:
    """A tensor in the arena."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        count = (memory.numel() - self.offset) // self.dtype.itemsize
        typed = memory[self.offset : self.offset + count * self.dtype.itemsize].view(self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset())


@dataclass(frozen=True)
class Step:
    """One launch of a plan."""

    kernel: int  # position in LaunchPlan.kernels
    pointers: tuple[tuple[int, int], ...]  # slot of the pointer table (0 is the arena), offset in bytes
    sizes: tuple[int, ...]  # slots in the plan's size table
    moved: str = ""  # bytes, as a Python expression over the sizes n0, n1, ...; empty if unknown


@dataclass(frozen=True)
class LaunchPlan:
    target: str
    source: str  # def run(args): ...
    kernels: tuple[Source, ...] = ()
    plans: dict[str, tuple[Step, ...]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    views: tuple[View, ...] = ()
    tables: dict[str, tuple[Table, ...]] = field(default_factory=dict)  # for the launches of one plan
    calls: dict[str, Prepared] = field(default_factory=dict)
    slots: int = 1  # of the pointer table, the arena's included
    device: torch.device = torch.device("cpu")
    graphs: Recordable | None = None  # set if runs are to be recorded as CUDA graphs
    overwritten: tuple[int, ...] = ()  # positions of arguments whose memory results reuse
    fence: Fence | None = None  # waits between the caller's streams and the program's own streams
    beside: LaunchPlan | None = None  # the same program on several streams: the first call measures which is faster

    def load(self) -> Run:
        """The run function, with kernels from the cache or newly built. Raises CompileError if one does not build."""
        return self.bind(self.built(), function_now())

    def built(self) -> Mapping[str, Launch | CompileError]:
        """The kernels by name, once built. Raises CompileError if one does not build."""
        build = self.build()
        kernels = build.wait() if build is not None else {}
        for kernel in kernels.values():
            if isinstance(kernel, CompileError):
                raise kernel
        return kernels

    def build(self) -> Build | None:
        """Start to build the kernels in the background."""
        target = get_target(self.target)
        with target.on(self.device):
            return target.build(self.kernels) if self.kernels else None

    def maker(self) -> Maker:
        """For a package written with `executor.Known`: a function from numbers and layout to a run function."""
        at = self._scope(self.built())["at"]
        return lambda sizes, layout: self._guarded(at(sizes, *layout))

    def bind(self, kernels: Mapping[str, Launch | CompileError], function: Hashable = None) -> Run:
        """The run function over built kernels. `function` identifies the function that this graph is part of."""
        if self.beside is not None:
            return chosen(self, self.beside, get_target(self.target), kernels, function)
        return self.bound(kernels, function)

    def raw(self, kernels: Mapping[str, Launch | CompileError]) -> Run:
        """The run function, without CUDA graph recordings."""
        return self._scope(kernels)["run"]

    def bound(self, kernels: Mapping[str, Launch | CompileError], function: Hashable = None) -> Run:
        """The run function of this plan alone, without a choice between two."""
        target, run = get_target(self.target), self.raw(kernels)
        if self.graphs is not None:
            run = recorded(run, target.recorder(), self.graphs, self.device, function)
        if self.overwritten:
            run = keeping(run, self.overwritten)
        if self.fence is not None:
            run = fenced(run, self.fence, self.device)
        return self._guarded(run)

    def _scope(self, kernels: Mapping[str, Launch | CompileError]) -> dict[str, Any]:
        target = get_target(self.target)
        loaded: list[Any] = [kernels[k.name] for k in self.kernels]
        watchers = watching(self.device) if self.graphs is None else []  # a recording is one launch

        def called(name: str, operator: Any, call: Callable[..., Any]) -> Callable[..., Any]:
            return watched(watchers, Part(self, str(operator), name), call)

        scope: dict[str, Any] = {
            **SCOPE, **self.constants,
            **{name: self._plan(target, name, loaded, watchers) for name in self.plans},
            **{name: AddressTables(target, self.device, tables) for name, tables in self.tables.items()},
            "TARGET": target, "DEVICE": self.device, "empty_strided": target.allocator(self.device),
            "fresh": target.fresh,
            "PROTO": [0] * self.slots, "KEY": next(_keys),
            "PLANS": self.plans, "SITES": [k.sites for k in self.kernels],
            "make_views": lambda arena: [view.over(arena.memory) for view in self.views],
        }
        operators = {name: operator_named(c.operator) for name, c in self.calls.items()}
        scope.update((name, called(name, op, self.calls[name].python(op))) for name, op in operators.items())
        if watchers:
            scope.update((name, called(name, op, op)) for name, op in self.constants.items()
                         if callable(op) and not isinstance(op, Held))
        if self.calls:
            EXTENSION.tell(lambda module: scope.update(
                (name, called(name, op, self.calls[name].native(module, op))) for name, op in operators.items()))
        exec(compile(self.source, "<flambeau program>", "exec"), scope)
        return scope

    def _plan(self, target: Target, name: str, loaded: Sequence[Any], watchers: Sequence[Watcher]) -> Plan:
        steps = self.plans[name]
        launches = [(loaded[s.kernel], s.pointers, s.sizes) for s in steps]
        if not watchers:
            return target.plan(launches)
        parts = [Part(self, self.title(s.kernel), f"{name} {k}", s) for k, s in enumerate(steps)]
        return one_by_one([watched(watchers, part, target.plan([launch])) for part, launch in zip(parts, launches)])

    def title(self, kernel: int) -> str:
        """The name that profilers show."""
        return self.kernels[kernel].title or self.kernels[kernel].name

    def _guarded(self, run: Run) -> Run:
        if watchers := watching(self.device):
            run = watched(watchers, Part(self, title([*map(self.title, range(len(self.kernels)))])), run)
        return get_target(self.target).guarded(run, self.device)


def keeping(run: Run, positions: tuple[int, ...]) -> Run:
    """Make a backward that reuses its saved tensors' memory run on copies if autograd keeps its graph."""

    def run_once(args: list[Any]) -> list[Any]:
        if keeps_graph():
            for k in positions:
                args[k] = args[k].clone()
        return run(args)

    return run_once


# ---- functions that the generated source calls ---------------------------------------------------------


class Held:
    """A constant tensor held by the graph, wrapped as a call without arguments."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor

    def __repr__(self) -> str:
        return f"constant{list(self.tensor.shape)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._kind() == other._kind() and torch.equal(
            *(h.tensor.reshape(-1).view(torch.uint8) for h in (self, other)))

    def __hash__(self) -> int:
        return hash(self._kind())

    def _kind(self) -> tuple[Any, ...]:
        t = self.tensor
        return t.dtype, t.device, tuple(t.shape), t.stride()


def on_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a CPU scalar to a device. It is passed as a number with the launch, so nothing waits for a copy."""
    return torch.full((), t.item(), dtype=t.dtype, device=device)


def laid_out(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy with these strides, on the same device."""
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def draw_seeds(count: int, device: torch.device) -> torch.Tensor:
    """`count` seeds of two words each, drawn by torch's generator for the device."""
    draw = SEEDS.get(device.type)
    return draw(count, device) if draw else torch.empty((count, 2), dtype=torch.int64, device=device).random_()


def word(x: float) -> int:
    """A float encoded as kernels take it: the bits of a double."""
    found: int = WORD.unpack(DOUBLE.pack(x))[0]
    return found


class Arena:
    """A block of memory and the tensors made over it. One run owns it from start to end."""

    __slots__ = ("memory", "place", "pointer", "tensors")

    def __init__(self, memory: torch.Tensor, place: Hashable) -> None:
        self.memory = memory
        self.place = place
        self.pointer = memory.data_ptr()
        self.tensors: dict[int, list[torch.Tensor]] = {}


class ArenaPool:
    """Arenas that are free, by the queue that orders their use. A run takes the largest, or allocates a larger one."""

    def __init__(self) -> None:
        self.free: dict[Hashable, list[Arena]] = {}
        self.lock = threading.Lock()

    def take(self, target: Target, device: torch.device, nbytes: int) -> Arena:
        queue = target.queue()
        if queue is None:
            return Arena(target.empty(nbytes, device), None)
        place = (target.name, device, queue)
        with self.lock:
            free = self.free.setdefault(place, [])
            if free:
                a = free.pop()
                if a.memory.numel() >= nbytes:
                    return a
        return Arena(target.empty(nbytes, device), place)

    def give(self, a: Arena) -> None:
        if a.place is None:
            return
        with self.lock:
            free = self.free[a.place]
            free.append(a)
            free.sort(key=lambda x: x.memory.numel())


def fit(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a result in the promised strides, copied if its memory order differs."""
    if all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True)) or t.numel() == 0:
        return t.as_strided(t.shape, strides, t.storage_offset())
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


# For each step its operators, and its buffers if their accesses are checked.
Origins = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def elements_from(t: torch.Tensor) -> int:
    """The number of elements in memory from a tensor's first element on."""
    return int(t.untyped_storage().nbytes() // t.dtype.itemsize - t.storage_offset())


def check_status(bad: tuple[int, int], origins: Origins, steps: tuple[Step, ...], sizes: tuple[int, ...],
                 sites: Sequence[Sites]) -> None:
    """Raise the error that eager raises for the fault of a kernel. `bad`: (position in the plan, fault code)."""
    at, code = bad
    if at < 0:
        error, culprit = error_of(code), "a kernel that was launched before"
    else:
        step, (operators, buffers) = steps[at], origins[at]
        given = [sizes[slot] for slot in step.sizes]
        culprit = f"the kernel of {', '.join(operators) or 'a graph'}"
        if code >> KIND == Fault.MEMORY:
            k = code >> WHICH & 255
            first, end = given[len(given) - 2 * (len(buffers) - k):][:2]
            raise BoundsError(f"{culprit} (k{step.kernel}) accessed element {index_of(code)} of buffer {buffers[k]}, "
                              f"which has elements from {first} to {end}", operator=", ".join(operators) or None)
        error = error_of(code, size_of(code, sites[step.kernel], given))
    error.add_note(f"reported by {culprit}")
    raise error


POOL = ArenaPool()
WORD, DOUBLE = struct.Struct("=q"), struct.Struct("=d")
SEEDS: dict[str, Callable[[int, torch.device], torch.Tensor]] = {}  # for devices whose random numbers we generate
_keys = itertools.count()
# Names available to all generated sources.
SCOPE: dict[str, Any] = {"torch": torch, "math": math, "POOL": POOL, "check": check_status, "fit": fit, "word": word,
                         "draw_seeds": draw_seeds, "elements_from": elements_from, "kept": kept,
                         "caller_stream": caller_stream, "caller_event": caller_event,
                         "stream_numbers": stream_numbers, "numbered_stream": numbered_stream,
                         "own_stream": own_stream, "record": record, "wait": wait,
                         "current_stream": torch.accelerator.current_stream, "set_stream": torch.accelerator.set_stream,
                         "synchronize": torch.accelerator.synchronize}
