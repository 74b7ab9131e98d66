"""Chooses the order of a kernel's groups, if some of its reads do not depend on all of its variables.

    scale[column] for every row: groups of one row after the other read all of `scale` again for each row.

If a cache does not hold that much, some rows are walked side by side instead (a band): all of them read a part of
`scale` before any group goes on to the next part. The same is done if elements of several rows, read or written, share
a cache line, and for the products of a batch whose factors share lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flambeau.ir.expr import loads, walk
from flambeau.ir.index import ONE, Index, Sym, as_index, ceildiv, maximum, volume
from flambeau.ir.lines import apart, extent, reached
from flambeau.ir.program import ContractKernel, Kernel, LoopKernel, ScanKernel, ScatterKernel
from flambeau.ir.tuning import POINTS


@dataclass(frozen=True)
class Bands:
    outer: tuple[Sym, ...]  # their points are the rows
    inner: tuple[Sym, ...]  # their points are a row
    rows: int  # rows side by side in a band
    chunk: int  # points per group
    groups: Index  # groups per row

    @property
    def size(self) -> Index:
        """The number of groups of a band."""
        return self.groups * self.rows

    def padded(self, groups: Index) -> Index:
        """The number of groups, rounded up to whole bands."""
        return ceildiv(groups, self.size) * self.size

    def turn(self, group: str, index: Callable[[Index], str]) -> str:
        """The place of a group in row-by-row order. The last band may have groups beyond the last row."""
        size = index(self.size)
        return f"({group} / {size} * {self.rows} + {group} % {self.rows}) * {index(self.groups)} + " \
               f"{group} % {size} / {self.rows}"


def windows(k: Kernel) -> dict[Sym, int]:
    """The number of places in each window loop of a kernel, at a point in the middle."""
    found = {v: hi - lo for e in walk(*k.everything()) if e.op == "fold" for v, lo, hi in e.attr.loops}
    middle = {s: as_index(k.about(s.size, 2) // 2) for n in found.values() for s in n.symbols() if s.extent is not None}
    return {v: max(k.about(n.subs(middle), 1), 1) for v, n in found.items()}


def touches(address: Index, itemsize: int, row: set[Sym], size: Callable[[Sym], int]) -> int:
    """The bytes of the cache lines that an access touches in one row."""
    points, most = reached(address, row, size), extent(address, row)
    bytes = points * apart(address, itemsize, row, POINTS.line_bytes)
    return bytes if most is None else min(bytes, most * itemsize)


def bands(k: Kernel, vars: Sequence[Sym], chunk: int, tiles: Index = ONE, outer: int | None = None) -> Bands | None:
    """The bands of a kernel; None if it needs none, or if data decide what a point reads. Each group has `chunk` points
    of these variables; for products, each product of the batch has `tiles` tiles. `outer`: how many of the variables
    may count rows."""
    if isinstance(k, LoopKernel) and k.bounds is not None:
        return None
    itemsizes, line = {p.name: p.dtype.itemsize for p in k.params}, POINTS.line_bytes
    product = isinstance(k, ContractKernel)
    read = loads(k.left, k.right) if isinstance(k, ContractKernel) else loads(*k.everything())
    reads = [(e.attr[1][0], itemsizes[e.attr[0]]) for e in read]
    if isinstance(k, ScatterKernel):
        reads += [(k.address, itemsizes[k.name])]
    if isinstance(k, LoopKernel):
        reads += [(at, itemsizes[name]) for name, at in k.stores]
    inner = k.inner if isinstance(k, LoopKernel) else (k.axis,) if isinstance(k, ScanKernel) else \
        (*k.rows, *k.columns, *k.depth) if isinstance(k, ContractKernel) else ()
    places = windows(k)

    def size(v: Sym) -> int:
        return places[v] if v in places else k.about(v.size, 1)

    found: dict[int, int] = {}  # bytes that are read again, by the number of outer variables
    for n in range(1, len(vars) + product if outer is None else outer + 1):
        row = {*vars[n:], *inner, *places}
        touched = {read: touches(*read, row, size) for read in reads}
        # Tiles of one product share its factors already, as far as a cache holds them; other products share only lines.
        again = sum(touched[read] for read in touched if product <= apart(*read, {vars[n - 1]}, line) < line)
        every = sum(touched.values())
        if k.about(vars[n - 1].size, 1) > 1 and every > POINTS.row_lines and again * POINTS.band_share > every:
            found[n] = again * (k.about(volume(vars[:n]), 1) - 1)
    if not found:
        return None
    n = max(found, key=lambda n: found[n])
    rows = k.about(volume(vars[:n]), 1)
    # `fitting`: the number of groups whose reads a cache holds. If rows share cache lines, all that fit are walked side
    # by side. If it does not even hold the reads of two groups, they share only what they read at about the same time.
    row = {*vars[n:], *inner}
    each = sum(bytes * reached(at, {*row, *places}, size) // max(reached(at, row, size), 1) for at, bytes in reads)
    fitting = POINTS.row_lines // max(each * chunk * k.about(volume(inner), 1), 1)
    between = any(0 < apart(*read, vars[:n], line) < line for read in reads)
    most = max(fitting, POINTS.band_rows) if between else POINTS.band_rows
    most = min(most, fitting) if fitting > 1 else most
    beside = -(-rows // -(-rows // most))  # so that the last band is about as high as the others
    groups = maximum(ceildiv(volume(vars[n:]), chunk) * tiles, 1)
    return Bands(tuple(vars[:n]), tuple(vars[n:]), beside, chunk, groups)
