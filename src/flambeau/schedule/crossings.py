"""Maps that write across the rows or columns of a reduction, and are kernels of their own because of that.

A softmax over a permuted tensor reads along one dimension and writes along another. In the kernel of the reduction,
whose tiles have lanes along what it reads, a warp writes one element of each of 32 cache lines. A map of its own has
square tiles, which are read and written in whole lines; the reduction then reads its rows alone, in its best form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, Index, Sym, about, volume
from flambeau.ir.nodes import Graph, Node, Pointwise
from flambeau.ir.tuning import BlockTuning, Tuning


def writes_across(graph: Graph, n: Pointwise, at: Sequence[Index], reads: Iterable[Index], vars: Sequence[Sym],
                  reduced: Collection[Sym], t: Tuning) -> bool:
    """Whether a map writes (at `at`) across what a reduction over the same points reads (at `reads`), and no tile of
    the reduction covers memory sectors both ways. `vars`: those of the points, of which `reduced` are reduced."""
    place = graph.buffers[n.names[0]].place(at)
    written = contiguous(place, vars)
    along = {contiguous(read, vars) for read in reads}
    if not isinstance(t, BlockTuning) or written is None or written in reduced or len(along) != 1:
        return False
    step = None if (read := along.pop()) is None else place.coefficient(read)
    if step is None or abs(about(step, graph.typical, t.across_least)) < t.across_least:
        return False
    if about(volume(vars), graph.typical, t.filled) < t.filled:  # small: another launch takes longer than the crossing
        return False
    rows, sector = volume(reduced), t.sector // graph.buffers[n.names[0]].dtype.itemsize
    held = rows.is_const and sector << (rows.const - 1).bit_length() <= t.row
    return read not in reduced or not held


def contiguous(place: Index, vars: Sequence[Sym]) -> Sym | None:
    """The variable whose points are adjacent in memory."""
    return next((v for v in vars if place.coefficient(v) is ONE), None)


def row_reads(graph: Graph, n: Node, mapping: dict[Sym, Index], reduced: Collection[Sym]) -> list[Index]:
    """The addresses at which a reduction reads what changes along a row, in the variables of the mapping."""
    found = [b.place(e.attr[1]).subs(mapping) for e in loads(*n.exprs())
             if (b := graph.buffers[e.attr[0]]).strides is not None]
    return [place for place in found if not place.symbols().isdisjoint(reduced)]
