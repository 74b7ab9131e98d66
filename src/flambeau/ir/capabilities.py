"""Facts about a machine that the compiler passes use, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from .dtypes import SUPPORTED, DType, is_float
from .tuning import CPU, Tuning

MODES = ("add", "mul", "min", "max")  # of scatters that combine a value with the element already there


@dataclass(frozen=True)
class Capabilities:
    name: str
    dtypes: frozenset[DType] = field(default=SUPPORTED)
    scratch_bytes: int = 1 << 18  # fast memory that one worker may use for the rows of a fused kernel
    # One worker walks a plane in order: sums scattered into it need no atomics and are always added in the same order.
    # Without this, gradients that could be scattered are gathered.
    ordered_scatter: bool = False
    # No result may depend on the order in which points run: on request, and expensive without ordered scatters.
    deterministic: bool = False
    row_elements: int | None = None  # longest row whose values stay in fast memory, whatever their dtype
    # 32-bit registers that a group's work-items have together for a row, if registers hold the row; else 0.
    row_registers: int = 0
    # Larger intermediates are allocated one by one. An arena is occupied all the time, while an allocator that caches
    # its memory can give it to others, such as gradients, as soon as one is dead. None: all share an arena.
    arena_most: int | None = None
    programs: int = 1  # independent parts into which a reduction with few results is cut
    # A scan adds one by one, so that rounding errors accumulate; otherwise in trees, where they hardly do.
    serial_scans: bool = True
    # Neighbours can share the four words of one draw of random bits.
    shared_words: bool = False
    # A load of one element from anywhere moves a whole sector: what is read at one computed position should be
    # contiguous.
    gathers_rows: bool = False
    # A masked load costs no more than a plain one; otherwise the load goes to a safe address and its result is dropped.
    masked_reads: bool = False
    # Computing takes next to no time compared with memory traffic: cheap values are computed again rather than stored.
    waits_for_memory: bool = False
    tables: bool = False  # kernels can follow addresses that they read from memory
    missing: frozenset[str] = frozenset()  # operations of expressions that it lacks
    inexact: frozenset[str] = frozenset()  # operations whose last bits differ from those of eager's kernels there
    scatters: frozenset[tuple[str, DType]] | None = None  # (mode, dtype) pairs it can combine; None: all
    # Eager runs ATen's GPU kernels here: they save other tensors, step in float32 and do not report a division by zero.
    gpu_eager: bool = False
    contracts: bool = False  # matrix products, convolutions and attention are kernels too; otherwise library calls
    attends: bool = False  # attention is one kernel, and its gradient two, where it becomes a kernel at all
    # Dtypes that tiles of a product can be loaded in, if there are units that multiply small numbers directly; None:
    # any, widened.
    multiplies: frozenset[DType] | None = None
    shares: bool = False  # programs of a product's kernel can wait for each other, and share long sums
    tile_tails: bool = False  # a product's kernel may have two sums, and reduce its results tile by tile
    ragged: bool = False  # a product's rows or depth may be in parts whose ends are data
    tf32: frozenset[str] = frozenset()  # "product" and "convolution", if their float32 factors may be rounded
    tuning: Tuning = CPU  # the numbers by which loops are shaped
    # A run-time float, passed as the bits of a double, can be read even where doubles cannot be computed with.
    reads_doubles: bool = False
    sorts: bool = False  # sorts are kernels too; otherwise library calls

    def holds(self, elements: int, words: int) -> bool:
        """Whether registers hold so many elements of so many words each; a work-item has a power of two of them."""
        return elements << max(words - 1, 0).bit_length() <= self.row_registers

    def swaps(self, mode: str, dtype: DType) -> bool:
        """Whether points with the same target can combine their values atomically, in any order."""
        return self.scatters is None or (mode, dtype) in self.scatters

    def joins(self, mode: str, dtype: DType) -> bool:
        """Whether a scatter of that mode is possible, directly or, one point after the other, in a fixed order."""
        return self.sorts or self.swaps(mode, dtype) or (self.deterministic and rounds(mode, dtype))


def rounds(mode: str, dtype: DType) -> bool:
    """Whether the result depends on the order in which values are combined."""
    return mode in ("add", "mul") and is_float(dtype)
