"""What differs between C-like languages: a dialect is a small table that the writer (`writer.py`) reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import torch

from flambeau.ir.dtypes import DType, is_bool, is_float
from flambeau.ir.tuning import CPU

# ---- what is known of the steps of a loop, for a dialect to say in its own words ---------------------------


@dataclass(frozen=True)
class Lanes:
    """They do not wait for each other and may be lanes of vectors: `points` of them at once, of `size` bytes each, or
    as many as the compiler likes."""

    points: int = 0
    size: int = 0


@dataclass(frozen=True)
class Shares:
    """Threads divide them: those of the outermost `loops` loops together, where a condition holds if there is one."""

    loops: int = 1
    condition: str = ""


@dataclass(frozen=True)
class Pipelined:
    """Reads of later rounds begin before their turn: so many rounds are under way."""

    stages: int


class Plain(Enum):
    TEAM = auto()  # a block that all threads go through, each for its own share
    APART = auto()  # a loop that writes far apart: not in vectors
    UNROLLED = auto()


UNSIGNED = {torch.int32: torch.uint32, torch.int64: torch.uint64}  # which wrap around in every language
Steps = Lanes | Shares | Pipelined | Plain
LANES = Lanes()
TEAM, APART, UNROLLED = Plain.TEAM, Plain.APART, Plain.UNROLLED


class Dialect:
    """What differs between C-like languages. Subclasses override rows, not code."""

    types: dict[DType, str] = {}
    infix = {
        "add": "+", "sub": "-", "mul": "*", "div": "/", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
        "shl": "<<", "shr": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    }
    prefix = {"neg": "-", "logical_not": "!", "bitwise_not": "~"}
    quotient = "/"  # of integers that are not negative
    divisor = "({0} == 0 ? 1 : {0})"  # one that may be zero where nobody asks for the quotient: it must not trap
    function = "fl::{}"  # how a named operation is called
    fused = ""  # the function for a * b + c, with one rounding where the machine can
    choice = "{} ? {} : {}"  # by a condition that does not change in the loop, or between what functions answer
    narrow = ""  # a variable of a 32-bit index
    rounded = "{0}"  # an integer (of a type) that was a float before and becomes one again
    end = ";"  # of a statement
    unroll = CPU.unroll  # steps of a constant window that are written out
    long = "int64_t"
    bounded = False  # every access is checked: `c/nest.py` says against what
    prefetch = ""  # a call that asks for memory ahead of its use, where there is one: how many bytes, from where
    unlikely = "{}"  # a condition that seldom holds
    # On CPUs, where contractions have vectors: which thread this is, how many there are; the type of several elements,
    # their zeros, a function of a tile, and a line in it from which on a product and its sum are rounded once.
    thread = threads = zeros = inlined = contracted = ""
    preprocessed = False  # the compiler says in macros which registers there are

    def vector(self, kind: str, lanes: int) -> str:
        """The type of several elements side by side."""
        return f"{kind}{lanes}"

    def named(self, op: str, dtype: DType) -> str:
        """The function for an operation on values of this dtype."""
        return self.function.format(op)

    def is_called(self, op: str, dtype: DType) -> bool:
        """Whether the function for an operation is a library's, whose vectors a branch would hide from compilers."""
        return False

    def pragma(self, how: Steps, reports: bool, counted: bool) -> str:
        """The line before a loop or block that says so, if there is one. `reports`: something inside looks for what is
        wrong with the data; `counted`: a loop over a variable, not over the states of lanes."""
        return ""

    def bitcast(self, text: str, dtype: DType) -> str:
        """The same bits as a value of another dtype."""
        raise NotImplementedError

    def constant(self, value: bool | int | float, dtype: DType) -> str:
        raise NotImplementedError

    def cast(self, text: str, src: DType, dst: DType) -> str:
        raise NotImplementedError


class CLike(Dialect):
    """C and its nearest kin: literals and conversions, for which a subclass has the words."""

    small: dict[DType, str] = {}  # floats that are stored narrow and computed in float32
    unsigned, wide = "ull", "ll"  # ends of a uint64, and of what needs more than 32 bits

    def number(self, value: float, dtype: DType) -> str:
        """A float32 or float64."""
        single = dtype is torch.float32
        if single:  # text and value agree for numbers beyond its range as well
            value = torch.tensor(value, dtype=dtype).item()
        if not math.isfinite(value):
            return self.endless(value, single)
        text = repr(value)
        text = (text if any(c in text for c in ".e") else text + ".0") + ("f" if single else "")
        return f"({text})" if math.copysign(1, value) < 0 else text

    def endless(self, value: float, single: bool) -> str:
        """What is no finite number."""
        raise NotImplementedError

    def small_number(self, value: float, dtype: DType) -> str:
        raise NotImplementedError

    def int64(self, value: int) -> str:
        raise NotImplementedError

    def widened(self, text: str, src: DType) -> str:
        """A small float as float32."""
        raise NotImplementedError

    def narrowed(self, text: str, src: DType, dst: DType) -> str:
        """Anything else as a small float."""
        raise NotImplementedError

    def whole(self, text: str, src: DType, dst: DType) -> str:
        """A float as an integer."""
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
            # A select: loops with a bool turned into a number by conversion are not vectorised by g++.
            return f"({text} ? {self.constant(1, dst)} : {self.constant(0, dst)})"
        if is_bool(dst):
            return f"({text} != 0)"
        if is_float(src) and not is_float(dst):
            return self.whole(text, src, dst)
        return f"({self.types[dst]})({text})"
