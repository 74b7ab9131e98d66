"""The differences between C-like languages: a dialect is a small table that the writer (`writer.py`) reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import torch

from flambeau.ir.dtypes import DType, is_bool, is_float
from flambeau.ir.tuning import CPU

# ---- facts about the steps of a loop, which a dialect puts into its own words ------------------------------


@dataclass(frozen=True)
class Lanes:
    """Steps that do not wait for each other and may be vector lanes: `points` of them at once, of `size` bytes each, or
    as many as the compiler likes."""

    points: int = 0
    size: int = 0


@dataclass(frozen=True)
class Shares:
    """Steps that threads divide among themselves: those of the outermost `loops` loops together, under a condition if
    there is one."""

    loops: int = 1
    condition: str = ""


@dataclass(frozen=True)
class Pipelined:
    """Steps whose loads begin ahead of time: so many iterations are in flight."""

    stages: int


class Plain(Enum):
    TEAM = auto()  # a block that all threads execute, each for its own share
    APART = auto()  # a loop that writes far apart: not vectorized
    UNROLLED = auto()


# types whose arithmetic wraps around in every language
UNSIGNED = {torch.int32: torch.uint32, torch.int64: torch.uint64}
Steps = Lanes | Shares | Pipelined | Plain
LANES = Lanes()
TEAM, APART, UNROLLED = Plain.TEAM, Plain.APART, Plain.UNROLLED


class Dialect:
    """The differences between C-like languages. Subclasses override rows, not code."""

    types: dict[DType, str] = {}
    infix = {
        "add": "+", "sub": "-", "mul": "*", "div": "/", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
        "shl": "<<", "shr": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    }
    prefix = {"neg": "-", "logical_not": "!", "bitwise_not": "~"}
    quotient = "/"  # of integers that are not negative
    divisor = "({0} == 0 ? 1 : {0})"  # a divisor that may be zero where the quotient is not used: it must not trap
    function = "fl::{}"  # the call of a named operation
    fused = ""  # the function for a * b + c, with one rounding where the machine can
    choice = "{} ? {} : {}"  # by a condition that is the same in all iterations, or between results of library calls
    narrow = ""  # a variable in a 32-bit index
    rounded = "{0}"  # an integer (of a type) that was a float before and becomes one again
    end = ";"  # the end of a statement
    unroll = CPU.unroll  # steps of a constant window that are written out
    long = "int64_t"
    bounded = False  # every access is checked: `c/nest.py` says against what
    prefetch = ""  # a prefetch call, where there is one: the number of bytes, the address
    unlikely = "{}"  # a condition that seldom holds
    # On CPUs, where contractions have vectors: the number of this thread and of all threads; the type of several
    # elements, their zeros, a function of a tile, and a line in it after which a product and its sum are rounded once.
    thread = threads = zeros = inlined = contracted = ""
    preprocessed = False  # compiler macros say which registers there are

    def vector(self, kind: str, lanes: int) -> str:
        """The type of a vector of several elements."""
        return f"{kind}{lanes}"

    def named(self, op: str, dtype: DType) -> str:
        """The function for an operation on values of this dtype."""
        return self.function.format(op)

    def is_called(self, op: str, dtype: DType) -> bool:
        """Whether the function for an operation is a library's, whose vectors a branch would hide from compilers."""
        return False

    def pragma(self, how: Steps, reports: bool, counted: bool) -> str:
        """Returns the line before a loop or block that states these facts, if there is one. `reports`: its body checks
        data for faults; `counted`: a loop over a variable, not over the states of lanes."""
        return ""

    def bitcast(self, text: str, dtype: DType) -> str:
        """Reinterprets the bits as a value of another dtype."""
        raise NotImplementedError

    def constant(self, value: bool | int | float, dtype: DType) -> str:
        raise NotImplementedError

    def cast(self, text: str, src: DType, dst: DType) -> str:
        raise NotImplementedError


class CLike(Dialect):
    """C and similar languages: literals and conversions, for which a subclass provides the words."""

    small: dict[DType, str] = {}  # floats that are stored narrow and computed in float32
    unsigned, wide = "ull", "ll"  # suffixes of a uint64, and of a literal that needs more than 32 bits

    def number(self, value: float, dtype: DType) -> str:
        """Returns a float32 or float64 literal."""
        single = dtype is torch.float32
        if single:  # text and value agree even for numbers beyond its range
            value = torch.tensor(value, dtype=dtype).item()
        if not math.isfinite(value):
            return self.endless(value, single)
        text = repr(value)
        text = (text if any(c in text for c in ".e") else text + ".0") + ("f" if single else "")
        return f"({text})" if math.copysign(1, value) < 0 else text

    def endless(self, value: float, single: bool) -> str:
        """Returns an infinity or NaN."""
        raise NotImplementedError

    def small_number(self, value: float, dtype: DType) -> str:
        raise NotImplementedError

    def int64(self, value: int) -> str:
        raise NotImplementedError

    def widened(self, text: str, src: DType) -> str:
        """Converts a small float to float32."""
        raise NotImplementedError

    def narrowed(self, text: str, src: DType, dst: DType) -> str:
        """Converts any other value to a small float."""
        raise NotImplementedError

    def whole(self, text: str, src: DType, dst: DType) -> str:
        """Converts a float to an integer."""
        raise NotImplementedError

    def constant(self, value: bool | int | float, dtype: DType) -> str:
        if is_bool(dtype):
            return "true" if value else "false"
        if dtype in self.small:
            return self.small_number(float(value), dtype)
        if is_float(dtype):
            return self.number(float(value), dtype)
        if dtype is torch.int64:
            return self.int64(int(value))
        suffix = self.unsigned if dtype is torch.uint64 else self.wide if abs(int(value)) >= 2**31 else ""
        return f"(({self.types[dtype]})({value}{suffix}))"

    def cast(self, text: str, src: DType, dst: DType) -> str:
        if src in self.small:
            text, src = self.widened(text, src), torch.float32
        if dst in self.small:
            return self.narrowed(text, src, dst)
        if src is dst:
            return text
        if is_bool(src):
            # A select: g++ does not vectorize loops that convert a bool to a number directly.
            return f"({text} ? {self.constant(1, dst)} : {self.constant(0, dst)})"
        if is_bool(dst):
            return f"({text} != 0)"
        if is_float(src) and not is_float(dst):
            return self.whole(text, src, dst)
        return f"({self.types[dst]})({text})"
