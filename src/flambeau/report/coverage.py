"""Which operators have a lowering, in which dtypes: from the registry and PyTorch's own operator tests.

Nothing is run. A lowering is written for all dtypes of the loop language at once, so what a cell says
follows from three facts: whether there is a lowering, whether the loop language has the dtype, and whether
PyTorch has the operator in that dtype on the CPU. The last comes from OpInfo, PyTorch's table of operators
for testing; an operator that is not in it, or every one where it cannot be imported, is marked as assumed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from flambeau.frontends.decompositions import table as decompositions
from flambeau.ir.dtypes import SUPPORTED
from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.contraction import CONTRACTIONS
from flambeau.ops.registry import FAMILIES

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64,
)
CELLS = {
    "native": "compiled by Flambeau",
    "partly": "compiled by Flambeau, except for some arguments, with which ATen is called",
    "library": "one call of ATen's library (matrix products, convolutions, attention)",
    "extern": "called as it is in ATen",
    "none": "PyTorch does not have the operator in this dtype on the CPU",
}
LIBRARY, UNLOWERED = "contraction", "without a lowering"  # families

# How names in graphs differ from the names in OpInfo: `_log_softmax_backward_data` is about `log_softmax`.
ENDINGS = ("_backward_data", "_backward", "_forward", "_functional", "_copy", "_with_indices", "_kernel",
           "_for_cpu", "_aa", "_dense")
Dtypes = tuple[set[torch.dtype], set[torch.dtype]]  # forward, backward


@dataclass
class Operator:
    name: str  # aten.add
    family: str
    overloads: int
    cells: dict[str, str] = field(default_factory=dict)  # dtype -> key of CELLS
    assumed: bool = False  # OpInfo does not know the operator


def coverage(dtypes: Iterable[torch.dtype] = DTYPES) -> list[Operator]:
    """Every operator with a lowering, every contraction, and those that are called as they are."""
    ops_loaded()
    known = opinfo_dtypes()
    packets: dict[str, list[torch._ops.OpOverload]] = {}
    for op in (*LOWERINGS, *CONTRACTIONS, *unlowered(known)):
        packets.setdefault(name_of(op), []).append(op)
    rows = []
    for name, overloads in packets.items():
        ours = sum(o in LOWERINGS for o in overloads)
        library = any(o in CONTRACTIONS for o in overloads)
        found = lookup(name.partition(".")[2], known)
        row = Operator(name, family_of(overloads), len(set(overloads)), assumed=found is None)
        partly = any(hands_over(LOWERINGS[o]) for o in overloads if o in LOWERINGS)
        best = "library" if library else "extern" if not ours else "partly" if partly else "native"
        for d in dtypes:
            have = found is None or d in found
            # A library call is ATen's own, whatever the dtype.
            row.cells[str(d).removeprefix("torch.")] = (
                "none" if not have else best if d in SUPPORTED or best == "library" else "extern")
        rows.append(row)
    return sorted(rows, key=lambda r: (r.family == UNLOWERED, r.family, r.name))


def name_of(op: torch._ops.OpOverload) -> str:
    return str(op.overloadpacket)


def family_of(overloads: list[torch._ops.OpOverload]) -> str:
    if any(o in CONTRACTIONS for o in overloads):
        return LIBRARY
    return next((FAMILIES[o] for o in overloads if o in FAMILIES), UNLOWERED)


def hands_over(lowering: Callable[..., Any], depth: int = 2) -> bool:
    """Whether a lowering can return NotImplemented, itself or through functions of its file that it calls."""
    fn = getattr(lowering, "__wrapped__", lowering)
    if not isinstance(fn, FunctionType):
        return False
    names = set(names_in(fn.__code__))
    if "NotImplemented" in names:
        return True
    called = (fn.__globals__.get(name) for name in names)
    return depth > 0 and any(hands_over(f, depth - 1) for f in called
                             if isinstance(f, FunctionType) and f.__module__ == fn.__module__)


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from names_in(const)


# ---- what PyTorch has ------------------------------------------------------------------------------------


def opinfo_dtypes() -> dict[str, Dtypes]:
    """Operator name -> the dtypes it has on the CPU. Empty where PyTorch's test tables cannot be imported."""
    try:
        tables: ModuleType = importlib.import_module("torch.testing._internal.common_methods_invocations")
    except ImportError:  # they need packages that PyTorch itself does not
        return {}
    out: dict[str, Dtypes] = {}
    lists = [n for n in dir(tables) if n == "op_db" or n.startswith("foreach_") and n.endswith("_op_db")]
    for info in (info for name in lists for info in getattr(tables, name)):
        forward, backward = set(info.supported_dtypes("cpu")), set(info.supported_backward_dtypes("cpu"))
        last, whole = info.name.rpartition(".")[2], info.name.replace(".", "_")
        names = (last, whole, info.aten_name, info.aten_backward_name)
        for name in {n for n in names if n}:
            have = out.setdefault(name, (set(), set()))
            have[0].update(forward)
            have[1].update(backward)
    return out


def lookup(name: str, known: dict[str, Dtypes]) -> set[torch.dtype] | None:
    """The dtypes of an operator as it is called in graphs, by the nearest name that OpInfo has."""
    short, backward = name, "_backward" in name
    while True:
        for candidate in (short, short.lstrip("_")):
            if candidate in known:
                return known[candidate][backward]
        ending = next((e for e in ENDINGS if short.endswith(e)), None)
        if ending is None:
            return None
        short = short.removesuffix(ending)


def unlowered(known: dict[str, Dtypes]) -> list[torch._ops.OpOverload]:
    """Operators that a captured graph calls as they are: neither lowered, nor taken apart, nor a contraction.

    Of PyTorch's thousands of internal ones, those of its core set and those that OpInfo tests on the CPU.
    """
    taken_apart = (o for o in decompositions() if isinstance(o, torch._ops.OpOverload))
    handled = {name_of(o) for o in (*LOWERINGS, *CONTRACTIONS, *taken_apart)}
    out = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten" or name.endswith("_backward") or f"aten.{name}" in handled:
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        tensors = any("Tensor" in str(r.type) for r in op._schema.returns)
        wanted = bool(known[name][0]) if name in known else torch.Tag.core in op.tags
        if wanted and tensors and not composite and not op._schema.is_mutable:
            out.append(op)
    return out
