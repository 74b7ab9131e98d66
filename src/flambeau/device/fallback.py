"""Runs operators without a kernel on the CPU, counts them, and prints the name of each once.

    flambeau.fallbacks()          # which operators, how often, how many bytes went to the host and back
    FLAMBEAU_FALLBACK=error       # such a call is an error

The schema has all information needed: which arguments are written, and which results share memory with which argument.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flambeau.config import config
from flambeau.errors import UnsupportedError
from flambeau.ir.dtypes import SUPPORTED
from flambeau.ops.facts import facts, overloads_with
from flambeau.runtime.memory_layout import dense
from flambeau.torch_compat.dispatch import all_operator_names, has_kernel_for_key
from flambeau.torch_compat.ops import allow_numbers_as_tensors

from .copies import Copies, as_marked, host_memory, same_geometry, span
from .python_kernels import aten_named, private, short
from .random_state import host_generator
from .sparse import is_sparse, joined, parts

log = logging.getLogger(__name__)

ALIGNMENT = 16  # bytes: the size of the largest element


class FallbackRow(NamedTuple):
    operator: str
    calls: int
    bytes: int


_COUNTS: dict[str, tuple[int, int]] = {}
REASONS: dict[str, str] = {}  # why an operator got no kernel, if one was tried
_LOCK = threading.Lock()


def fallbacks() -> list[FallbackRow]:
    """The operators that ran on the CPU for tensors of the device, sorted by bytes moved."""
    rows = [FallbackRow(name, calls, moved) for name, (calls, moved) in list(_COUNTS.items())]
    return sorted(rows, key=lambda row: (-row.bytes, -row.calls, row.operator))


def reset_fallbacks() -> None:
    _COUNTS.clear()


# ---- schemas ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Argument:
    name: str
    is_tensor: bool
    is_generator: bool
    written: bool
    only_written: bool  # an out= argument: its old content does not matter
    aliases: frozenset[str]


@dataclass(frozen=True)
class _Schema:
    arguments: tuple[_Argument, ...]
    returns: tuple[frozenset[str], ...]  # the alias sets of each result
    random: bool
    numbers: bool  # whether Python numbers may be passed for its tensors
    elsewhere: tuple[str, ...]  # arguments that may be on the CPU


def _aliases(info: Any) -> frozenset[str]:
    return frozenset() if info is None else frozenset(info.before_set)


@cache
def _schema(op: Any) -> _Schema:
    found, known = op._schema, facts(op)
    arguments = tuple(
        _Argument(a.name, str(a.type) in ("Tensor", "Optional[Tensor]"), "Generator" in str(a.type),
                  a.is_write or a.name in known.writes, a.is_out, _aliases(a.alias_info))
        for a in found.arguments)
    return _Schema(arguments, tuple(_aliases(r.alias_info) for r in found.returns), known.random,
                   allow_numbers_as_tensors(found.name.split("::")[-1]), known.on_host)


# ---- host memory -----------------------------------------------------------------------------------------


class _Mirror:
    """CPU tensors in place of a call's device tensors. Tensors that overlap on the device overlap here too."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._given: dict[int, tuple[Tensor, bool]] = {}  # by identity: the tensor, and whether its content matters
        self._sparse: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}  # by identity: the tensor and its parts
        self._hosts: dict[int, Tensor] = {}
        self.devices: set[torch.device] = set()
        self.others: list[Tensor] = []
        self.moved = 0

    def note(self, value: Any, contents: bool, written: bool, anywhere: bool) -> None:
        if isinstance(value, Tensor):
            if value.device.type == self._copies.kind:
                self.devices.add(value.device)
                if is_sparse(value):
                    if id(value) not in self._sparse:
                        self._sparse[id(value)] = value, parts(value)
                    return self.note(self._sparse[id(value)][1], True, written, anywhere)
                before = self._given.get(id(value), (value, False))[1]
                self._given[id(value)] = (value, before or contents or not dense(value))
            elif (value.dim() > 0 or written) and not anywhere:  # CPU scalars may be mixed with any device
                self.others.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.note(item, contents, written, anywhere)

    def fill(self) -> None:
        """Copy to the host all memory that the call may read."""
        tensors = [t for t, _ in self._given.values()]
        for region in _regions(t for t in tensors if span(t)):
            start = region[0].data_ptr() // ALIGNMENT * ALIGNMENT
            end = max(t.data_ptr() + span(t) for t in region)
            storage = torch.UntypedStorage(end - start, device="cpu")
            if any(self._given[id(t)][1] for t in region):
                # The rounded start is still inside the device block, because blocks have a larger alignment.
                whole = host_memory(0, torch.uint8, (end - start,), (1,), storage=storage)
                self._copies.read(region[0].device.index, start, whole)
                self.moved += end - start
            for t in region:
                self._hosts[id(t)] = host_memory(0, t.dtype, t.shape, t.stride(),
                                                 (t.data_ptr() - start) // t.element_size(), storage)
        for t in tensors:
            if id(t) not in self._hosts:
                self._hosts[id(t)] = host_memory(0, t.dtype, t.shape, t.stride())
        self._places = {key: host.data_ptr() for key, host in self._hosts.items()}
        self._views = {key: as_marked(host, self._given[key][0]) for key, host in self._hosts.items()}
        for key, (t, held) in self._sparse.items():
            self._views[key] = joined(t, [self._views[id(part)] for part in held])
        given = self._given | self._sparse
        self._origins = {id(view): given[key][0] for key, view in self._views.items()}

    def host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._views.get(id(value), value)
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == self._copies.kind else value
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self.host(item) for item in value)
        return value

    def origin(self, host: Tensor) -> Tensor | None:
        """The device tensor that a CPU tensor stands for; None if there is none."""
        return self._origins.get(id(host))

    def write_back(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                self.write_back(item)
        if id(value) in self._sparse:
            self._write_back_sparse(value, self._views[id(value)])
        if not isinstance(value, Tensor) or id(value) not in self._hosts:
            return
        host, view = self._hosts[id(value)], self._views[id(value)]
        if view.shape != value.shape:  # the operator has resized its output
            value.resize_(view.shape)
            if view.stride() != value.stride() and dense(view):
                value.as_strided_(view.shape, view.stride())
        if host.data_ptr() == self._places[id(value)] and same_geometry(view, value):
            self._copies.write(value.device.index, value.data_ptr(), host)
        else:  # new memory, or a conjugated view of the same
            self._copies.copy_from(view, value)
        self.moved += span(value)

    def _write_back_sparse(self, value: Tensor, view: Tensor) -> None:
        held, after = self._sparse[id(value)][1], parts(view)
        if view.shape == value.shape and all(
                self._places[id(old)] == new.data_ptr() and same_geometry(old, new) for old, new in zip(held, after)):
            self.write_back(held)
            if view.layout is torch.sparse_coo:
                value._coalesced_(view.is_coalesced())
        else:
            if value.layout is not torch.sparse_coo:
                value.resize_as_sparse_(view)
            value.copy_(view)
            self.moved += sum(map(span, after))


def _regions(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors whose memory spans overlap."""
    out: list[list[Tensor]] = []
    end = 0
    for t in sorted(tensors, key=lambda t: t.data_ptr()):
        if not out or t.data_ptr() >= end:
            out.append([])
        out[-1].append(t)
        end = max(end, t.data_ptr() + span(t))
    return out


# ---- random numbers --------------------------------------------------------------------------------------


@contextmanager
def _default_generator(given: torch.Generator | None) -> Iterator[None]:
    """While active, the CPU's default generator has the state of `given`."""
    if given is None:
        yield
        return
    default = torch.default_generator
    before = default.get_state()
    default.set_state(given.get_state())
    try:
        yield
    finally:
        default.set_state(before)


# ---- the fallback ----------------------------------------------------------------------------------------


class Fallback:
    """The kernel of every operator that has no other one on the device."""

    def __init__(self, copies: Copies, generator: Callable[[int], torch.Generator], current: Callable[[], int]) -> None:
        self._copies = copies
        self._generator = generator
        self._current = current

    def register(self, everything: torch.library.Library, aten: torch.library.Library) -> None:
        everything.fallback(private(self.call), "PrivateUse1")
        for op, compute in overloads_with("composed").items():
            aten.impl(short(op), private(partial(self._composed, op, compute)), "PrivateUse1")
        for op, compute in overloads_with("instead").items():
            aten.impl(short(op), self.instead(op, compute), "PrivateUse1")
        # Operators for which every backend needs its own kernel. Otherwise PyTorch composes one form from another, and
        # assumes that all tensors are on the device of the first one.
        has = has_kernel_for_key
        whole = [aten_named(name.removeprefix("aten::")) for name in all_operator_names()
                 if has(name, "CompositeExplicitAutogradNonFunctional") and has(name, "CPU")
                 and not has(name, "PrivateUse1")]
        for op in (*whole, *overloads_with("on_cpu")):
            aten.impl(short(op), private(partial(self.call, op)), "PrivateUse1")

    def instead(self, op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        return private(partial(self._run, op, compute))

    def _composed(self, op: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a call by other operators, or on the CPU if these do not support it (such as its dtype)."""
        row = args[0] if args and isinstance(args[0], (list, tuple)) else ()  # index tensors may be on another device
        tensors = [a for a in (*row, *args, *kwargs.values()) if isinstance(a, Tensor)]
        suits = tensors[0].dtype in SUPPORTED and not tensors[0].is_cpu and len({t.device for t in tensors}) == 1
        out = compute(*args, **kwargs) if suits else NotImplemented
        return self.call(op, *args, **kwargs) if out is NotImplemented else out

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(op, op, *args, **kwargs)

    def _run(self, op: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        schema, name = _schema(op), str(op.name())
        given = dict(zip((a.name for a in schema.arguments), args)) | kwargs
        mirror = _Mirror(self._copies)
        for argument in schema.arguments:
            mirror.note(given.get(argument.name), not argument.only_written, argument.written,
                        argument.name in schema.elsewhere)
        device = self._device(name, mirror, given)
        self._announce(name, given.values())
        mirror.fill()

        seeded = self._seeded(schema, given, device) if schema.random else None
        hosts = {a.name: self._argument(a, given[a.name], schema, mirror) for a in schema.arguments if a.name in given}
        hosts |= {a.name: seeded for a in schema.arguments if a.is_generator}
        positional = [hosts.pop(a.name) for a in schema.arguments[:len(args)]]
        with _default_generator(None if any(a.is_generator for a in schema.arguments) else seeded):
            out = compute(*positional, **hosts)

        for argument in schema.arguments:
            if argument.written:
                mirror.write_back(given.get(argument.name))
        sources = {alias: given[a.name] for a in schema.arguments if a.name in given for alias in a.aliases}
        made = tuple(self._result(value, aliases, sources, mirror, device)
                     for value, aliases in zip(out if len(schema.returns) > 1 else (out,), schema.returns))
        with _LOCK:
            calls, moved = _COUNTS.get(name, (0, 0))
            _COUNTS[name] = (calls + 1, moved + mirror.moved)
        return made if len(made) > 1 else made[0] if made else None

    def _device(self, name: str, mirror: _Mirror, given: dict[str, Any]) -> torch.device | None:
        """The device for results; None if nothing in the call is on the device."""
        named = given.get("device")
        if not mirror.devices:
            if isinstance(named, torch.device) and named.type == self._copies.kind:
                return torch.device(named.type, self._current() if named.index is None else named.index)
            return None
        mixed = {*mirror.devices, *(t.device for t in mirror.others)}
        if len(mixed) > 1:
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, "
                               f"{' and '.join(sorted(map(str, mixed)))}! (in {name})")
        return next(iter(mirror.devices))

    def _announce(self, name: str, values: Iterable[Any]) -> None:
        if config.fallback == "error":
            tensors = [v for v in values if isinstance(v, Tensor)]
            reason = f" ({REASONS[name]})" if name in REASONS else ""
            raise UnsupportedError(f"there is no kernel on the device{reason}, and FLAMBEAU_FALLBACK forbids the CPU's",
                                   operator=name, shapes=[t.shape for t in tensors], dtypes=[t.dtype for t in tensors],
                                   hint="unset FLAMBEAU_FALLBACK to compute it on the CPU")
        if name not in _COUNTS:
            log.warning("%s has no kernel on the device and runs on the CPU", name)

    def _argument(self, argument: _Argument, value: Any, schema: _Schema, mirror: _Mirror) -> Any:
        # PyTorch unwraps tensors that it made from numbers, so they arrive as numbers.
        if argument.is_tensor and isinstance(value, (bool, int, float, complex)) and not schema.numbers:
            return torch.tensor(value, device="cpu")
        return mirror.host(value)

    def _seeded(self, schema: _Schema, given: dict[str, Any], device: torch.device | None) -> torch.Generator | None:
        chosen = next((given.get(a.name) for a in schema.arguments if a.is_generator), None)
        if chosen is None and device is not None:
            chosen = self._generator(device.index)
        if chosen is None or chosen.device.type != self._copies.kind:
            return chosen
        return host_generator(chosen)

    def _result(self, value: Any, aliases: frozenset[str], sources: dict[str, Any], mirror: _Mirror,
                device: torch.device | None) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._result(item, aliases, sources, mirror, device) for item in value)
        if not isinstance(value, Tensor) or device is None:
            return value
        if (origin := mirror.origin(value)) is not None:
            return origin
        for source in (sources[alias] for alias in aliases if alias in sources):
            if isinstance(source, Tensor) and source.device.type == self._copies.kind and not is_sparse(source):
                host = mirror.host(source)
                offset = source.storage_offset() + value.storage_offset() - host.storage_offset()
                return as_marked(source.as_strided(value.shape, value.stride(), offset), value)
        if not value.is_cpu:
            return value
        mirror.moved += sum(map(span, parts(value)))
        return self._copies.upload(value, device)
