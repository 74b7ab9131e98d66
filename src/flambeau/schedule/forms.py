"""Chooses the loop form of each kernel from the tuning table of the machine; codegen writes it.

A form is a name that the writers of the machine's language know, with a width where columns are processed side by side.
Decisions that depend on the generated text (where a loop is split because a mask changes, which tile sizes are tried)
are left to the writers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import Expr, cost_of, loads, walk
from flambeau.ir.index import ONE, Index, Sym, ceildiv, volume, walks_as_one
from flambeau.ir.program import Form, Kernel, LoopKernel, ScanKernel
from flambeau.ir.tuning import BlockTuning, CpuTuning, PointTuning, Tuning


def formed(kernel: Kernel, t: Tuning) -> Kernel:
    """The kernel with its loop form; scatters and contractions have only one form each."""
    if not isinstance(kernel, LoopKernel | ScanKernel):
        return kernel
    choose = next(choose for kind, choose in CHOICES[type(kernel)].items() if isinstance(t, kind))
    return replace(kernel, form=choose(kernel, t))


def leaves_cache(length: int, accesses: int, t: Tuning) -> bool:
    """Whether cache lines that neighbouring rows of this length share are evicted before the next row needs them."""
    return length * accesses * t.line_bytes > t.row_lines


def is_shared(points: Index, length: Index, t: Tuning) -> bool:
    """Whether threads must share a row, because there are few outer points and the rows are long."""
    return points.is_const and points.const < t.enough_points and (not length.is_const or length.const >= t.long_row)


# ---- CPUs ------------------------------------------------------------------------------------------------


def cpu_loops(k: LoopKernel, t: CpuTuning) -> Form:
    if not k.inner:
        return cpu_map(k, t)
    if k.vector in k.outer:
        return cpu_columns(k, t)
    shared = t.shares_rows and k.bounds is None and is_shared(volume(k.outer), volume(k.inner), t)
    return Form("shared rows" if shared else "rows")


def cpu_map(k: LoopKernel, t: CpuTuning) -> Form:
    if k.tile is not None:
        return Form("flat tiles" if is_flat(k, t) else "tiles")
    if k.vector is None:
        return Form("points")
    others = [v for v in k.outer if v is not k.vector]
    return Form("chunks" if not others or is_shared(volume(others), k.vector.size, t) else "lines")


def is_flat(k: LoopKernel, t: CpuTuning) -> bool:
    """Whether the lines of a tile are walked as one: if they are short, if nothing is read transposed, or if much of
    each line would be left over after whole vectors and computed element by element."""
    assert k.tile is not None and k.vector is not None
    size, exprs = k.vector.size, k.everything()
    if not size.is_const:
        return False
    ragged = t.is_ragged(size.const, widest_float(exprs)) and cost_of(exprs) >= t.flat_work
    apart = {e.attr[1][0] for e in k.reads_apart()}
    return (size.const < t.transpose_least or ragged or not k.transposed_reads()) and all(
        at in apart or walks_as_one(at, k.tile, k.vector) for at in k.places())


def widest_float(exprs: Sequence[Expr]) -> int:
    """The bytes of the widest dtype computed with: at least 4, because halves are converted to floats first."""
    return max((4, *(e.dtype.itemsize for e in walk(*exprs) if is_float(e.dtype))))


def cpu_columns(k: LoopKernel, t: CpuTuning) -> Form:
    assert k.vector is not None
    dtypes = k.dtype_of()
    states = [dtypes[n].itemsize for i in k.items if i.level == "outer" or i.combine is not None for n in i.names]
    size = k.vector.size
    width = max(1, min(t.columns, size.const)) if size.is_const else t.columns
    if k.bounds is not None:
        width = in_registers(size, width, max(states), t)
    blocks = ceildiv(size, width) * volume([v for v in k.outer if v is not k.vector])
    if not (t.shares_rows and k.bounds is None and is_shared(blocks, volume(k.inner), t)):
        return Form("columns", width)
    return Form("shared columns", min(width, max(16, t.stack_bytes // (t.chunks * sum(states)) // 16 * 16)))


def in_registers(columns: Index, width: int, state: int, t: CpuTuning) -> int:
    """The width of a column block of a segment. Its rows may be anywhere in memory, so a narrow block costs nothing and
    keeps its states in registers: the widest that fits there and divides the columns, else `width`."""
    most = t.register_bytes // state
    fitting = [w for w in range(most // 4, most + 1) if columns.is_const and columns.const % w == 0]
    return fitting[-1] if width > most and fitting else width


def cpu_scans(k: ScanKernel, t: CpuTuning) -> Form:
    if k.vector is not None:
        return Form("columns")
    points, length = volume(k.outer), k.axis.size
    few = points.is_const and points.const < t.scan_few
    long = not length.is_const or length.const >= t.scan_long
    # A scan in parts computes the total of each part first, which takes too long if the combine is expensive.
    cheap = cost_of(k.combine.result) <= t.expensive_combine
    return Form("parts" if t.shares_rows and few and long and cheap else "rows")


# ---- GPUs in their C languages -----------------------------------------------------------------------------


def points_beside(length: int, row: bool, t: PointTuning) -> int:
    """The number of outer points of a work-group, if each has `length` inner points."""
    return t.group if length <= t.short_row else 1 if row else t.columns


def point_loops(k: LoopKernel, t: PointTuning) -> Form:
    exprs, length = k.everything(), volume(k.inner)
    if k.inner and not (k.bounds is None and length.is_const and length.const <= t.short_row):
        if is_row(k) and k.bounds is None and k.about(length, t.short_row + 1) > t.short_row:
            across = [] if k.scratch else k.across_rows()
            if not leaves_cache(k.about(length, t.row_lines), len(across), t):
                return Form("rows")  # the reduced variable is contiguous, and long enough for a work-group
            return Form("columns", line_of(across, k.outer[-1], k, t))
        few = max(k.about(volume(k.outer), t.columns), 1)
        return Form("columns", min(t.columns, 1 << (few - 1).bit_length()))
    if k.inner and k.reads_again():
        return Form("columns", t.group)  # registers hold values that are read more than once
    windows = any(e.op == "fold" for e in walk(*exprs))  # their elements are read again and again, from a cache
    many = not k.inner and k.about(volume(k.outer), t.streamed_points) >= t.streamed_points and not windows
    if many and k.transposed_reads(masked=True):
        return Form("transpose")
    memory = cost_of(exprs) <= t.streamed_work and 0 < len(loads(*exprs)) * t.access_bytes // 4 <= t.registers
    return Form("streamed" if many and k.outer and k.bounds is None and memory else "points")


def is_row(k: LoopKernel) -> bool:
    """Whether the contiguous variable is reduced, or no outer variable is contiguous in the data reduced: the registers
    of a work-group hold the longest rows."""
    inside = [at for _, at in k.accesses() if at.symbols() & {*k.inner}]
    return k.vector in k.inner or not any(at.coefficient(v) is ONE for at in inside for v in k.outer)


def point_scans(k: ScanKernel, t: PointTuning) -> Form:
    few, column = k.about(volume(k.outer), t.few_rows) < t.few_rows, k.column(t.scan_columns)
    if k.about(k.axis.size, t.short_row + 1) <= t.short_row:
        return Form("points")
    long = leaves_cache(k.about(k.axis.size, t.row_lines), len(k.params), t)
    if column is None or not long and any(a.coefficient(k.axis) is ONE for _, a in k.stores):
        return Form("rows")
    wide = t.scan_few_columns if few else t.scan_columns
    if long:
        wide = max(wide, min(t.scan_columns, line_of([p.name for p in k.params], column, k, t)))
    return Form("columns", max(min(1 << (k.about(column.size, wide) - 1).bit_length(), wide), 1))


def line_of(names: Sequence[str], v: Sym, k: LoopKernel | ScanKernel, t: PointTuning) -> int:
    """The number of points of a variable that fill cache lines of all these buffers, rounded up to a power of two."""
    most = t.line_bytes // min(p.dtype.itemsize for p in k.params if p.name in names)
    return 1 << (max(1, min(most, t.columns, k.about(v.size, most))) - 1).bit_length()


# ---- GPUs in Triton ----------------------------------------------------------------------------------------


def block_loops(k: LoopKernel, t: BlockTuning) -> Form:
    if not k.inner:
        return Form("map")
    length = volume(k.inner)
    if k.bounds is not None:
        return Form("segments")
    kept = bool(k.scratch) or k.reads_again()
    width = rows_beside(k, t) if k.vector in k.inner else columns_beside(k, t)
    if k.vector in k.outer and length.is_const and kept:
        read = {e.attr[0] for e in loads(*k.everything())}
        held = min(held_columns(length.const, [p.dtype.itemsize for p in k.params if p.name in read], t), width)
        if held and is_compact(k):  # a few columns of all rows are whole sectors
            held = min(held, max(t.column_tile >> (length.const - 1).bit_length(), columns_of_block(k)))
        return Form("whole rows", held) if held else Form("rows in pieces", width)
    most = t.row if k.vector in k.inner else t.column_rows
    if k.vector in k.inner and not kept:  # nothing is held for a later stage
        if width < (wide := rows_beside(k, t, held=False)):  # pieces of more rows
            return Form("rows in pieces", wide)
        most //= max(1, sum(not e.symbols().isdisjoint(k.inner) for e in loads(*k.everything())))
        if k.is_crossed():  # pieces are tiles, which cover whole cache lines in both directions
            return Form("rows in pieces", width)
    return Form("whole rows" if length.is_const and length.const <= most else "rows in pieces", width)


def columns_beside(k: LoopKernel, t: BlockTuning) -> int:
    """The number of columns of one program: fewer if there would be too few programs to fill a GPU."""
    width, columns = t.columns, k.about(volume(k.outer), t.columns * t.enough_programs)
    while width > t.few_columns and columns < width * t.enough_programs:
        width //= 2
    return width


def is_compact(k: LoopKernel) -> bool:
    """Whether columns are so few that the rows of one block follow one another in memory, but for a gap no longer than
    a row."""
    v, last = k.vector, k.inner[-1]
    steps = [at.coefficient(last) for _, at in k.accesses() if v in at.symbols() and last in at.symbols()]
    return v is not None and v.size.is_const and bool(steps) and all(
        s is not None and s.is_const and 0 < s.const <= 2 * v.size.const for s in steps)


def columns_of_block(k: LoopKernel) -> int:
    """The columns that lie side by side, as a power of two."""
    assert k.vector is not None
    return 1 << (k.vector.size.const - 1).bit_length()


def rows_beside(k: LoopKernel, t: BlockTuning, held: bool = True) -> int:
    """The number of rows that one program processes side by side. If a buffer is contiguous across the rows, as many as
    fill memory sectors of it, as long as enough programs remain, and a tile has room for them if they are `held`."""
    across = k.across_rows()
    if not across:
        return 1
    length = k.about(volume(k.inner), t.row + 1)
    width = 2 * t.sector // min(p.dtype.itemsize for p in k.params if p.name in across)
    if held and length <= t.row:
        width = min(width, t.row >> (length - 1).bit_length())
    rows = k.about(volume(k.outer), width * t.processors)
    while width > 1 and rows < width * t.processors:
        width //= 2
    return width


def held_columns(length: int, read: Sequence[int], t: Tuning) -> int:
    """The number of columns of this length that one program holds side by side, so that it reads them only once: fewer
    if they are longer or if more buffers are read, as long as they fill memory sectors; 0 if it cannot hold them.
    `read`: the bytes of an element of each buffer that is read."""
    if not isinstance(t, BlockTuning) or not read:
        return 0
    rows, width, sector = 1 << (length - 1).bit_length(), t.columns, t.sector // min(read)
    while width > sector and rows * width * len(read) > (t.column_tile if width > 2 * sector else t.row):
        width //= 2
    return width if rows * width <= t.row else 0


def block_scans(k: ScanKernel, t: BlockTuning) -> Form:
    """Chooses between rows and columns. Whether a row is split into pieces that wait for one another is decided later,
    by the size of a piece."""
    return Form("rows" if not k.outer or all(a.coefficient(k.axis) is ONE for _, a in k.stores) else "columns")


CHOICES: dict[type, dict[type[Tuning], Callable[[Any, Any], Form]]] = {
    LoopKernel: {CpuTuning: cpu_loops, PointTuning: point_loops, BlockTuning: block_loops},
    ScanKernel: {CpuTuning: cpu_scans, PointTuning: point_scans, BlockTuning: block_scans},
}
