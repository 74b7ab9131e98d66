"""Kernels in a C language of GPUs: chooses the writer for each loop form, and writes the functions around it.

A kernel has one of two shapes. On CPUs a work-item is a thread: the loops are those of the C++ kernels, and work-items
divide the outermost among themselves (`cpu_threads.py`). On GPUs a work-item is a point, and a work-group a row
(`points.py`, `rows.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch

from flambeau.ir.dtypes import DType
from flambeau.ir.expr import loads, walk
from flambeau.ir.faults import WHICH, access
from flambeau.ir.index import Sym, volume
from flambeau.ir.program import ContractKernel, Kernel, LoopKernel, ScanKernel, ScatterKernel, reductions_of

from ..c.nest import extent_names
from ..source import Range, RangeSource, host_text, site_table
from ..writer import Writer
from .columns import ColumnLoops
from .contraction_tiles import MatrixTiles, Tiles
from .cpu_threads import LOOPS as THREAD_LOOPS
from .cpu_threads import ThreadBlocks, ThreadScan, ThreadScatter, ThreadStart
from .dialect import LaunchDraft, Shape, SimtDialect
from .points import PointLoops, PointScan, PointScatter, PointStart
from .rows import RowLoops
from .scans import ColumnScan, RowScan
from .transposes import Transpose
from .wide_access import StreamedPoints

LOOPS: dict[str, type[PointLoops]] = {
    "points": PointLoops, "rows": RowLoops, "columns": ColumnLoops, "transpose": Transpose, "streamed": StreamedPoints}
SCANS: dict[str, type[PointScan | RowScan | ColumnScan]] = {
    "points": PointScan, "rows": RowScan, "columns": ColumnScan}
_WORD, _SEVERAL = re.compile(r"[A-Za-z_]\w*"), re.compile(r", \w+ = ")
_CONSTANT = re.compile(r"\s*const \w+ (\w+) = (.*);$")
NARROW = 2**31 - 2**16  # indices below it are 32 bits wide, with room for the last group


def render_in(language: type[SimtDialect], kernel: Kernel, name: str, shape: Shape) -> RangeSource:
    """The text of one kernel."""
    d = language(narrow=not shape.threads and fits_narrow(kernel), bounded=shape.bounded)
    drafts = write_threads(d, kernel, shape) if shape.threads else write_points(d, kernel, shape)
    names = {s: f"n{k}" for k, s in enumerate(kernel.sizes)}
    extents = [n for k in range(len(kernel.params)) for n in extent_names(f"p{k}")] if shape.bounded else []
    lines: list[str] = []
    ranges = []
    checks = False
    functions: frozenset[str] = frozenset().union(*(draft.writer.functions for draft in drafts))
    wide = d.types[torch.int64]
    for k, draft in enumerate(drafts):
        reports = draft.writer.scopes[0].checks
        checks |= reports
        told = f"  {d.report(exceeded(draft.writer, len(extents) // 2))}" if reports else ""
        lines += [*draft.before, *d.head(kernel, f"KERNEL_NAME_{k}", draft.group, extents),
                  *(f"  const {wide} {draft.writer.sym(s)} = {n};" for s, n in names.items()),
                  *([f"  {wide} bad = 0;"] if reports else []),
                  *("  " + x for x in needed(draft.writer.scopes[0].lines)),
                  *([told] if reports else []), "}"]
        items = draft.items if isinstance(draft.items, str) else host_text(draft.items, names)
        ranges.append(Range(f"KERNEL_NAME_{k}", items, draft.group))
    return RangeSource(name, "\n".join(lines) + "\n", tuple(p.dtype.itemsize for p in kernel.params),
                       tuple(p.written for p in kernel.params), tuple(reaches(kernel)),
                       len(kernel.sizes) + len(extents), tuple(ranges), checks, d.headers(functions),
                       site_table(kernel), shape.bounded, kernel.origins,
                       isinstance(kernel, ScatterKernel) and kernel.mode == "set" and not kernel.unique)


def needed(lines: Sequence[str]) -> list[str]:
    """The lines without constants that nothing reads, such as the place of an element that registers hold."""
    words = [set(_WORD.findall(line)) for line in lines]
    depths = [len(line) - len(line.lstrip()) for line in lines]
    kept: list[int] = []  # from the last line on
    for at in range(len(lines) - 1, -1, -1):
        found = _CONSTANT.match(lines[at])
        if found and "bad" not in words[at] and not _SEVERAL.search(found[2]):
            inside = takewhile(lambda k, depth=depths[at]: depths[k] >= depth, reversed(kept))  # type: ignore[misc]
            if not any(found[1] in words[k] for k in inside):
                continue
        kept.append(at)
    return [lines[at] for at in reversed(kept)]


def exceeded(w: Writer, pointers: int) -> str:
    """An expression for the size that was exceeded, by the fault in `bad`."""
    text = "0"
    for b, code in w.sites.items():
        text = f"(bad >> {WHICH}) == {code >> WHICH} ? {w.index(b.size)} : {text}"
    for k in range(pointers if w.d.bounded else 0):
        text = f"(bad >> {WHICH}) == {access(k) >> WHICH} ? {extent_names(f'p{k}')[1]} : {text}"
    return text


def dtypes_of(k: Kernel) -> frozenset[DType]:
    """All dtypes that a kernel reads, computes and writes."""
    combines = [i.joins for i in reductions_of(k.items)] if isinstance(k, LoopKernel) \
        else [k.combine] if isinstance(k, ScanKernel) else []
    inside = [e.dtype for e in walk(*k.everything(), *(e for c in combines for e in c.result))]
    return frozenset((*inside, *(p.dtype for p in k.params)))


def reaches(k: Kernel) -> Iterator[int]:
    """For each pointer, the number of bytes after it that the kernel can touch; 0 if run-time sizes decide it."""
    touched = [*((e.attr[0], e.attr[1][0]) for e in loads(*k.everything())), *k.stores]
    for p in k.params:
        ends = [a.bounds()[1] for name, a in touched if name == p.name]
        yield 0 if None in ends else p.dtype.itemsize * (1 + max((n for n in ends if n is not None), default=0))


# ---- which writer ----------------------------------------------------------------------------------------


def write_threads(d: SimtDialect, kernel: Kernel, shape: Shape) -> list[LaunchDraft]:
    """The launches of a kernel on a CPU."""
    if isinstance(kernel, ContractKernel):
        return [ThreadBlocks(d, kernel, shape.units).write()]
    if isinstance(kernel, LoopKernel | ScanKernel):
        one = THREAD_LOOPS[kernel.form.name](d, kernel) if isinstance(kernel, LoopKernel) else ThreadScan(d, kernel)
        one.render()
        return [one.draft()]
    assert isinstance(kernel, ScatterKernel)
    writes = ThreadScatter(d, kernel)
    writes.render()
    if not writes.begins:
        return [writes.draft()]
    start = ThreadStart(d, kernel)
    start.start()
    return [start.draft(), writes.draft()]


def write_points(d: SimtDialect, kernel: Kernel, shape: Shape) -> list[LaunchDraft]:
    """The launches of a kernel on a GPU."""
    if isinstance(kernel, ContractKernel):
        whole = d.matrices is not None and kernel.left.dtype is torch.float32
        return [(MatrixTiles if whole else Tiles)(d, kernel, shape).write()]
    if isinstance(kernel, LoopKernel):
        loops = LOOPS[kernel.form.name](d, kernel, shape)
        loops.write()
        return [loops.draft()]
    if isinstance(kernel, ScanKernel):
        scan = SCANS[kernel.form.name](d, kernel, shape)
        scan.write()
        return [scan.draft()]
    drafts = []
    if kernel.init is not None:
        start = PointStart(d, kernel, shape)
        start.write()
        drafts.append(start.draft())
    scatter = PointScatter(d, kernel, shape)
    scatter.write_all()
    return [*drafts, scatter.draft()]


def fits_narrow(k: Kernel) -> bool:
    """Whether all indices fit in 32 bits: GPUs compute with these in half the time or less."""
    if isinstance(k, ScatterKernel):
        domains: list[tuple[Sym, ...]] = [k.vars, k.out_vars]
    elif isinstance(k, ContractKernel):
        domains = [(*k.batch, *k.rows, *k.columns), k.depth]
    else:
        inner = k.inner if isinstance(k, LoopKernel) else (k.axis,)
        # A segment is a part of its axis, so there are fewer points than pairs of an outer point and one of the axis.
        domains = [k.outer, inner] if isinstance(k, LoopKernel) and k.bounds is not None else [(*k.outer, *inner)]
    points = [volume(vars) for vars in domains]
    inside = [i for e in walk(*k.everything()) for i in e.own_indices()]
    return not any(i.can_leave(NARROW) for i in (*inside, *(a for _, a in k.stores), *points))
