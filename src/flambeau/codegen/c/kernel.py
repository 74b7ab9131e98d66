"""Kernels in C++: chooses the writer for each loop form, and writes the function around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flambeau.ir.expr import SPECIAL
from flambeau.ir.program import AnyKernel, ContractKernel, LoopKernel, ScanKernel, ScatterKernel, TableKernel

from ..source import KernelSource, site_table
from .columns import ColumnWriter, SharedColumnWriter
from .contractions.blocks import Blocks
from .contractions.dots import contraction
from .dialect import BOUNDED, CPP
from .loops import LoopWriter
from .maps import MapWriter
from .nest import extent_names
from .rows import RowWriter, SharedRowWriter
from .scans import ScanWriter
from .scatters import ScatterWriter
from .tensor_tables import TableWriter

LOOPS: dict[str, Callable[..., LoopWriter[Any]]] = {
    **dict.fromkeys(("points", "lines", "chunks", "tiles", "flat tiles"), MapWriter), "rows": RowWriter,
    "shared rows": SharedRowWriter, "columns": ColumnWriter, "shared columns": SharedColumnWriter}
WRITERS: dict[type[AnyKernel], Callable[..., LoopWriter[Any] | ScanWriter | ScatterWriter | Blocks]] = {
    ScanKernel: ScanWriter, TableKernel: TableWriter, ScatterKernel: ScatterWriter, ContractKernel: contraction}


def render(kernel: AnyKernel, name: str, bounded: bool = False) -> KernelSource:
    """The text of one kernel; `bounded`: one that checks its accesses."""
    bounded = bounded and not isinstance(kernel, TableKernel)
    write = LOOPS[kernel.form.name] if isinstance(kernel, LoopKernel) else WRITERS[type(kernel)]
    writer = write(BOUNDED if bounded else CPP, kernel)
    body = writer.render()
    before = writer.tile() if isinstance(writer, Blocks) else []
    lines = [*before, 'extern "C" int64_t KERNEL_NAME(void** p, const int64_t* n) {', "  int64_t bad = 0;"]
    # Names of buffers differ between graphs; equal kernels must have equal text.
    short = {p.name: f"p{k}" for k, p in enumerate(kernel.params)}
    for k, p in enumerate(kernel.params):
        kind = CPP.stored[p.dtype]
        keyword = "" if p.aliased else " __restrict__"
        lines.append(f"  {'' if p.written else 'const '}{kind}*{keyword} {short[p.name]} = "
                     f"({'' if p.written else 'const '}{kind}*)p[{k}];")
    lines += [f"  const int64_t {writer.sym(s)} = n[{k}];" for k, s in enumerate(kernel.sizes)]
    if bounded:
        names = [n for p in short.values() for n in extent_names(p)]
        lines += [f"  const int64_t {n} = n[{k}];" for k, n in enumerate(names, len(kernel.sizes))]
    if writer.recast:
        lines.append('  int64_t unknown_zero = 0; asm("" : "+r"(unknown_zero));')
    lines += ["  " + x for x in body]
    lines += ["  return bad;", "}"]
    headers = ("prelude.h", "special.h") if writer.functions & SPECIAL else ("prelude.h",)
    sites = () if isinstance(kernel, TableKernel) else site_table(kernel)
    return KernelSource(name, "\n".join(lines) + "\n", headers, sites, bounded)
