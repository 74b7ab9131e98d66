"""OpenCL C: the dialect table, what all its writers share, and the functions around a kernel.

A kernel has one of two shapes. On CPUs a work-item is a thread: the loops are those of the C++ kernels, and work-items
divide the outermost among themselves (`cpu_threads.py`). On GPUs a work-item is a point, and a work-group a row
(`points.py`, `rows.py`).

The text keeps to OpenCL C 1.2, without builtin functions where operators or the library's own polynomials do: on CPUs
those are vectors, and the builtins mostly are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flambeau.ir.dtypes import DType, is_bool, is_int
from flambeau.ir.expr import SPECIAL, Expr, loads, walk
from flambeau.ir.faults import WHICH, access
from flambeau.ir.index import Index
from flambeau.ir.program import Kernel, LoopKernel, ScanKernel, reductions_of

from ..c.nest import extent_names
from ..source import Range, RangeSource, host_text, site_table
from ..writer import APART, UNROLLED, CLike, Lanes, Steps, Writer

# Functions without a text in OpenCL C; the other special functions are computed in double.
MISSING = frozenset(("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"))
MISSING_WITHOUT_DOUBLES = SPECIAL - {"lgamma"}
# What a function's name ends in, by the dtype it works on.
SUFFIX = {
    torch.float32: "f", torch.float64: "d", torch.int64: "l", torch.int32: "i", torch.int16: "s", torch.int8: "c",
    torch.uint8: "uc", torch.uint16: "us", torch.uint32: "ui", torch.uint64: "ul", torch.bool: "b",
}
WRAPPING = ("add", "sub", "mul")
VECTOR = 32  # bytes, on CPUs


class OpenCL(CLike):
    types = {
        torch.float32: "float", torch.float64: "double", torch.bfloat16: "ushort", torch.float16: "ushort",
        torch.int64: "long", torch.int32: "int", torch.int16: "short", torch.int8: "char", torch.uint8: "uchar",
        torch.uint16: "ushort", torch.uint32: "uint", torch.uint64: "ulong", torch.bool: "bool",
    }
    stored = {**types, torch.bool: "uchar"}  # in memory: a bool has no size there
    function = "fl_{}"
    unlikely = "__builtin_expect({}, 0)"
    small = {torch.bfloat16: "bf16", torch.float16: "half"}
    unsigned, wide = "UL", "L"

    def __init__(self, long: str = "long", bounded: bool = False) -> None:
        self.long = long  # of indices
        self.bounded = bounded

    def pragma(self, how: Steps, reports: bool, counted: bool) -> str:
        if isinstance(how, Lanes):
            simd = "#pragma clang loop vectorize(assume_safety)"
            if not how.points or (reports and counted):
                return simd
            # In so many words: PoCL leaves such a loop one vector long, and its states in memory.
            width = min(VECTOR // how.size, how.points)
            return f"{simd} vectorize_width({width}) interleave_count({max(how.points // width, 1)})"
        return {APART: "#pragma clang loop vectorize(disable) unroll_count(8)", UNROLLED: "#pragma unroll"}[how] \
            if how in (APART, UNROLLED) else ""

    def bitcast(self, text: str, dtype: DType) -> str:
        return f"as_{self.types[dtype]}({text})"

    def named(self, op: str, dtype: DType) -> str:
        return f"fl_{op}_{SUFFIX[dtype]}"

    def endless(self, value: float, single: bool) -> str:
        name = "NAN" if value != value else "INFINITY" if value > 0 else "(-INFINITY)"
        return name if single else f"((double){name})"

    def small_number(self, value: float, dtype: DType) -> str:
        return f"((ushort)0x{bits_of(value, dtype):04x})"

    def int64(self, value: int) -> str:
        return "LONG_MIN" if value == -(2**63) else f"{value}L" if value >= 0 else f"({value}L)"

    def widened(self, text: str, src: DType) -> str:
        return f"fl_from_{self.small[src]}({text})"

    def narrowed(self, text: str, src: DType, dst: DType) -> str:
        return f"fl_to_{self.small[dst]}({self.cast(text, src, torch.float32)})"

    def whole(self, text: str, src: DType, dst: DType) -> str:
        """From float to integer as ATen on x86: narrow types keep the low bits of a wider conversion."""
        kind = self.types[dst]
        if dst in (torch.uint32, torch.uint64):
            return f"fl_to_{SUFFIX[dst]}_{SUFFIX[src]}({text})"
        wide = "" if dst.itemsize >= 4 else "(long)" if (dst, src) == (torch.uint8, torch.float64) else "(int)"
        return f"({kind}){wide}({text})"


def bits_of(value: float, dtype: DType) -> int:
    return int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF


class ClWriter(Writer):
    """What OpenCL C says differently from C++, whatever the shape of the kernel."""

    d: OpenCL
    short: dict[str, str]

    def read(self, buffer: str, address: str, dtype: DType) -> str:
        text = super().read(buffer, address, dtype)
        return f"({text} != 0)" if is_bool(dtype) else text

    def _text(self, e: Expr, args: list[str]) -> str:
        if e.op == "philox":
            return f"(long)fl_philox({', '.join(args)}, {e.attr})"
        text = super()._text(e, args)
        if is_int(e.dtype) and e.dtype.is_signed and e.dtype.itemsize >= 4:  # integers wrap around
            kind = self.d.types[e.dtype]
            if e.op in WRAPPING:
                return f"({kind})((u{kind}){args[0]} {self.d.infix[e.op]} (u{kind}){args[1]})"
            if e.op == "neg":
                return f"({kind})(0 - (u{kind}){args[0]})"
        return text


# ---- kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What the text of a kernel depends on."""

    threads: bool  # a work-item is a thread of a CPU
    group: int = 256  # work-items of a group, at most
    units: int = 1  # cores
    largest: int = 256  # work-items of a group, where a row needs many
    local: int = 1 << 14  # bytes of local memory that a group may use
    bounded: bool = False  # kernels check their accesses


@dataclass(frozen=True)
class Draft:
    """One launch on its way: what was written, and how many work-items there are."""

    writer: Writer
    items: Index | str
    group: int = 1
    before: tuple[str, ...] = ()  # functions of its own


def render(kernel: Kernel, name: str, shape: Shape) -> RangeSource:
    """The text of one kernel."""
    from .cpu_threads import write_threads
    from .points import write_points

    drafts = write_threads(kernel, shape) if shape.threads else write_points(kernel, shape)
    names = {s: f"n{k}" for k, s in enumerate(kernel.sizes)}
    extents = [n for k in range(len(kernel.params)) for n in extent_names(f"p{k}")] if shape.bounded else []
    lines: list[str] = []
    ranges = []
    checks = False
    headers = ["opencl.h"]
    if any(draft.writer.functions & MISSING_WITHOUT_DOUBLES for draft in drafts):
        headers.append("opencl_special.h")
    for k, draft in enumerate(drafts):
        reports = draft.writer.scopes[0].checks
        checks |= reports
        told = f"  if (bad) fl_report(faults, at, bad, {exceeded(draft.writer, len(extents) // 2)});" if reports else ""
        lines += [*draft.before, *head_of(kernel, f"KERNEL_NAME_{k}", draft, extents),
                  *(f"  const long {draft.writer.sym(s)} = {n};" for s, n in names.items()),
                  *(["  long bad = 0;"] if reports else []),
                  *("  " + x for x in draft.writer.scopes[0].lines),
                  *([told] if reports else []), "}"]
        items = draft.items if isinstance(draft.items, str) else host_text(draft.items, names)
        ranges.append(Range(f"KERNEL_NAME_{k}", items, draft.group))
    return RangeSource(name, "\n".join(lines) + "\n", tuple(p.dtype.itemsize for p in kernel.params),
                       tuple(p.written for p in kernel.params), tuple(reaches(kernel)),
                       len(kernel.sizes) + len(extents), tuple(ranges), checks, tuple(headers), site_table(kernel),
                       shape.bounded, kernel.origins)


def exceeded(w: Writer, pointers: int) -> str:
    """The size that belongs to the fault in `bad`."""
    text = "0"
    for b, code in w.sites.items():
        text = f"(bad >> {WHICH}) == {code >> WHICH} ? {w.index(b.size)} : {text}"
    for k in range(pointers if w.d.bounded else 0):
        text = f"(bad >> {WHICH}) == {access(k) >> WHICH} ? {extent_names(f'p{k}')[1]} : {text}"
    return text


def head_of(kernel: Kernel, name: str, draft: Draft, extents: Sequence[str] = ()) -> Iterator[str]:
    arguments = []
    for k, p in enumerate(kernel.params):
        kind = f"{'' if p.written else 'const '}{OpenCL.stored[p.dtype]}"
        arguments += [f"__global {kind}*{'' if p.aliased else ' restrict'} p{k}", f"const long o{k}"]
    arguments += [f"const long n{k}" for k in range(len(kernel.sizes))] + [f"const long {n}" for n in extents]
    arguments += ["__global int* faults", "const long at"]
    yield f"__kernel __attribute__((reqd_work_group_size({draft.group}, 1, 1)))"
    yield f"void {name}({', '.join(arguments)}) {{"
    yield from (f"  p{k} += o{k};" for k in range(len(kernel.params)))


def dtypes_of(k: Kernel) -> frozenset[DType]:
    """All that it reads, computes and writes."""
    combines = [i.joins for i in reductions_of(k.items)] if isinstance(k, LoopKernel) \
        else [k.combine] if isinstance(k, ScanKernel) else []
    inside = [e.dtype for e in walk(*k.everything(), *(e for c in combines for e in c.result))]
    return frozenset((*inside, *(p.dtype for p in k.params)))


def reaches(k: Kernel) -> Iterator[int]:
    """For each pointer how many bytes from there on the kernel can touch, 0 where sizes of the run decide it."""
    touched = [*((e.attr[0], e.attr[1][0]) for e in loads(*k.everything())), *k.stores]
    for p in k.params:
        ends = [a.bounds()[1] for name, a in touched if name == p.name]
        yield 0 if None in ends else p.dtype.itemsize * (1 + max((n for n in ends if n is not None), default=0))
