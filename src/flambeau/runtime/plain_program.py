"""Programs and launch plans as plain data: the table of all their types.

    data = to_plain(program)
    assert from_plain(data) == program
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import torch

from flambeau.codegen import source
from flambeau.ir import attention, program
from flambeau.ir.expr import Expr, Fold, walk
from flambeau.ir.faults import Bound, Fault
from flambeau.ir.index import Atom, Dyn, Index, Op, Sym
from flambeau.ir.nodes import Combine, Host, Level, Value
from flambeau.ir.program import Program

from . import launch_plan
from .address_tables import Table
from .launch_plan import Held, laid_out, on_device
from .operator_calls import Prepared, Strided, read_here, run_and_save, run_with
from .plain_data import Attributes, Codec, Malformed, Record
from .recordable import Recordable
from .streams.host_copies import fetch, send


class Expressions(Attributes):
    def parts(self, x: Expr) -> Iterable[Expr]:
        return walk(x)


NUMBER = int | None
# Interned types: equal values are one object.
INTERNED = (
    Attributes(Sym, True, name=str, extent=Index | None, lo=NUMBER, hi=NUMBER),
    Attributes(Op, True, kind=str, a=Index, b=Index, lo=NUMBER, hi=NUMBER),
    Attributes(Dyn, True, expr=Expr, lo=NUMBER, hi=NUMBER),
    Attributes(Index, True, terms=tuple[tuple[tuple[Atom, ...], int], ...], const=int),
    Expressions(Expr, True, op=str, dtype=torch.dtype, args=tuple[Expr, ...], attr=Any),
)
# All dataclasses and named tuples of four modules, and some from others.
OURS = [kind for module in (attention, program, launch_plan, source) for kind in vars(module).values()
        if (is_dataclass(kind) or hasattr(kind, "_fields")) and kind.__module__ == module.__name__]
RECORDS = (*INTERNED, Attributes(Held, tensor=torch.Tensor), *map(Record, (
    *OURS, Value, Host, Combine, Level, Fold, Bound, Table, Prepared, Strided, Recordable)))
# Functions that a program may call, by name.
FUNCTIONS = (on_device, laid_out, read_here, run_and_save, run_with, send, fetch)


def names(*values: Any) -> dict[str, Any]:
    return {f"{x.__module__}.{x.__name__}": x for x in values}


@cache
def codec() -> Codec:
    return Codec(RECORDS, enums=[Fault], values=names(*FUNCTIONS))


def to_plain(p: Program) -> bytes:
    """Encode a program. Raises Unwritable if it calls a function that only this process knows."""
    return codec().encode(p)


def from_plain(data: bytes) -> Program:
    """Decode a program. Raises Malformed if the data is not one."""
    made = codec().decode(data)
    if not isinstance(made, Program):
        raise Malformed(f"it is a {type(made).__name__}")
    return made
