"""Facts about operators: given to `@lower` and `describe`, or taken from the operator's schema and tags.

    @lower(aten.hardswish, exact=WIDE, group="light activations")    # beside its formula
    describe(aten.convolution.default, library=True)                                   # without a lowering of its own
    describe("linalg_*", waits=True)                                                   # all that are called so
    facts(aten.convolution.default).library                                            # asked where it matters

A packet or a name stands for all overloads; what is said of one overload goes before what is said of its name, and that
before what is said of all lowerings in a file (`of_family`). An operator that writes into its first argument (`relu_`)
is described by the one that returns its result, and one of lists (`_foreach_exp`) has the bits of the one of tensors.
Functions and methods of torch above its operators go by their names: `named("conv2d")`. What is known of them stands
in functions.py, so that a process that finds its graphs in the cache imports no lowering.
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

# The devices where a lowering has the bits of eager's kernels; for each, the dtypes with which it has not. What the
# functions of a formula (exp, tanh) are worth is the machine's to say: `Capabilities.inexact`.
Exact = Mapping[str, frozenset[torch.dtype]]
NOWHERE: dict[str, frozenset[torch.dtype]] = {}
# Some formulas differ in eager itself between the vectors of a CPU and what is left over after them: whether NaN has a
# slope, and whether a number shrinks to minus zero.
ON_CUDA = {"cuda": frozenset[torch.dtype]()}
# Nothing is rounded (values are moved, compared or chosen), or the formula is that of eager's kernels, rounding by
# rounding: at most one, or several in a plain order.
EVERYWHERE = ON_CUDA | {"cpu": frozenset[torch.dtype]()}
# On a CPU, eager computes small floats in float32 up to the end within its vectors, and step by step in what is left
# over after them: formulas of several steps are those of float32 and float64. So is the sign of zeros that are bounds.
WIDE = EVERYWHERE | {"cpu": frozenset((torch.float16, torch.bfloat16))}


@dataclass(frozen=True)
class Facts:
    """Every fact has a neutral default, or follows from the schema: most operators need none."""

    # ---- how it is computed
    family: str = ""  # the file that has its lowering
    needs: str | None = None  # the one of `Capabilities` without which its lowering is not used
    reads_memory: bool = False  # what it returns depends on how its first argument lies in memory
    exact: Exact = dataclasses.field(default_factory=dict)  # where its lowering, or decomposition, has eager's bits
    takes_fp8: bool = False  # its lowering knows the small floats of 8 bits, where the machine has them
    library: bool = False  # a machine's library computes it, where it has one and no lowering takes the call
    # On GPUs the library takes its last step in a kernel of its own: the arguments without it, and the step; or None.
    last_step: Callable[..., tuple[tuple[Any, ...], Callable[[Any], Any]] | None] | None = None
    factors: int | None = None  # of a product of matrices: the place of the first of two arguments that it multiplies
    ends: int | None = None  # of such products for parts of a dimension: the place of the argument with their ends
    contracts: bool = False  # a sum of products, mostly a library's: no kernel reaches across it
    number: str | int | None = None  # an argument for which Dynamo would write it out in others, if it is a number
    out: OpOverload | None = None  # the form that writes into memory of the program
    # Torch's decomposition is taken, beyond its core set; or this one, where torch's is not eager's.
    decomposed: bool | Callable[..., Any] = False
    # Torch takes some apart before any table is asked, by Python kernels below autograd. While a graph is traced, this
    # one stands in their place; in exact numerics this one; and this one says how its results look.
    traced: Callable[..., Any] | None = None
    traced_exactly: Callable[..., Any] | None = None
    traced_shape: Callable[..., Any] | None = None
    traced_by_formula: bool = False  # torch takes it apart before it takes its gradient
    unrounded: bool = False  # torch's Python kernel says what eager's does: which memory is written, how long it is
    group: str = ""  # of eager operators that `accelerate` replaces: one of `eager.operator_forms.GROUPS`

    # ---- what a call of it does
    known: bool = False  # its schema says all that it does: others may do anything
    random: bool = False  # it draws numbers: two calls are not one
    shaped_by_data: bool = False  # only data say how large its results are
    guessed: bool = False  # so it is, and not every version of torch knows
    waits: bool = False  # it reads on the host what the device computes, so that it cannot be recorded
    stateful: bool = False  # about autograd or memory, not about values: no region has it
    same: bool = False  # its result has the values that it is given
    elementwise: bool = False  # each element of its result follows from those at its place
    undefined: bool = False  # nobody knows what its results hold
    writes: tuple[str, ...] = ()  # arguments that it writes to although its schema does not say so
    masks: bool = False  # it takes indices, which may be masks
    on_host: tuple[str, ...] = ()  # arguments that may be tensors of the CPU beside those of a device
    checks: bool = True  # it checks its arguments, as operators for people do; others trust who calls them
    in_place: tuple[str, ...] = ()  # names of operators that write its results into arguments

    # ---- in a joint graph of forward and backward
    fuses: bool = False  # its kernel takes in the maps before it, which need not be kept for it
    computes: int | None = None  # the place of the one argument for which its kernel does so, if not for all of them
    is_map: bool = False  # nor need its own result be kept: it is a map itself, though torch's tags do not say so
    asks_equality: bool = False  # of two values, which must be computed once: again, they might differ
    # (find, *arguments) -> arguments of which less is kept for the backward; find(op, *args): another call of the graph
    keeps_less: Callable[..., tuple[Any, ...]] | None = None
    # (call, *arguments) -> its result, made of operators of which less is kept; call(op, *arguments): a new call
    apart: Callable[..., Any] | None = None

    # ---- how its results lie in memory
    view: bool = False  # in the memory of its first argument
    copies_storage: bool = False  # all of its argument's memory is copied, and the part that this is written to
    strides: str = ""  # the rule of `capture.eager_strides` for them, where torch's tracing has others
    operands: int = 0  # of its kernel, if it is elementwise; for formulas, that of the formula
    any_order: bool = False  # the order in memory of its arguments means nothing to it
    fresh: bool = False  # nor are its results views of them

    # ---- on the device
    composed: Callable[..., Any] | None = None  # of other operators; NotImplemented: the CPU computes this call
    parts: int = 0  # of a list, that one kernel takes: with more it is composed
    instead: Callable[..., Any] | None = None  # what the CPU computes where torch does otherwise on devices like ours
    instead_of_sparse: Callable[..., Any] | None = None  # the same, for sparse tensors
    on_cpu: bool = False  # torch puts it together for the devices that it knows: the CPU computes it
    keeps_shape: bool = False  # of what it writes to, unless that has another number of elements
    sparse_structure: bool = False  # its kernels for sparse tensors look at no memory: they call other operators


_FIELDS = frozenset(f.name for f in dataclasses.fields(Facts))
LOWERINGS: dict[OpOverload, Callable[..., Any]] = {}
SPACES = ("aten", "prims", "prim", "flambeau")
Given = dict[str, Any]
_GIVEN: dict[OpOverload | str, Given] = {}  # by overload, or by name
_PATTERNS: dict[str, Given] = {}
_FAMILIES: dict[str, Given] = {}


def name_of(op: Any) -> str:
    """Without its overload, and for operators of ATen without the namespace."""
    qualified: str = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    return qualified.removeprefix("aten::")


def describe(*ops: Any, **given: Any) -> None:
    """Say something of these operators: overloads, packets, names, or patterns of names."""
    if unknown := given.keys() - _FIELDS:
        raise TypeError(f"there is no fact called {', '.join(sorted(unknown))}: see Facts")
    for op in ops:
        key = name_of(op) if isinstance(op, OpOverloadPacket) else op
        home: dict[Any, Given] = _PATTERNS if isinstance(key, str) and "*" in key else _GIVEN
        home[key] = {**home.get(key, {}), **given}
    _found.cache_clear()


def of_family(**given: Any) -> None:
    """Say something of all lowerings of the file that calls this."""
    _FAMILIES[describing_file()] = given


def describing_file() -> str:
    """The file of ops/ that registers now. The lowering does not tell: its formula may stand in ir/scalar.py."""
    frame = sys._getframe(1)
    own = (__name__, f"{__package__}.registry")
    while frame.f_back is not None and frame.f_globals["__name__"] in own:
        frame = frame.f_back
    return str(frame.f_globals["__name__"]).rpartition(".")[2]


@cache
def ops_loaded() -> None:
    """Import every family: a new file in this folder needs no other edit."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")


def facts(op: Any) -> Facts:
    """Of an operator: an overload, or a packet."""
    ops_loaded()
    return _found(op)


def named(name: str) -> Facts:
    """Of a function or a method of torch."""
    from . import functions  # noqa: F401

    return _found(name)


def names_with(fact: str) -> list[tuple[str, Any]]:
    """The functions and methods of torch that have this fact."""
    from . import functions  # noqa: F401

    return [(name, given[fact]) for name, given in _GIVEN.items() if isinstance(name, str) and fact in given]


def described(fact: str) -> Iterable[tuple[OpOverload | str, Any]]:
    """What this fact was said of, and how."""
    ops_loaded()
    return [(op, given[fact]) for op, given in _GIVEN.items() if fact in given]


def overloads_with(fact: str) -> dict[OpOverload, Any]:
    """The overloads that have been given this fact one by one, and what it is."""
    return {op: value for op, value in described(fact) if isinstance(op, OpOverload)}


def overloads_named(names: Iterable[str]) -> list[OpOverload]:
    """All overloads of operators of these names, where there are such."""
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
    if overload and overload._schema.is_mutable:  # its results lie where its arguments do
        named = {fact: value for fact, value in named.items() if fact not in ("strides", "operands", "view")}
    told, family = _told(overload) if overload else {}, _FAMILIES.get(own.get("family", ""), {})
    found = Facts(**{**told, **family, **named, **own})
    by_data = found.shaped_by_data or found.guessed
    return dataclasses.replace(found, known=found.known or bool(found.family), shaped_by_data=by_data,
                               waits=found.waits or by_data)


def _named(name: str) -> Given:
    """What is said of a name, and of those that it is made of."""
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
    """What its schema and its tags say."""
    name, arguments, tags = name_of(op), op._schema.arguments, set(op.tags)
    tensors = sum("Tensor" in str(a.type) for a in arguments)
    indices = tuple(a.name for a in arguments if str(a.type) == "List[Optional[Tensor]]")
    return {
        "known": op.namespace in SPACES,
        "random": torch.Tag.nondeterministic_seeded in tags or any("Generator" in str(a.type) for a in arguments),
        "shaped_by_data": bool(tags & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}),
        # Private ones of several tensors and gradients may read beyond what they are given.
        "checks": not (name.startswith("_") and tensors > 1 or "backward" in name),
        "masks": bool(indices),
        "elementwise": torch.Tag.pointwise in tags,
        "on_host": indices,
        "view": op.is_view,
        "in_place": _in_place(name),
    }


def _in_place(name: str) -> tuple[str, ...]:
    """By the names that torch gives to pairs: relu and relu_, normal_functional and normal_."""
    base = name.removesuffix("_functional")
    return (f"{base}_",) if base == name else (base, f"{base}_")


def is_exact(op: OpOverload, device: str, dtypes: Collection[torch.dtype] = ()) -> bool:
    """Whether what the lowering computes has the bits of eager's kernel there, its functions apart, in these dtypes."""
    called = facts(op).exact.get(device)
    return called is not None and called.isdisjoint(dtypes)
