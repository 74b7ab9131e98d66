"""The interface of a GPU dialect: a table of words and functions that the writers in this folder read.

`opencl.py` is such a table, and `metal.py` what differs from it. Writers ask it for every word that languages differ
in: where memory lies, who a work-item is, how a group waits for its work-items, how several elements are read at once,
how an element is replaced atomically, and what stands around a kernel.
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
    """What the text of a kernel depends on."""

    threads: bool  # a work-item is a thread of a CPU
    group: int = 256  # work-items of a group, at most
    units: int = 1  # cores
    largest: int = 256  # work-items of a group, where a row needs many
    local: int = 1 << 14  # bytes of local memory that a group may use
    bounded: bool = False  # kernels check their accesses


def point_capabilities(name: str, shape: Shape, **more: Any) -> Capabilities:
    """What all GPUs that these writers write for have in common."""
    registers = shape.largest * POINTS.registers
    return Capabilities(name, programs=1024, row_registers=registers, row_elements=registers // 4, serial_scans=False,
                        masked_reads=True, gathers_rows=True, waits_for_memory=True, contracts=True, sorts=True,
                        tuning=POINTS, **more)


@dataclass(frozen=True)
class Exchange:
    """A loop that replaces an element atomically: declarations before it, its first line, how it tries (with the new
    value in the braces), how it ends, and what the element was, as a value of its dtype."""

    before: tuple[str, ...]
    first: str
    attempt: str
    footer: str
    value: str


@dataclass(frozen=True)
class Matrices:
    """Square matrices of float32 in the registers of work-items in step: their type and side; statements that load one
    (from where, how far apart its rows lie, whether those are its columns), add a product to one, and store one."""

    kind: str
    side: int
    load: str
    multiply: str
    store: str


class SimtDialect(CLike):
    """The words; types, literals and conversions are those of any C-like language (`CLike`)."""

    stored: ClassVar[dict[DType, str]]  # types in memory
    register_bytes: ClassVar[int] = 4  # of the smallest register
    local: ClassVar[str]  # before an array that the work-items of a group share
    barrier: ClassVar[str]  # a statement: all work-items of a group have come so far, and see what was written
    finished_reads: ClassVar[str]  # the same for what was read of the memory of all
    item: ClassVar[str]  # which work-item this is, of all
    lane: ClassVar[str]  # which of its group
    group: ClassVar[str]  # which group
    minimum: ClassVar[str]  # of two indices of one type
    # Work-items in step, where a language has them: how many, what another one has whose number differs in these bits,
    # what the one of this number has.
    step: ClassVar[int] = 0
    across: ClassVar[str] = ""
    of_one: ClassVar[str] = ""
    matrices: ClassVar[Matrices | None] = None

    def __init__(self, narrow: bool = False, bounded: bool = False) -> None:
        self.long = self.types[torch.int32 if narrow else torch.int64]  # of indices
        self.bounded = bounded

    def aligned(self, pointers: Iterable[int], lanes: int) -> str:
        """Whether all of these arguments begin at a multiple of so many elements."""
        raise NotImplementedError

    def read_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        """Statement: so many elements from memory into an array, in one access; the last of them first, if asked."""
        raise NotImplementedError

    def write_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        """The same from an array to memory."""
        raise NotImplementedError

    def at_once(self, mode: str, dtype: DType, element: str, text: str) -> str:
        """Statement: join a value to an element atomically, where there is an instruction for it; else nothing."""
        return ""

    def exchange(self, dtype: DType, element: str, place: str, seen: str, old: str) -> Exchange:
        """Compare and swap; `place`, `seen` and `old` are names for it to use."""
        raise NotImplementedError

    def head(self, kernel: Kernel, name: str, group: int, extents: Sequence[str]) -> Sequence[str]:
        """The lines from the kernel's signature on: pointers are p0, p1 and so on, sizes n0, n1 and so on."""
        raise NotImplementedError

    def report(self, size: str) -> str:
        """Statement: tell the host of the fault in `bad`, with the size that was exceeded."""
        raise NotImplementedError

    def headers(self, functions: frozenset[str]) -> tuple[str, ...]:
        """The files of the library that a kernel with these functions needs."""
        raise NotImplementedError


class SimtWriter(Writer):
    """What these languages say differently from C++, whatever the shape of the kernel."""

    d: SimtDialect
    short: dict[str, str]

    def as_value(self, text: str, dtype: DType) -> str:
        """What is in memory as a value: a bool has no size there."""
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
    """One launch on its way: what was written, and how many work-items there are."""

    writer: SimtWriter
    items: Index | str
    group: int = 1
    before: tuple[str, ...] = ()  # functions of its own
