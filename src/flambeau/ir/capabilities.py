"""What the compiler passes know about a machine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from .dtypes import SUPPORTED, DType, is_float
from .tuning import CPU, Tuning

MODES = ("add", "mul", "min", "max")  # of scatters that join a value to what is there


@dataclass(frozen=True)
class Capabilities:
    name: str
    dtypes: frozenset[DType] = field(default=SUPPORTED)
    scratch_bytes: int = 1 << 18  # fast memory one worker may use for the rows of a fused kernel
    # One worker walks a plane in order: sums scattered into it cost no atomics and always add up in the same order.
    # Without this, gradients that could be scattered are gathered.
    ordered_scatter: bool = False
    # No result may depend on which of two points comes first: on request, and expensive without ordered scatters.
    deterministic: bool = False
    row_elements: int | None = None  # longest row whose values stay in fast memory, whatever their dtype
    # Registers of 32 bits that the work-items of a group have for a row, where that is what keeps one; 0: it is not.
    row_registers: int = 0
    # Larger intermediates are allocated one by one: an arena is there all the time, while an allocator that keeps its
    # memory has it for others, such as gradients, as soon as one is dead. None: all share an arena.
    arena_most: int | None = None
    programs: int = 1  # independent parts that a reduction of few results is cut into
    # A scan adds one by one, so that rounding errors pile up; otherwise in trees, where they hardly do.
    serial_scans: bool = True
    # Neighbours can share the four words of one draw of random bits.
    shared_words: bool = False
    # A read of one element from anywhere moves a whole sector: what is read at the same place should lie together.
    gathers_rows: bool = False
    # A read under a mask costs no more than one without; otherwise one reads elsewhere and drops what it gets.
    masked_reads: bool = False
    # To compute takes next to no time beside a trip through memory: what is cheap is rather computed again.
    waits_for_memory: bool = False
    tables: bool = False  # kernels can follow addresses that they read from memory
    missing: frozenset[str] = frozenset()  # operations of expressions that it has no function for
    inexact: frozenset[str] = frozenset()  # those whose last bits are not the ones of eager's kernels there
    scatters: frozenset[tuple[str, DType]] | None = None  # (mode, dtype) it can join; None: all
    # ATen has GPU kernels here: they save other tensors, step in float32 and do not report a division by zero.
    gpu_eager: bool = False
    contracts: bool = False  # matrix products, convolutions and attention are kernels too; otherwise library calls
    attends: bool = False  # attention is one kernel, and its gradient two, where it is a kernel at all
    # What tiles of a product can be made of, by units that multiply small numbers as they are; None: anything, widened.
    multiplies: frozenset[DType] | None = None
    shares: bool = False  # programs of a product's kernel can wait for each other, and divide long sums among them
    tile_tails: bool = False  # a product's kernel may have two sums, and reduce its results tile by tile
    ragged: bool = False  # a product's rows or depth may come in parts whose ends are data
    tf32: frozenset[str] = frozenset()  # of "product" and "convolution": those whose float32 factors may be rounded
    tuning: Tuning = CPU  # the numbers by which loops are shaped
    # A number of the run, which comes as the bits of a double, can be read where doubles cannot be computed with.
    reads_doubles: bool = False
    sorts: bool = False  # sorts are kernels too; otherwise library calls

    def holds(self, elements: int, words: int) -> bool:
        """Whether registers hold so many elements of so many words each; a work-item has a power of two of them."""
        return elements << max(words - 1, 0).bit_length() <= self.row_registers

    def swaps(self, mode: str, dtype: DType) -> bool:
        """Whether points that meet can join their values, in any order."""
        return self.scatters is None or (mode, dtype) in self.scatters

    def joins(self, mode: str, dtype: DType) -> bool:
        """Whether a scatter of that mode can be had, as it is or, one point after the other, in a fixed order."""
        return self.sorts or self.swaps(mode, dtype) or (self.deterministic and rounds(mode, dtype))


def rounds(mode: str, dtype: DType) -> bool:
    """Whether it matters in which order values join."""
    return mode in ("add", "mul") and is_float(dtype)
