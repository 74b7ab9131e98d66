"""The C++ dialect: types, functions and syntax."""

from __future__ import annotations

import torch

from flambeau.ir.dtypes import DType
from flambeau.ir.expr import SPECIAL

from ..dialect import TEAM, CLike, Lanes, Shares, Steps

# Functions that eager computes with its own vector library or its own formulas.
INEXACT = SPECIAL | frozenset((
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "pow", "atan2", "hypot",
    "sqrt", "rsqrt", "fmod", "remainder"))


# Functions that are calls into a library (lib/elementary.h): all of these in float64, CALLED_FLOAT otherwise.
CALLED = frozenset(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "sin", "cos", "tan", "sinh",
                    "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "erfc", "pow", "atan2", "hypot",
                    "sigmoid", "erfinv"))
CALLED_FLOAT = frozenset(("sin", "cos", "tan", "sinh", "asinh", "acosh", "erfc", "pow", "atan2", "hypot"))


class Cpp(CLike):
    types = {
        torch.float32: "float", torch.float64: "double", torch.bfloat16: "fl::bf16", torch.float16: "fl::half",
        torch.int64: "int64_t", torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t",
        torch.uint8: "uint8_t", torch.uint16: "uint16_t", torch.uint32: "uint32_t", torch.uint64: "uint64_t",
        torch.bool: "bool",
    }
    stored = {**types, torch.bool: "uint8_t"}  # in memory: g++ 12 does not vectorise bools beside wider types
    fused = "fl::madd"
    # Chooses by bits: g++ turns conditionals into branches, and a loop with many of them stays scalar.
    choice = "fl::choose({}, {}, {})"
    # Half as wide as a 64-bit sum; and if a 64-bit sum is narrowed to 32 bits, g++ 12 does not vectorise.
    narrow = "(int32_t){}"
    # With -fno-trapping-math g++ 12 turns (float)(int)x into trunc(x), whose zero keeps the sign of x. A zero whose
    # value the compiler does not know separates the two conversions.
    rounded = "({0} | ({1})unknown_zero)"
    small = {torch.bfloat16: "fl::to_bf16", torch.float16: "fl::to_half"}

    prefetch = "fl::prefetch<{}>(&{});"
    thread, threads = "fl::thread()", "fl::threads()"
    zeros = "{}{{}}"
    preprocessed = True
    # A separate function, because contraction can only be enabled for whole functions.
    inlined = 'static __attribute__((noinline, optimize("fp-contract=fast")))'
    unlikely = "__builtin_expect({}, 0)"

    def pragma(self, how: Steps, reports: bool, counted: bool) -> str:
        faults = " reduction(max:bad)" if reports else ""
        if isinstance(how, Lanes):
            # g++ keeps a reduction of `omp simd` in memory, so a loop that reports is only marked as independent steps.
            return "#pragma GCC ivdep" if reports and counted else f"#pragma omp simd{faults}"
        if isinstance(how, Shares):
            collapse = f" collapse({how.loops})" if how.loops > 1 else ""
            condition = f" if({how.condition})" if how.condition else ""
            return f"#pragma omp parallel for schedule(static){collapse}{condition}{faults}"
        return f"#pragma omp parallel{faults}" if how is TEAM else ""

    def is_called(self, op: str, dtype: DType) -> bool:
        return op in (CALLED if dtype is torch.float64 else CALLED_FLOAT)

    def vector(self, kind: str, lanes: int) -> str:
        return f"fl::vector<{kind}, {lanes}>::type"

    def bitcast(self, text: str, dtype: DType) -> str:
        return f"fl::bitcast<{self.types[dtype]}>({text})"

    def endless(self, value: float, single: bool) -> str:
        kind = "f" if single else ""
        return f'__builtin_nan{kind}("")' if value != value else f"{'-' if value < 0 else ''}__builtin_inf{kind}()"

    def small_number(self, value: float, dtype: DType) -> str:
        return f"{self.small[dtype]}({self.number(value, torch.float32)})"

    def int64(self, value: int) -> str:
        return "INT64_MIN" if value == -(2**63) else f"INT64_C({value})" if value >= 0 else f"(-INT64_C({-value}))"

    def widened(self, text: str, src: DType) -> str:
        return f"fl::to_float({text})"

    def narrowed(self, text: str, src: DType, dst: DType) -> str:
        if src not in (torch.float32, torch.float64):
            text = self.cast(text, src, torch.float32)
        return f"{self.small[dst]}({text})"

    def whole(self, text: str, src: DType, dst: DType) -> str:
        return f"fl::to_int<{self.types[dst]}>({text})"


class BoundedCpp(Cpp):
    bounded = True


CPP = Cpp()
BOUNDED = BoundedCpp()
