"""The OpenCL C dialect.

The text keeps to OpenCL C 1.2. It uses operators or the library's own polynomials instead of builtin functions where
these suffice: on CPUs they vectorise, and the builtins mostly do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from flambeau.ir.dtypes import DType, is_bool
from flambeau.ir.expr import SPECIAL
from flambeau.ir.program import Kernel
from flambeau.ir.tuning import CPU

from ..dialect import APART, UNROLLED, Lanes, Steps
from ..source import RangeSource
from .dialect import Exchange, Shape, SimtDialect
from .kernel import render_in

# Functions without a text in OpenCL C; the other special functions are computed in double.
MISSING = frozenset(("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"))
MISSING_WITHOUT_DOUBLES = SPECIAL - {"lgamma"}
# The suffix of a function's name, by the dtype it works on.
SUFFIX = {
    torch.float32: "f", torch.float64: "d", torch.int64: "l", torch.int32: "i", torch.int16: "s", torch.int8: "c",
    torch.uint8: "uc", torch.uint16: "us", torch.uint32: "ui", torch.uint64: "ul", torch.bool: "b",
}


@dataclass(frozen=True)
class PartOfWord:
    """An element smaller than the words that can be swapped atomically: lines that find its place in a word, the word's
    address, the element in the word, and the word with the element replaced."""

    before: tuple[str, ...]
    address: str
    value: str
    replaced: str


class OpenCL(SimtDialect):
    types = {
        torch.float32: "float", torch.float64: "double", torch.bfloat16: "ushort", torch.float16: "ushort",
        torch.int64: "long", torch.int32: "int", torch.int16: "short", torch.int8: "char", torch.uint8: "uchar",
        torch.uint16: "ushort", torch.uint32: "uint", torch.uint64: "ulong", torch.bool: "bool",
    }
    stored = {**types, torch.bool: "uchar"}  # in memory: a bool has no size there
    function = "fl_{}"
    unlikely = "__builtin_expect({}, 0)"
    local = "__local"
    barrier = "barrier(CLK_LOCAL_MEM_FENCE);"
    finished_reads = "barrier(CLK_GLOBAL_MEM_FENCE);"
    item, lane, group = "get_global_id(0)", "get_local_id(0)", "get_group_id(0)"
    minimum = "min({}, {})"
    contracted = "#pragma OPENCL FP_CONTRACT ON"
    thread, threads = "fl_thread()", "fl_threads()"
    zeros = "({})(0)"
    inlined = "FL_INLINE"
    small = {torch.bfloat16: "bf16", torch.float16: "half"}
    unsigned, wide = "UL", "L"

    def pragma(self, how: Steps, reports: bool, counted: bool) -> str:
        if isinstance(how, Lanes):
            simd = "#pragma clang loop vectorize(assume_safety)"
            if not how.points or (reports and counted):
                return simd
            # Stated explicitly: otherwise PoCL makes such a loop one vector long, and leaves its states in memory.
            width = min(CPU.vector_bytes // how.size, how.points)
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

    def aligned(self, pointers: Iterable[int], lanes: int) -> str:
        return f"(({' | '.join(f'o{k}' for k in pointers)}) & {lanes - 1}) == 0"

    def read_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        line = f"(*((__global const {kind}{lanes}*)({pointer}))){swizzle(lanes, backward)}"
        return f"vstore{lanes}({line}, 0, {array});"

    def write_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        # Not vload: for an array that lives across a barrier, PoCL gave wrong second elements (a softmax of 9 x 70).
        elements = ", ".join(f"({array})[{lane}]" for lane in (range(lanes)[::-1] if backward else range(lanes)))
        return f"*((__global {kind}{lanes}*)({pointer})) = ({kind}{lanes})({elements});"

    def part_of_word(self, dtype: DType, element: str, place: str, seen: str) -> PartOfWord:
        """An element of 8 or 16 bits in the 32-bit word that `seen` holds."""
        many, bits = 4 // dtype.itemsize, 8 * dtype.itemsize
        mask = f"{(1 << bits) - 1}u"
        # Bytes next to the first or the last element of a tensor are written back unchanged.
        before = (f"const uint {place}_odd = (uint)((ulong)&{element} / {dtype.itemsize}) & {many - 1}u;",
                  f"const uint {place}_shift = {place}_odd * {bits}u;")
        part = f"({seen} >> {place}_shift & {mask})"
        return PartOfWord(before, f"(&{element} - {place}_odd)",
                          f"({part} != 0)" if is_bool(dtype) else f"(({self.types[dtype]}){part})",
                          f"({seen} & ~({mask} << {place}_shift)) | ((uint)({{}}) & {mask}) << {place}_shift")

    def exchange(self, dtype: DType, element: str, place: str, seen: str, old: str) -> Exchange:
        if dtype.itemsize < 4:
            part = self.part_of_word(dtype, element, place, seen)
            word = f"volatile __global uint* {place} = (volatile __global uint*){part.address};"
            return Exchange((*part.before, word, f"uint {old} = *{place}, {seen};"), f"{seen} = {old};",
                            f"{old} = atomic_cmpxchg({place}, {seen}, {part.replaced});",
                            f"}} while ({old} != {seen});", part.value)
        bits, swap = {4: ("int", "atomic_cmpxchg"), 8: ("long", "atom_cmpxchg")}[dtype.itemsize]
        before = (f"volatile __global {bits}* {place} = (volatile __global {bits}*)&{element};",
                  f"{bits} {old} = *{place}, {seen};")
        return Exchange(before, f"{seen} = {old};", f"{old} = {swap}({place}, {seen}, as_{bits}({{}}));",
                        f"}} while ({old} != {seen});", f"as_{self.types[dtype]}({seen})")

    def head(self, kernel: Kernel, name: str, group: int, extents: Sequence[str]) -> list[str]:
        arguments = []
        for k, p in enumerate(kernel.params):
            kind = f"{'' if p.written else 'const '}{self.stored[p.dtype]}"
            arguments += [f"__global {kind}*{'' if p.aliased else ' restrict'} p{k}", f"const long o{k}"]
        arguments += [f"const long n{k}" for k in range(len(kernel.sizes))] + [f"const long {n}" for n in extents]
        arguments += ["__global int* faults", "const long at"]
        return [f"__kernel __attribute__((reqd_work_group_size({group}, 1, 1)))",
                f"void {name}({', '.join(arguments)}) {{", *(f"  p{k} += o{k};" for k in range(len(kernel.params)))]

    def report(self, size: str) -> str:
        return f"if (bad) fl_report(faults, at, bad, {size});"

    def headers(self, functions: frozenset[str]) -> tuple[str, ...]:
        return ("opencl.h", "opencl_special.h") if functions & MISSING_WITHOUT_DOUBLES else ("opencl.h",)


def bits_of(value: float, dtype: DType) -> int:
    return int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF


def swizzle(lanes: int, backward: bool) -> str:
    """The suffix that reverses a vector; empty unless `backward`."""
    return f".s{'fedcba9876543210'[-lanes:]}" if backward else ""


def render(kernel: Kernel, name: str, shape: Shape) -> RangeSource:
    """The text of one kernel."""
    return render_in(OpenCL, kernel, name, shape)
