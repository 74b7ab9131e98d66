"""Facts about operators: given to `@lower` and `describe`, or derived from the operator's schema and tags.

    @lower(aten.hardswish, exact=WIDE, group="light activations")    # beside its formula
    describe(aten.convolution.default, library=True)                                   # without a lowering of its own
    describe("linalg_*", waits=True)                                                   # all that are called so
    facts(aten.convolution.default).library                                            # asked where it matters

A packet or a name stands for all overloads. Facts about one overload take precedence over facts about its name, and
those over facts about all lowerings in a file (`of_family`). An operator that writes into its first argument (`relu_`)
has the facts of the operator that returns the result, and an operator on lists (`_foreach_exp`) is as exact as the one
on tensors. Functions and methods of torch above its operators are identified by name: `named("conv2d")`. Facts about
them are in functions.py, so that a process that finds its graphs in the cache imports no lowering.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flambeau.torch_compat.ops import OpOverload, OpOverloadPacket

# The devices on which a lowering gives the bits of eager's kernels, each with the dtypes for which it does not. Whether
# the functions in a formula (exp, tanh) are exact depends on the machine: `Capabilities.inexact`.
Exact = Mapping[str, frozenset[torch.dtype]]
NOWHERE: dict[str, frozenset[torch.dtype]] = {}
# For formulas that in eager itself differ between a CPU's vector loop and its remainder loop: whether NaN has a slope,
# and whether a number shrinks to minus zero.
ON_CUDA = {"cuda": frozenset[torch.dtype]()}
# For lowerings that round nothing (they move, compare or choose values), or round exactly where eager's kernels do: at
# most once, or several times in a plain order.
EVERYWHERE = ON_CUDA | {"cpu": frozenset[torch.dtype]()}
# On a CPU, eager computes small floats in float32 throughout in its vector loop, but rounds after each step in the
# remainder loop. So formulas of several steps are only exact for float32 and float64, as is the sign of zero bounds.
WIDE = EVERYWHERE | {"cpu": frozenset((torch.float16, torch.bfloat16))}


@dataclass(frozen=True)
class Facts:
    """The facts about one operator. Each has a neutral default or is derived from the schema; most need none."""

    # ---- how it is computed
    family: str = ""  # the file that contains its lowering
    needs: str | None = None  # the attribute of `Capabilities` that its lowering requires
    reads_memory: bool = False  # its result depends on the memory layout of its first argument
    exact: Exact = dataclasses.field(default_factory=dict)  # where its lowering or decomposition gives eager's bits
    takes_fp8: bool = False  # its lowering supports 8-bit floats, if the machine has them
    library: bool = False  # a machine's library computes it, if there is one and no lowering takes the call
    # On GPUs the library runs its last step as a separate kernel: the arguments without it, and the step; or None.
    last_step: Callable[..., tuple[tuple[Any, ...], Callable[[Any], Any]] | None] | None = None
    factors: int | None = None  # for a matrix product: the position of the first of the two factors
    ends: int | None = None  # for a product over parts of a dimension: the position of the argument with their ends
    contracts: bool = False  # a sum of products, mostly computed by a library: no kernel fuses across it
    number: str | int | None = None  # an argument that makes Dynamo decompose the call if it is a number
    out: OpOverload | None = None  # the overload that writes into given memory
    # Use torch's decomposition although it is not in the core set; or this one, if torch's differs from eager.
    decomposed: bool | Callable[..., Any] = False
    # Torch decomposes some operators before it looks at any table, by Python kernels below autograd. While a graph is
    # traced, these replace them: `traced` in general, `traced_exactly` in exact numerics, `traced_shape` for metadata.
    traced: Callable[..., Any] | None = None
    traced_exactly: Callable[..., Any] | None = None
    traced_shape: Callable[..., Any] | None = None
    traced_by_formula: bool = False  # torch decomposes it before it computes its gradient
    unrounded: bool = False  # torch's Python kernel only models memory: which is written, and how long it is
    group: str = ""  # the group for `accelerate`: one of `eager.operator_forms.GROUPS`

    # ---- what a call of it does
    known: bool = False  # its schema describes all its effects; other operators may do anything
    random: bool = False  # it draws random numbers, so two calls are not equal
    shaped_by_data: bool = False  # data determines the size of its results
    guessed: bool = False  # likewise, but not every version of torch knows it
    waits: bool = False  # the host waits for data from the device, so it cannot be recorded
    stateful: bool = False  # it concerns autograd or memory, not values: regions must not contain it
    same: bool = False  # its result has the values of its argument
    elementwise: bool = False  # each element of its result depends only on the elements at the same place
    undefined: bool = False  # the contents of its results are undefined
    writes: tuple[str, ...] = ()  # arguments that it writes to although its schema does not say so
    masks: bool = False  # it takes indices, which may be masks
    on_host: tuple[str, ...] = ()  # arguments that may be CPU tensors when others are on a device
    checks: bool = True  # it checks its arguments, as public operators do; others trust their callers
    in_place: tuple[str, ...] = ()  # names of operators that write its results into arguments

    # ---- in a joint graph of forward and backward
    fuses: bool = False  # its kernel fuses the maps before it, so their results need not be saved for it
    computes: int | None = None  # the position of the only argument for which that is so, if not for all
    is_map: bool = False  # it is a map itself, though torch's tags do not say so, and its result need not be saved
    asks_equality: bool = False  # it compares values for equality, so these must be computed only once
    # (find, *arguments) -> arguments that save less for the backward; find(op, *args): an equal call in the graph
    keeps_less: Callable[..., tuple[Any, ...]] | None = None
    # (call, *arguments) -> its result from operators that save less; call(op, *arguments): makes a new call
    apart: Callable[..., Any] | None = None

    # ---- memory layout of its results
    view: bool = False  # its results are views of its first argument
    copies_storage: bool = False  # it copies the argument's whole storage, and writes into part of the copy
    strides: str = ""  # the rule in `capture.eager_strides` for its strides, if torch's tracing is wrong
    operands: int = 0  # the number of operands of an elementwise kernel; for formulas, the formula's
    any_order: bool = False  # the memory order of its arguments does not affect it
    fresh: bool = False  # and its results are not views of them

    # ---- on the device
    composed: Callable[..., Any] | None = None  # by other operators; NotImplemented: the CPU computes it
    parts: int = 0  # the most tensors in a list that one kernel takes; longer lists are composed
    instead: Callable[..., Any] | None = None  # what the CPU computes, if torch differs on devices like ours
    instead_of_sparse: Callable[..., Any] | None = None  # the same for sparse tensors
    on_cpu: bool = False  # torch composes it for the devices that it knows, so the CPU computes it here
    keeps_shape: bool = False  # outputs keep their shape, unless the number of elements differs
    sparse_structure: bool = False  # its kernels for sparse tensors access no memory, but call other operators


_FIELDS = frozenset(f.name for f in dataclasses.fields(Facts))
LOWERINGS: dict[OpOverload, Callable[..., Any]] = {}
SPACES = ("aten", "prims", "prim", "flambeau")
Given = dict[str, Any]
_GIVEN: dict[OpOverload | str, Given] = {}  # by overload, or by name
_PATTERNS: dict[str, Given] = {}
_FAMILIES: dict[str, Given] = {}


def name_of(op: Any) -> str:
    """The operator's name without its overload, and for ATen without the namespace."""
    qualified: str = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    return qualified.removeprefix("aten::")


def describe(*ops: Any, **given: Any) -> None:
    """State facts about these operators: overloads, packets, names, or patterns of names."""
    if unknown := given.keys() - _FIELDS:
        raise TypeError(f"there is no fact called {', '.join(sorted(unknown))}: see Facts")
    for op in ops:
        key = name_of(op) if isinstance(op, OpOverloadPacket) else op
        home: dict[Any, Given] = _PATTERNS if isinstance(key, str) and "*" in key else _GIVEN
        home[key] = {**home.get(key, {}), **given}
    _found.cache_clear()


def of_family(**given: Any) -> None:
    """State facts about all lowerings in the file that calls this."""
    _FAMILIES[describing_file()] = given


def describing_file() -> str:
    """The file of ops/ that is registering. The lowering itself does not tell: its formula may be in ir/scalar.py."""
    frame = sys._getframe(1)
    own = (__name__, f"{__package__}.registry")
    while frame.f_back is not None and frame.f_globals["__name__"] in own:
        frame = frame.f_back
    return str(frame.f_globals["__name__"]).rpartition(".")[2]


@cache
def ops_loaded() -> None:
    """Import every family of operators, so that a new file in this folder needs no other edit."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")


def facts(op: Any) -> Facts:
    """The facts about an operator: an overload, or a packet."""
    ops_loaded()
    return _found(op)


def named(name: str) -> Facts:
    """The facts about a function or a method of torch."""
    from . import functions  # noqa: F401

    return _found(name)


def names_with(fact: str) -> list[tuple[str, Any]]:
    """The functions and methods of torch that have this fact, with its value."""
    from . import functions  # noqa: F401

    return [(name, given[fact]) for name, given in _GIVEN.items() if isinstance(name, str) and fact in given]


def described(fact: str) -> Iterable[tuple[OpOverload | str, Any]]:
    """The operators for which this fact was stated, with its value."""
    ops_loaded()
    return [(op, given[fact]) for op, given in _GIVEN.items() if fact in given]


def overloads_with(fact: str) -> dict[OpOverload, Any]:
    """The overloads for which this fact was stated individually, with its value."""
    return {op: value for op, value in described(fact) if isinstance(op, OpOverload)}


def overloads_named(names: Iterable[str]) -> list[OpOverload]:
    """All overloads of operators with these names, if they exist."""
    packets = (getattr(getattr(torch.ops, space or "aten"), name, None)
               for space, _, name in (n.rpartition("::") for n in names))
    return [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]


@cache
def _found(op: Any) -> Facts:
    if isinstance(op, OpOverloadPacket):
        op = getattr(op, op.overloads()[0])
    overload = op if isinstance(op, OpOverload) else None
    own = _GIVEN.get(op, {})
    named = _named(name_of(op) if overload else str(op))
    if overload and overload._schema.is_mutable:  # its results lie in its arguments' memory
        named = {fact: value for fact, value in named.items() if fact not in ("strides", "operands", "view")}
    told, family = _told(overload) if overload else {}, _FAMILIES.get(own.get("family", ""), {})
    found = Facts(**{**told, **family, **named, **own})
    by_data = found.shaped_by_data or found.guessed
    return dataclasses.replace(found, known=found.known or bool(found.family), shaped_by_data=by_data,
                               waits=found.waits or by_data)


def _named(name: str) -> Given:
    """The facts for a name, including those inherited from the names it is derived from."""
    found: Given = {}
    if name.endswith("_") and not name.endswith("__"):
        found = {**_named(name[:-1]), "fresh": False}
    elif name.startswith("_foreach_"):
        found = {"exact": _named(name.removeprefix("_foreach_")).get("exact", NOWHERE)}
    for pattern, given in _PATTERNS.items():
        if fnmatchcase(name, pattern):
            found = {**found, **given}
    return {**found, **_GIVEN.get(name, {})}


def _told(op: OpOverload) -> Given:
    """The facts derived from the schema and the tags."""
    name, arguments, tags = name_of(op), op._schema.arguments, set(op.tags)
    tensors = sum("Tensor" in str(a.type) for a in arguments)
    indices = tuple(a.name for a in arguments if str(a.type) == "List[Optional[Tensor]]")
    return {
        "known": op.namespace in SPACES,
        "random": torch.Tag.nondeterministic_seeded in tags or any("Generator" in str(a.type) for a in arguments),
        "shaped_by_data": bool(tags & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}),
        # Private operators on several tensors, and gradients, may read beyond their arguments' memory.
        "checks": not (name.startswith("_") and tensors > 1 or "backward" in name),
        "masks": bool(indices),
        "elementwise": torch.Tag.pointwise in tags,
        "on_host": indices,
        "view": op.is_view,
        "in_place": _in_place(name),
    }


def _in_place(name: str) -> tuple[str, ...]:
    """In-place names by torch's conventions: relu and relu_, normal_functional and normal_."""
    base = name.removesuffix("_functional")
    return (f"{base}_",) if base == name else (base, f"{base}_")


def is_exact(op: OpOverload, device: str, dtypes: Collection[torch.dtype] = ()) -> bool:
    """Whether the lowering gives the bits of eager's kernel on this device for these dtypes, functions aside."""
    called = facts(op).exact.get(device)
    return called is not None and called.isdisjoint(dtypes)
