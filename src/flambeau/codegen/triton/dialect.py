"""The Triton dialect, and what the GPUs can do."""

from __future__ import annotations

import math

import torch

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.dtypes import FP8, SUPPORTED, DType, is_bool, is_float, opmath
from flambeau.ir.expr import SPECIAL
from flambeau.ir.tuning import BLOCKS

from ..dialect import Dialect

ROUNDED = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
NARROW = 2**31 - 2**16  # indices below it are 32 bits wide, with room for the last tile


class Triton(Dialect):
    types = {
        torch.float32: "tl.float32", torch.float64: "tl.float64", torch.bfloat16: "tl.bfloat16",
        torch.float16: "tl.float16", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16",
        torch.int8: "tl.int8", torch.uint8: "tl.uint8", torch.uint16: "tl.uint16", torch.uint32: "tl.uint32",
        torch.uint64: "tl.uint64", torch.bool: "tl.int1", torch.float8_e4m3fn: "tl.float8e4nv",
        torch.float8_e5m2: "tl.float8e5",
    }
    # Division is a function: the operator rounds wrongly for float32, and differs for negative integers.
    infix = {op: text for op, text in Dialect.infix.items() if op != "div"}
    prefix = {"logical_not": "~", "bitwise_not": "~"}  # Triton's minus is 0 - x, which loses the sign of zero
    quotient = "//"
    divisor = "{0}"
    end = ""
    function = "fl.{}"
    unroll = BLOCKS.unroll

    def bitcast(self, text: str, dtype: DType) -> str:
        return f"{text}.to({self.types[dtype]}, bitcast=True)"

    def constant(self, value: bool | int | float, dtype: DType, shape: str = "()") -> str:
        if is_float(dtype):
            number = float(value)
            text = repr(number) if math.isfinite(number) else f'float("{number}")'
        else:
            text = str(int(value))
        if dtype in FP8:
            return self.cast(f"tl.full({shape}, {text}, tl.float32)", torch.float32, dtype)
        return f"tl.full({shape}, {text}, {self.types[dtype]})"

    def cast(self, text: str, src: DType, dst: DType) -> str:
        if src is dst:
            return text
        if src in FP8:
            return self.cast(f"tl.cast({text}, tl.float32)", torch.float32, dst)
        if dst in FP8:
            return f"fl.{ROUNDED[dst]}({self.cast(text, src, torch.float32)})"
        if is_bool(dst):
            return f"{text} != 0"
        if is_float(src) and not is_float(dst) and dst is not torch.int64:
            text = f"tl.cast({text}, tl.int64)"  # narrow integers wrap, as they do in C through int64
        if not is_float(src) and is_float(dst) and opmath(dst) is not dst:
            text = f"tl.cast({text}, {self.types[opmath(dst)]})"  # as eager rounds them: to float32, then to half
        return f"tl.cast({text}, {self.types[dst]})"


class Rough(Triton):
    """The dialect for results that are rounded to 16 bits: its functions are off by a few units in the last place of
    float32, or by 2e-5 (a tenth of the rounding of halves), rather than by a half. They pay where nothing waits for
    memory while they are computed."""

    faster = {"exp": "tl.exp", "sigmoid": "fl.rough_sigmoid", "div": "fl.rough_div", "tanh": "fl.rough_tanh",
              "erf": "fl.rough_erf"}

    def named(self, op: str, dtype: DType) -> str:
        return self.faster[op] if dtype is torch.float32 and op in self.faster else super().named(op, dtype)


TRITON, ROUGH = Triton(), Rough()
# Special functions that NVIDIA's device library lacks.
MISSING = SPECIAL - {"lgamma", "i0", "i1", "ndtri", "erfcx", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"}
# Combines that have an atomic instruction. For floats there is no atomic minimum or maximum that keeps NaN.
SCATTERS = frozenset([("add", d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32,
                                           torch.int64)]
                     + [(mode, d) for mode in ("min", "max") for d in (torch.int32, torch.int64)])
MULTIPLIED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, *FP8))
# What fits in registers decides most of it: rows of up to `row_elements` are read once.
CAPABILITIES = Capabilities("blocks", dtypes=SUPPORTED | FP8, scratch_bytes=1 << 20, row_elements=BLOCKS.row,
                            programs=1024, serial_scans=False, shared_words=True, missing=MISSING, scatters=SCATTERS,
                            masked_reads=True, multiplies=MULTIPLIED, gathers_rows=True, ragged=True, shares=True,
                            tile_tails=True, waits_for_memory=True, tables=True, attends=True, tuning=BLOCKS)
POINTER = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.uint16: "*u16", torch.uint32: "*u32", torch.uint64: "*u64", torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}
POINTED = {kind: dtype for dtype, kind in POINTER.items()}


def pointed(kind: str) -> DType:
    """Returns the dtype of the elements behind a pointer of this type."""
    return POINTED[kind]
