"""Finds which operators have a lowering, in which dtypes, from the registry and PyTorch's own operator tests.

No operator is run. A lowering works for all dtypes of the loop language, so a cell follows from three facts: whether
there is a lowering, whether the machine has the dtype, and whether PyTorch has the operator in that dtype on the CPU.
The last fact comes from OpInfo, PyTorch's table of operators for tests. An operator that is not in this table is marked
as assumed, and so are all operators if the table cannot be imported.
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
    "partly": "compiled by Flambeau, but ATen is called for some arguments",
    "library": "one call of ATen's library (matrix products, convolutions, attention)",
    "extern": "ATen's operator is called",
    "none": "PyTorch does not have the operator in this dtype on the CPU",
}
# A device that only Flambeau knows has no ATen kernels. Those of the CPU are used.
CELLS_OF_A_DEVICE = {
    "native": "a kernel on the device",
    "partly": "a kernel on the device, but some arguments run on the CPU",
    "fallback": "runs on the CPU, and is counted (flambeau.fallbacks)",
    "unsupported": "PyTorch does not have the operator in this dtype on the CPU",
}
_ON_A_DEVICE = {"library": "fallback", "extern": "fallback", "none": "unsupported"}
LIBRARY, UNLOWERED = "contraction", "without a lowering"  # families

# Endings that names in graphs have and names in OpInfo do not: `_log_softmax_backward_data` belongs to `log_softmax`.
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
    """All operators with a lowering, all contractions, and all operators for which ATen is called.

    `machine`: the machine, by default the CPU. `device`: for tensors on torch.device("flambeau"), with the cells of
    CELLS_OF_A_DEVICE.
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
        # Views of the device's memory work in every dtype.
        everywhere = best == "library" or (device and all(op.is_view for op in overloads))
        best = "native" if everywhere and best != "library" else best
        for d in dtypes:
            have = found is None or d in found
            # Library calls are ATen's, and work in every dtype.
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
    """Whether a lowering, or a function of the same file that it calls, can return NotImplemented."""
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
    """Operator name -> its dtypes on the CPU. Empty if PyTorch's test tables cannot be imported."""
    try:
        from flambeau.torch_compat.testing import operator_tables
    except ImportError:  # they need packages that PyTorch does not require
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
    """The dtypes of an operator of a graph, found by the closest name in OpInfo."""
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
    """Operators for which a graph calls ATen: no lowering, no decomposition, not a contraction.

    PyTorch has thousands of internal operators. These are the ones of its core set, and those that OpInfo tests on the
    CPU.
    """
    # torch 2.11 decomposes the forms with named dimensions into the others.
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
    """A self-contained web page with filters and a search."""
    data = {
        "title": f"Operators on {target}",
        "about": "From the lowerings and from PyTorch's operator tests (OpInfo); the operators were not run. Operators "
                 "that PyTorch decomposes before a backend sees them are not listed; their parts are.",
        "cells": cells,
        "families": list(dict.fromkeys(row.family for row in rows)),
        "dtypes": list(rows[0].cells) if rows else [],
        "operators": [{"name": row.name.removeprefix("aten."), "family": row.family, "cells": row.cells,
                       "assumed": row.assumed} for row in rows],
    }
    template = Path(__file__).with_name("coverage_page.html").read_text()
    return template.replace("DATA", json.dumps(data).replace("<", "\\u003c"), 1)
