"""The Metal dialect: what differs from OpenCL C.

C++14 with address spaces, without doubles. Buffers come by number, at most 31 of them: the pointers, then all numbers
of a launch as one array of words, then the record of faults; more pointers than that share one buffer. A kernel says
how many threads a group of it may have, because a Mac skips a larger one without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from flambeau.errors import UnsupportedError
from flambeau.ir.build import is_word
from flambeau.ir.capabilities import MODES, Capabilities
from flambeau.ir.dtypes import SUPPORTED, DType
from flambeau.ir.expr import SPECIAL, walk
from flambeau.ir.program import Kernel
from flambeau.ir.tuning import POINTS

from ..dialect import UNROLLED, Steps
from ..source import RangeSource
from .dialect import Exchange, Matrices, Shape, point_capabilities
from .kernel import render_in
from .opencl import OpenCL, PartOfWord

BUFFERS = 31
THREADGROUP_BYTES = 32 << 10
SIMD_WIDTH = 32  # of every Apple GPU
LARGEST_GROUP = 1024
# In a larger group, threads have too few registers to hold a row.
SHAPE = Shape(threads=False, group=POINTS.group, units=1, largest=LARGEST_GROUP // 2, local=THREADGROUP_BYTES // 2)
# Functions that other targets compute in double.
MISSING = SPECIAL
DTYPES = SUPPORTED - {torch.float64}
# Atomic combines: by compare-and-swap of the 32-bit word that holds an element, or by an instruction.
JOINS = frozenset({(mode, dtype) for mode in MODES for dtype in DTYPES if dtype.itemsize <= 4} | {("add", torch.int64)})
WORDS = {4: "uint4", 2: "uint2", 1: "uint"}  # several words side by side


class Metal(OpenCL):
    # Nothing is computed in double: a run-time number arrives as a double and is converted to a float immediately.
    types = {**OpenCL.types, torch.float64: "ulong"}
    stored = {**types, torch.bool: "uchar"}
    unlikely = "{}"
    local = "threadgroup"
    register_bytes = 2  # Apple GPUs divide their registers into halves
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    finished_reads = "threadgroup_barrier(mem_flags::mem_device);"
    item, lane, group = "fl_item", "fl_lane", "fl_group"
    step, across, of_one = SIMD_WIDTH, "fl_across({}, {})", "fl_of_one({}, {})"
    matrices = Matrices("simdgroup_float8x8", 8, "simdgroup_load({}, {}, {}, 0, {});",
                        "simdgroup_multiply_accumulate({0}, {1}, {2}, {0});", "simdgroup_store({}, {}, {});")
    contracted = "#pragma METAL fp contract(fast)"
    small = {**OpenCL.small, torch.float64: "double"}

    def pragma(self, how: Steps, reports: bool, counted: bool) -> str:
        return "#pragma unroll" if how is UNROLLED else ""

    def bitcast(self, text: str, dtype: DType) -> str:
        return f"as_type<{self.types[dtype]}>({text})"

    def int64(self, value: int) -> str:
        return "(-9223372036854775807L - 1)" if value == -(2**63) else super().int64(value)

    def aligned(self, pointers: Iterable[int], lanes: int) -> str:
        places = " | ".join(f"(ulong)p{k} / sizeof(*p{k})" for k in pointers)
        return f"(({places}) & {lanes - 1}) == 0"

    def line_of(self, kind: str, lanes: int) -> tuple[str, str]:
        """The type of one access to `lanes` elements, and the declaration of a union of it and the elements."""
        size = next(dtype.itemsize for dtype, name in self.stored.items() if name == kind) * lanes
        whole = WORDS[size // 4] if size >= 4 else "ushort"
        return whole, f"union {{ {whole} whole; {kind} parts[{lanes}]; }} line;"

    def read_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        whole, line = self.line_of(kind, lanes)
        place = f"{lanes - 1} - j" if backward else "j"
        return f"{{ {line} line.whole = *reinterpret_cast<device const {whole}*>({pointer}); " \
               f"for (int j = 0; j < {lanes}; ++j) ({array})[j] = line.parts[{place}]; }}"

    def write_line(self, kind: str, lanes: int, pointer: str, array: str, backward: bool) -> str:
        whole, line = self.line_of(kind, lanes)
        place = f"{lanes - 1} - j" if backward else "j"
        return f"{{ {line} for (int j = 0; j < {lanes}; ++j) line.parts[j] = ({array})[{place}]; " \
               f"*reinterpret_cast<device {whole}*>({pointer}) = line.whole; }}"

    def at_once(self, mode: str, dtype: DType, element: str, text: str) -> str:
        if (mode, dtype) == ("add", torch.int64):
            return f"fl_add_long(&{element}, {text});"
        if (mode, dtype) == ("add", torch.float32) or (mode in ("add", "min", "max") and dtype is torch.int32):
            kind = self.types[dtype]
            place = f"reinterpret_cast<device atomic_{kind}*>(&{element})"
            return f"atomic_fetch_{mode}_explicit({place}, {text}, memory_order_relaxed);"
        return ""

    def exchange(self, dtype: DType, element: str, place: str, seen: str, old: str) -> Exchange:
        assert dtype.itemsize <= 4, f"no atomics on {dtype}"
        part = self.part_of_word(dtype, element, place, seen) if dtype.itemsize < 4 else \
            PartOfWord((), f"&{element}", f"as_type<{self.types[dtype]}>({seen})", "as_type<uint>({})")
        before = (*part.before, f"device atomic_uint* {place} = reinterpret_cast<device atomic_uint*>({part.address});",
                  f"uint {old} = atomic_load_explicit({place}, memory_order_relaxed), {seen};", f"bool {place}_done;")
        attempt = f"{place}_done = atomic_compare_exchange_weak_explicit({place}, &{old}, {part.replaced}, " \
                  "memory_order_relaxed, memory_order_relaxed);"
        return Exchange(before, f"{seen} = {old};", attempt, f"}} while (!{place}_done);", part.value)

    def head(self, kernel: Kernel, name: str, group: int, extents: Sequence[str]) -> list[str]:
        pointers = [f"device {'' if p.written else 'const '}{self.stored[p.dtype]}* p{k}"
                    for k, p in enumerate(kernel.params)]
        few = direct(len(pointers))
        arguments = [f"{pointer} [[buffer({k})]]" for k, pointer in enumerate(pointers[:few])]
        more = [f"struct {name}_more {{ {' '.join(f'{pointer};' for pointer in pointers[few:])} }};"] \
            if pointers[few:] else []
        arguments += [f"constant {name}_more& fl_more [[buffer({few})]]"] if more else []
        count = len(arguments)
        arguments += [f"constant long* fl_words [[buffer({count})]]",
                      f"device atomic_int* fl_faults [[buffer({count + 1})]]",
                      "uint fl_lane [[thread_position_in_threadgroup]]",
                      "uint fl_group [[threadgroup_position_in_grid]]"]
        words = [*(f"n{k}" for k in range(len(kernel.sizes))), *extents]
        return [*more, f"[[max_total_threads_per_threadgroup({group})]]",
                f"kernel void {name}({', '.join(arguments)}) {{",
                f"  const long fl_item = (long)fl_group * {group} + fl_lane;",
                *(f"  {pointer} = fl_more.p{few + k};" for k, pointer in enumerate(pointers[few:])),
                *(f"  const long {n} = fl_words[{k}];" for k, n in enumerate(words))]

    def report(self, size: str) -> str:
        return f"if (bad) fl_report(fl_faults, bad, {size});"

    def headers(self, functions: frozenset[str]) -> tuple[str, ...]:
        return ("metal.h",)


def direct(pointers: int) -> int:
    """How many of a kernel's pointers are separate buffers. If these, with words and faults, would be too many, the
    last ones are the fields of a structure in one buffer."""
    return pointers if pointers + 2 <= BUFFERS else BUFFERS - 3


def capabilities(name: str) -> Capabilities:
    return point_capabilities(name, SHAPE, dtypes=DTYPES, missing=MISSING, scatters=JOINS, reads_doubles=True)


def render(kernel: Kernel, name: str, bounded: bool = False) -> RangeSource:
    """The text of one kernel."""
    doubles = [e.op for e in walk(*kernel.everything()) if e.dtype is torch.float64 and not is_word(e)]
    if doubles or any(p.dtype is torch.float64 for p in kernel.params):
        raise UnsupportedError("Metal has no float64", dtypes=["torch.float64"])
    return render_in(Metal, kernel, name, SHAPE if not bounded else Shape(**{**vars(SHAPE), "bounded": True}))
