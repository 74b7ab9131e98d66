"""Which operators have a lowering, in which dtypes: from the registry and PyTorch's own operator tests.

Nothing is run. A lowering is written for all dtypes of the loop language at once, so what a cell says
follows from three facts: whether there is a lowering, whether the machine has the dtype, and whether
PyTorch has the operator in that dtype on the CPU. The last comes from OpInfo, PyTorch's table of operators
for testing; an operator that is not in it, or every one where it cannot be imported, is marked as assumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from flambeau.capture.decompositions import table as decompositions
from flambeau.compare.copied_call import names as names_of
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import SUPPORTED
from flambeau.ops import LOWERINGS, ops_loaded
from flambeau.ops.facts import facts, overloads_with
from flambeau.torch_compat.dispatch import DispatchKey, all_operator_names
from flambeau.torch_compat.ops import OpOverload

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
# On a device that only Flambeau knows there is no ATen to call: the CPU's does it.
CELLS_OF_A_DEVICE = {
    "native": "a kernel on the device",
    "partly": "a kernel on the device, except for some arguments, with which it is computed on the CPU",
    "fallback": "computed on the CPU, and counted (flambeau.fallbacks)",
    "unsupported": "PyTorch does not have the operator in this dtype on the CPU",
}
_ON_A_DEVICE = {"library": "fallback", "extern": "fallback", "none": "unsupported"}
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


def coverage(dtypes: Iterable[torch.dtype] = DTYPES, machine: Capabilities | None = None,
             device: bool = False) -> list[Operator]:
    """Every operator with a lowering, every contraction, and those that are called as they are.

    On a machine, or on the CPU; `device`: for tensors on torch.device("flambeau"), in the words of CELLS_OF_A_DEVICE.
    """
    ops_loaded()
    supported = SUPPORTED if machine is None else machine.dtypes
    contracts = machine is not None and machine.contracts
    known = opinfo_dtypes()
    packets: dict[str, list[OpOverload]] = {}
    for op in (*LOWERINGS, *overloads_with("library"), *unlowered(known)):
        packets.setdefault(name_of(op), []).append(op)
    rows = []
    for name, overloads in packets.items():
        ours = any(o in LOWERINGS and ((needs := facts(o).needs) is None or getattr(machine, needs, False))
                   for o in overloads)
        library = not contracts and any(facts(o).library for o in overloads)
        found = lookup(name.partition(".")[2], known)
        row = Operator(name, family_of(overloads), len(set(overloads)), assumed=found is None)
        partly = any(hands_over(LOWERINGS[o]) for o in overloads if o in LOWERINGS)
        best = "library" if library else "extern" if not ours else "partly" if partly else "native"
        # Views of the device's memory move nothing, whatever it holds.
        everywhere = best == "library" or (device and all(op.is_view for op in overloads))
        best = "native" if everywhere and best != "library" else best
        for d in dtypes:
            have = found is None or d in found
            # A library call is ATen's own, whatever the dtype.
            cell = "none" if not have else best if d in supported or everywhere else "extern"
            row.cells[str(d).removeprefix("torch.")] = _ON_A_DEVICE.get(cell, cell) if device else cell
        rows.append(row)
    return sorted(rows, key=lambda r: (r.family == UNLOWERED, r.family, r.name))


def name_of(op: OpOverload) -> str:
    return str(op.overloadpacket)


def family_of(overloads: list[OpOverload]) -> str:
    if any(facts(o).library for o in overloads):
        return LIBRARY
    return next((family for o in overloads if (family := facts(o).family)), UNLOWERED)


def hands_over(lowering: Callable[..., Any], depth: int = 2) -> bool:
    """Whether a lowering can return NotImplemented, itself or through functions of its file that it calls."""
    fn = getattr(lowering, "__wrapped__", lowering)
    if not isinstance(fn, FunctionType):
        return False
    names = set(names_of(fn.__code__))
    if "NotImplemented" in names:
        return True
    called = (fn.__globals__.get(name) for name in names)
    return depth > 0 and any(hands_over(f, depth - 1) for f in called
                             if isinstance(f, FunctionType) and f.__module__ == fn.__module__)


# ---- what PyTorch has ------------------------------------------------------------------------------------


def opinfo_dtypes() -> dict[str, Dtypes]:
    """Operator name -> the dtypes it has on the CPU. Empty where PyTorch's test tables cannot be imported."""
    try:
        from flambeau.torch_compat.testing import operator_tables
    except ImportError:  # they need packages that PyTorch itself does not
        return {}
    out: dict[str, Dtypes] = {}
    for info in operator_tables():
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


def unlowered(known: dict[str, Dtypes]) -> list[OpOverload]:
    """Operators that a captured graph calls as they are: neither lowered, nor taken apart, nor a contraction.

    Of PyTorch's thousands of internal ones, those of its core set and those that OpInfo tests on the CPU.
    """
    # torch 2.11 takes the forms with named dimensions apart, into the others.
    taken_apart = (o for o in decompositions(False)
                   if isinstance(o, OpOverload) and "dimname" not in o._overloadname)
    handled = {name_of(o) for o in (*LOWERINGS, *overloads_with("library"), *taken_apart)}
    out = []
    for full in all_operator_names():
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten" or name.endswith("_backward") or f"aten.{name}" in handled:
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        composite = op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        tensors = any("Tensor" in str(r.type) for r in op._schema.returns)
        wanted = bool(known[name][0]) if name in known else torch.Tag.core in op.tags
        if wanted and tensors and not composite and not op._schema.is_mutable:
            out.append(op)
    return out


# ---- as a page -------------------------------------------------------------------------------------------


def page(rows: list[Operator], target: str, cells: dict[str, str]) -> str:
    """A page of its own, which filters and searches without anything from elsewhere."""
    data = {
        "title": f"Operators on {target}",
        "about": "What follows from the lowerings and from PyTorch's operator tests (OpInfo); nothing was run for it. "
                 "Operators that PyTorch takes apart before a backend sees them have no row: their parts have.",
        "cells": cells,
        "families": list(dict.fromkeys(row.family for row in rows)),
        "dtypes": list(rows[0].cells) if rows else [],
        "operators": [{"name": row.name.removeprefix("aten."), "family": row.family, "cells": row.cells,
                       "assumed": row.assumed} for row in rows],
    }
    template = Path(__file__).with_name("coverage_page.html").read_text()
    return template.replace("DATA", json.dumps(data).replace("<", "\\u003c"), 1)
