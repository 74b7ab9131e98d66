"""Maps that write across the rows or columns of a reduction, and are kernels of their own because of that.

A softmax over a permuted tensor reads along one dimension and writes along another. In the kernel of the reduction,
whose tiles have lanes along what it reads, a warp writes one element of each of 32 cache lines. A map of its own has
square tiles, which are read and written in whole lines; the reduction then reads its rows alone, in its best form.
On CPUs this matters if both dimensions are reduced (a group norm of a permuted image), because all stages of a kernel
walk a row in the same order, or if few columns lie side by side, which are no whole vectors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, Index, Sym, about, volume
from flambeau.ir.nodes import Graph, Node, Pointwise
from flambeau.ir.tuning import BlockTuning, CpuTuning, Tuning


def writes_across(graph: Graph, n: Pointwise, at: Sequence[Index], reads: Iterable[Index], vars: Sequence[Sym],
                  reduced: Collection[Sym], t: Tuning) -> bool:
    """Whether a map writes (at `at`) across what a reduction over the same points reads (at `reads`), and takes less
    time in a kernel of its own. `vars`: those of the points, of which `reduced` are reduced."""
    b = graph.buffers[n.names[0]]
    place = b.place(at)
    written, along = contiguous(place, vars), {contiguous(read, vars) for read in reads}
    if written is None or len(along) != 1:
        return False
    read = along.pop()
    if isinstance(t, CpuTuning):
        known = all(v.size.is_const for v in vars)
        return known and read is not None and read is not written and leaves_cache(
            read, written, volume(reduced).const * b.dtype.itemsize, reduced, t)
    if not isinstance(t, BlockTuning) or written in reduced:
        return False
    step = None if read is None else place.coefficient(read)
    if step is None or abs(about(step, graph.typical, t.across_least)) < t.across_least:
        return False
    if about(volume(vars), graph.typical, t.filled) < t.filled:  # small: another launch takes longer than the crossing
        return False
    rows, sector = volume(reduced), t.sector // b.dtype.itemsize
    held = rows.is_const and sector << (rows.const - 1).bit_length() <= t.row
    return read not in reduced or not held


def leaves_cache(read: Sym, written: Sym, row: int, reduced: Collection[Sym], t: CpuTuning) -> bool:
    """Whether a CPU writes across a row (of so many bytes) that its first-level cache does not hold, or across columns
    that are no whole vectors."""
    if read in reduced:
        return written in reduced and row > t.row_kept
    return written not in reduced and read.size.const < t.columns_kept


def contiguous(place: Index, vars: Sequence[Sym]) -> Sym | None:
    """The variable whose points are adjacent in memory."""
    return next((v for v in vars if place.coefficient(v) is ONE), None)


def row_reads(graph: Graph, n: Node, mapping: dict[Sym, Index], reduced: Collection[Sym]) -> list[Index]:
    """The addresses at which a reduction reads what changes along a row, in the variables of the mapping."""
    found = [b.place(e.attr[1]).subs(mapping) for e in loads(*n.exprs())
             if (b := graph.buffers[e.attr[0]]).strides is not None]
    return [place for place in found if not place.symbols().isdisjoint(reduced)]
