"""The interface of a GPU dialect: a table of words and functions that the writers in this folder read.

`opencl.py` is such a table, and `metal.py` overrides what differs from it. Writers ask it for everything in which the
languages differ: address spaces, the index of a work-item, barriers, accesses to several elements at once, atomic
updates of an element, and the signature of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import DType, is_bool, is_int
from flambeau.ir.expr import Expr
from flambeau.ir.index import Index
from flambeau.ir.program import Kernel
from flambeau.ir.tuning import POINTS

from ..dialect import UNSIGNED, CLike
from ..writer import Writer

WRAPPING = ("add", "sub", "mul")


@dataclass(frozen=True)
class Shape:
    """The properties of a machine that the text of a kernel depends on."""

    threads: bool  # a work-item is a thread of a CPU
    group: int = 256  # work-items of a group, at most
    units: int = 1  # cores
    largest: int = 256  # work-items of a group, at most, if a row needs many
    local: int = 1 << 14  # bytes of local memory that a group may use
    bounded: bool = False  # kernels check their accesses


def point_capabilities(name: str, shape: Shape, **more: Any) -> Capabilities:
    """The capabilities of all GPUs that these writers write for; `more` adds those of one language."""
    registers = shape.largest * POINTS.registers
    return Capabilities(name, programs=1024, row_registers=registers, row_elements=registers // 4, serial_scans=False,
                        masked_reads=True, gathers_rows=True, waits_for_memory=True, contracts=True, sorts=True,
                        tuning=POINTS, **more)


@dataclass(frozen=True)
class Exchange:
    """A loop that replaces an element atomically: declarations before it, its first line, the attempt (with the new
    value in the braces), its last line, and the element's old value in its dtype."""

    before: tuple[str, ...]
    first: str
    attempt: str
    footer: str
    value: str


@dataclass(frozen=True)
class Matrices:
    """Square float32 matrices in the registers of work-items that run in step: their type and side; statements that
    load one (from an address, with a row stride, transposed or not), add a product to one, and store one."""

    kind: str
    side: int
    load: str
    multiply: str
    store: str


class SimtDialect(CLike):
    """The table of words; types, literals and conversions are those of any C-like language (`CLike`)."""

    stored: ClassVar[dict[DType, str]]  # types in memory
    register_bytes: ClassVar[int] = 4  # of the smallest register
    local: ClassVar[str]  # qualifier of an array that the work-items of a group share
    barrier: ClassVar[str]  # statement: waits for all work-items of a group, and makes their local writes visible
    finished_reads: ClassVar[str]  # the same for reads of global memory
    item: ClassVar[str]  # index of the work-item among all
    lane: ClassVar[str]  # index of the work-item in its group
    group: ClassVar[str]  # index of the group
    minimum: ClassVar[str]  # of two indices of one type
    # Work-items that run in step (a SIMD group), where a language has them: their number, the value of the work-item
    # whose number differs in these bits, and the value of the work-item with this number.
    step: ClassVar[int] = 0
    across: ClassVar[str] = ""
    of_one: ClassVar[str] = ""
    matrices: ClassVar[Matrices | None] = None

    def __init__(self, narrow: bool = False, bounded: bool = False) -> None:
        self.long = self.types[torch.int32 if narrow else torch.int64]  # of indices
        self.bounded = bounded

    def aligned(self, pointers: Iterable[int], lanes: int) -> str:
        """Condition: all these pointer arguments begin at a multiple of `lanes` elements."""
        raise NotImplementedError

    def read_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        """Statement: load `lanes` elements from memory into an array in one access, in reverse order if `backward`."""
        raise NotImplementedError

    def write_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        """Statement: store `lanes` elements of an array to memory in one access, in reverse order if `backward`."""
        raise NotImplementedError

    def at_once(self, mode: str, dtype: DType, element: str, text: str) -> str:
        """Statement: combine a value with an element by an atomic instruction; empty if there is none."""
        return ""

    def exchange(self, dtype: DType, element: str, place: str, seen: str, old: str) -> Exchange:
        """A compare-and-swap loop; `place`, `seen` and `old` are names for it to use."""
        raise NotImplementedError

    def head(self, kernel: Kernel, name: str, group: int, extents: Sequence[str]) -> Sequence[str]:
        """The lines from the kernel's signature on: pointers are p0, p1 and so on, sizes n0, n1 and so on."""
        raise NotImplementedError

    def report(self, size: str) -> str:
        """Statement: tell the host of the fault in `bad`, with the size that was exceeded."""
        raise NotImplementedError

    def headers(self, functions: frozenset[str]) -> tuple[str, ...]:
        """The library files that a kernel with these functions needs."""
        raise NotImplementedError


class SimtWriter(Writer):
    """Writes what these languages express differently from C++, in kernels of any form."""

    d: SimtDialect
    short: dict[str, str]

    def as_value(self, text: str, dtype: DType) -> str:
        """An element in memory as a value: bools are stored as bytes, because the type bool has no size in memory."""
        return f"({text} != 0)" if is_bool(dtype) else text

    def read(self, buffer: str, address: str, dtype: DType) -> str:
        return self.as_value(super().read(buffer, address, dtype), dtype)

    def _text(self, e: Expr, args: list[str]) -> str:
        text = super()._text(e, args)
        if is_int(e.dtype) and e.dtype in UNSIGNED:  # integers wrap around
            kind, wraps = self.d.types[e.dtype], self.d.types[UNSIGNED[e.dtype]]
            if e.op in WRAPPING:
                return f"({kind})(({wraps}){args[0]} {self.d.infix[e.op]} ({wraps}){args[1]})"
            if e.op == "neg":
                return f"({kind})(0 - ({wraps}){args[0]})"
        return text


@dataclass(frozen=True)
class LaunchDraft:
    """A launch being written: the writer with its text, and the number of work-items."""

    writer: SimtWriter
    items: Index | str
    group: int = 1
    before: tuple[str, ...] = ()  # functions that it needs, written before the kernel
