"""What a kernel can find wrong with its data, and the error that eager raises for it.

A kernel returns the faults it met as bits of one number: threads and lanes join theirs by `or`.
"""

from __future__ import annotations

from enum import IntEnum


class Fault(IntEnum):
    INDEX = 1
    ZERO_DIVISION = 2
    FIRST_OFFSET = 4
    LAST_OFFSET = 8
    DECREASING_OFFSETS = 16
    REPEATED_SIZE = 32
    NEGATIVE_REPEATS = 64


# In the order in which ATen looks: of several faults in one kernel, the first is the one that eager names. Only of
# decreasing offsets ATen says nothing: by dtype and mode it returns memory nobody wrote, zeros, or other bags' items.
ERRORS: dict[Fault, tuple[type[Exception], str]] = {
    Fault.ZERO_DIVISION: (RuntimeError, "ZeroDivisionError"),
    Fault.FIRST_OFFSET: (RuntimeError, "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to "
                                       "start from position 0"),
    Fault.LAST_OFFSET: (RuntimeError, "offsets[-1] can not be greater than input's length"),
    Fault.REPEATED_SIZE: (RuntimeError, "allocated size does not match required size"),
    Fault.NEGATIVE_REPEATS: (RuntimeError, "repeats can not be negative"),
    Fault.INDEX: (IndexError, "index out of range in self"),
    Fault.DECREASING_OFFSETS: (RuntimeError, "offsets must not decrease"),
}


def error_of(faults: int) -> Exception:
    kind, message = next(error for fault, error in ERRORS.items() if faults & fault)
    return kind(message)
