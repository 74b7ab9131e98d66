"""Errors that a kernel can find in its data, and the errors that eager raises for them.

A kernel returns the worst fault it met as one number of 63 bits, so that threads and lanes combine theirs by a maximum:
the kind, the dimension, which of several sizes of that kind and dimension was exceeded, and the offending index.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, auto
from typing import TYPE_CHECKING, NamedTuple

from flambeau.errors import BoundsError

if TYPE_CHECKING:
    from .index import Index


class Fault(IntEnum):
    """The kinds of faults, those that ATen checks first at the end: of several faults in one kernel, the greatest is
    reported."""

    # ATen does not report decreasing offsets: by dtype and mode it returns uninitialized memory, zeros, or others'
    # items.
    DECREASING_OFFSETS = auto()
    INDEX = auto()  # of advanced indexing, where negative indices count from the end
    FILLED = auto()
    ELEMENT = auto()  # of gather and scatter
    SELECTED = auto()  # of embedding, and of selections from a single dimension
    ROW = auto()  # of index_select along the second dimension
    COPIED = auto()
    TAKEN = auto()
    BAG = auto()
    TARGET = auto()
    POOLED = auto()
    SOURCE = auto()
    SORTER = auto()
    # their number is neither the number that a mask selects nor one; the index is ~ of the number that it selected
    VALUES = auto()
    PROBABILITY = auto()
    GUESS = auto()  # of a class, and what it is: both probabilities
    TRUTH = auto()
    DEVIATION = auto()
    NEGATIVE_REPEATS = auto()
    REPEATED_SIZE = auto()
    LAST_OFFSET = auto()
    FIRST_OFFSET = auto()
    ZERO_DIVISION = auto()
    MEMORY = auto()  # an access outside of its buffer, in kernels that check all accesses


class Bound(NamedTuple):
    """The size that an index is checked against, and the fault to report."""

    size: Index
    fault: Fault = Fault.SELECTED
    dim: int = 0


BOUNDS = "index {index} is out of bounds for dimension {dim} with size {size}"
MESSAGES: dict[Fault, tuple[type[Exception], str]] = {
    Fault.ZERO_DIVISION: (RuntimeError, "ZeroDivisionError"),
    Fault.FIRST_OFFSET: (RuntimeError, "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to "
                                       "start from position 0"),
    Fault.LAST_OFFSET: (RuntimeError, "offsets[-1] can not be greater than input's length"),
    Fault.REPEATED_SIZE: (RuntimeError, "allocated size does not match required size"),
    Fault.NEGATIVE_REPEATS: (RuntimeError, "repeats can not be negative"),
    Fault.SOURCE: (RuntimeError, "Number of elements of source < number of ones in mask"),
    Fault.VALUES: (RuntimeError, "shape mismatch: value tensor of shape [{size}] cannot be broadcast to indexing "
                                 "result of shape [{index}]"),
    Fault.DEVIATION: (RuntimeError, "normal expects all elements of std >= 0.0"),
    Fault.PROBABILITY: (RuntimeError, "Expected p_in >= 0 && p_in <= 1 to be true, but got false."),
    Fault.GUESS: (RuntimeError, "all elements of input should be between 0 and 1"),
    Fault.TRUTH: (RuntimeError, "all elements of target should be between 0 and 1"),
    Fault.SORTER: (RuntimeError, "torch.searchsorted(): sorter index out of range"),
    Fault.POOLED: (RuntimeError, "Found an invalid max index: {index} (output volumes are of size {size})"),
    Fault.TARGET: (IndexError, "Target {index} is out of bounds."),
    Fault.BAG: (RuntimeError, "embedding_bag: index of input takes value {index} which is not in the valid range "
                              "[0, {size})"),
    Fault.TAKEN: (IndexError, "out of range: tried to access index {index} on a tensor of {size} elements."),
    Fault.COPIED: (IndexError, f"index_copy_(): {BOUNDS}"),
    Fault.ROW: (RuntimeError, "INDICES element is out of DATA bounds, id={index} axis_dim={size}"),
    Fault.SELECTED: (IndexError, f"index out of range in self: {BOUNDS}"),  # eager ends at the colon
    Fault.ELEMENT: (RuntimeError, BOUNDS),
    Fault.FILLED: (IndexError, BOUNDS),
    Fault.INDEX: (IndexError, BOUNDS),
    Fault.DECREASING_OFFSETS: (RuntimeError, "offsets must not decrease"),
}
WRAPPED = (Fault.INDEX, Fault.FILLED, Fault.TAKEN)  # the size was added to negative indices before the check
EMPTY = "index is out of bounds for dimension with size 0"  # of advanced indexing

KIND, DIM, WHICH, WIDTH = 58, 54, 50, 50  # the lowest bit of each part of the number; the number of bits of the index
LOW = (1 << WIDTH) - 1
Sites = tuple[tuple[int, str], ...]  # numbers without their index, and the size: an expression over n0, n1, ...


def head(fault: Fault, dim: int = 0, which: int = 0) -> int:
    """Returns the number of a fault, without the index."""
    return int(fault) << KIND | min(dim, 15) << DIM | min(which, 15) << WHICH


def access(position: int) -> int:
    """Returns the number of accesses to a kernel's pointer, without the offset."""
    return head(Fault.MEMORY, position >> 4 & 15, position & 15)


def heads(bounds: Iterable[Bound]) -> dict[Bound, int]:
    """Returns the numbers of a kernel's checks."""
    count: dict[tuple[Fault, int], int] = {}
    out: dict[Bound, int] = {}
    for b in dict.fromkeys(bounds):
        out[b] = head(b.fault, b.dim, count.setdefault((b.fault, b.dim), 0))
        count[b.fault, b.dim] += 1
    return out


def size_of(code: int, sites: Sites, sizes: Iterable[int]) -> int | None:
    """Returns the size that was exceeded, computed from the sizes of the launch."""
    text = dict(sites).get(code & ~LOW)
    return None if text is None else eval(text, {f"n{k}": n for k, n in enumerate(sizes)} | {"min": min, "max": max})


def index_of(code: int) -> int:
    """Returns the offending index, or offset."""
    return (code & LOW) - ((code >> WIDTH - 1 & 1) << WIDTH)


def error_of(code: int, size: int | None = None) -> Exception:
    """Returns the error for a number that a kernel returned. If the size is no longer known, the message says so."""
    fault, dim, index = Fault(code >> KIND), code >> DIM & 15, index_of(code)
    if fault is Fault.MEMORY:
        return BoundsError(f"a kernel accessed element {index} of its pointer {code >> WHICH & 255}, which has {size}")
    kind, message = MESSAGES[fault]
    if fault is Fault.INDEX and size == 0:
        return kind(EMPTY)
    if index < 0 and fault in WRAPPED and size is not None:
        index -= size
    if fault is Fault.VALUES:
        index = ~index
    shown: dict[str, object] = {"index": index, "dim": dim, "size": "unknown" if size is None else size}
    return kind(message.format(**shown))


