"""What is known of an operator: `@lower` and `describe` say it, its schema and its tags tell the rest.

    @lower(aten.hardswish, exact=WIDE, group="light activations")    # beside its formula
    describe(aten.convolution.default, library=True)                                   # without a lowering of its own
    describe("linalg_*", waits=True)                                                   # all that are called so
    facts(aten.convolution.default).library                                            # whoever acts on it asks

A packet or a name stands for all overloads; what is said of one overload goes before what is said of its name, and that
before what is said of all lowerings in a file (`of_family`). An operator that writes into its first argument (`relu_`)
is described by the one that returns its result, and one of lists (`_foreach_exp`) by the one of tensors. Functions of
torch above its operators go by their names: `facts("conv2d")`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch

from flambeau.ir.dtypes import DType
from flambeau.torch_compat.ops import OpOverload, OpOverloadPacket

# The devices where a lowering has the bits of eager's kernels; for each, the dtypes with which it has not. What the
# functions of a formula (exp, tanh) are worth is the machine's to say: `Capabilities.inexact`.
Exact = Mapping[str, frozenset[DType]]
NOWHERE: dict[str, frozenset[DType]] = {}
# Some formulas differ in eager itself between the vectors of a CPU and what is left over after them: whether NaN has a
# slope, and whether a number shrinks to minus zero.
ON_CUDA = {"cuda": frozenset[DType]()}
# Nothing is rounded (values are moved, compared or chosen), or the formula is that of eager's kernels, rounding by
# rounding: at most one, or several in a plain order.
EVERYWHERE = ON_CUDA | {"cpu": frozenset[DType]()}
# On a CPU, eager computes small floats in float32 up to the end within its vectors, and step by step in what is left
# over after them: formulas of several steps are those of float32 and float64. So is the sign of zeros that are bounds.
WIDE = EVERYWHERE | {"cpu": frozenset((torch.float16, torch.bfloat16))}


@dataclass(frozen=True)
class Facts:
    """Every fact has a neutral default: most operators need none."""

    # ---- how it is computed
    family: str = ""  # the file that has its lowering
    needs: str | None = None  # the one of `Capabilities` without which its lowering is not used
    reads_memory: bool = False  # what it returns depends on how its first argument lies in memory
    exact: Exact = dataclasses.field(default_factory=dict)  # where its lowering has eager's bits
    library: bool = False  # a machine's library computes it, where it has one and no lowering takes the call
    group: str = ""  # of eager operators that `accelerate` replaces: one of `eager.operator_forms.GROUPS`

    # ---- what a call of it does, beyond its results
    random: bool = False  # it draws numbers: two calls are not one
    shaped_by_data: bool = False  # only data say how large its results are
    waits: bool = False  # it reads on the host what the device computes, so that it cannot be recorded


Given = dict[str, Any]
_GIVEN: dict[OpOverload | str, Given] = {}  # by overload, by name, or by a pattern of names
_FAMILIES: dict[str, Given] = {}


def name_of(op: Any) -> str:
    """Without its overload, and for operators of ATen without the namespace."""
    qualified: str = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    return qualified.removeprefix("aten::")


def describe(*ops: Any, **given: Any) -> None:
    """Say something of these operators: overloads, packets, names, or patterns of names."""
    for op in ops:
        key = name_of(op) if isinstance(op, OpOverloadPacket) else op
        _GIVEN[key] = {**_GIVEN.get(key, {}), **given}
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


def facts(op: Any) -> Facts:
    """Of an overload, or of a function or method of torch by its name."""
    from . import ops_loaded

    ops_loaded()
    return _found(op)


def described(fact: str) -> Iterable[tuple[OpOverload | str, Any]]:
    """What this fact was said of, and how."""
    from . import ops_loaded

    ops_loaded()
    return [(op, given[fact]) for op, given in _GIVEN.items() if fact in given]


@cache
def _found(op: Any) -> Facts:
    overload = op if isinstance(op, OpOverload) else None
    own = _GIVEN.get(op, {})
    found = Facts(**{**(_told(overload) if overload else {}), **_FAMILIES.get(own.get("family", ""), {}),
                     **_named(name_of(op) if overload else str(op)), **own})
    return dataclasses.replace(found, waits=found.waits or found.shaped_by_data)


def _named(name: str) -> Given:
    """What is said of a name, and of those that it is made of."""
    found: Given = {}
    if name.endswith("_") and not name.endswith("__"):
        found = _named(name[:-1])
    elif name.startswith("_foreach_"):
        found = _named(name.removeprefix("_foreach_"))
    for pattern in _patterns():
        if fnmatchcase(name, pattern):
            found = {**found, **_GIVEN[pattern]}
    return {**found, **_GIVEN.get(name, {})}


def _patterns() -> list[str]:
    return [key for key in _GIVEN if isinstance(key, str) and "*" in key]


def _told(op: OpOverload) -> Given:
    """What its schema and its tags say."""
    arguments, tags = op._schema.arguments, set(op.tags)
    return {
        "random": torch.Tag.nondeterministic_seeded in tags or any("Generator" in str(a.type) for a in arguments),
        "shaped_by_data": bool(tags & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}),
    }


def is_exact(op: OpOverload, device: str, dtypes: Collection[DType] = ()) -> bool:
    """Whether what the lowering computes has the bits of eager's kernel there, its functions apart, in these dtypes."""
    called = facts(op).exact.get(device)
    return called is not None and called.isdisjoint(dtypes)
