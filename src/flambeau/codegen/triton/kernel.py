"""Kernels in Triton: chooses the writer for each kind of kernel, and writes the module around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flambeau.ir.index import WORD, Sym
from flambeau.ir.program import (
    AnyKernel,
    AnySize,
    AttentionKernel,
    ContractKernel,
    LoopKernel,
    ScanKernel,
    ScatterKernel,
    TableKernel,
)
from flambeau.ir.tuning import UNSCALED, Scale

from ..source import BlockSource, Part, site_table
from .blocks import WIDE
from .dialect import POINTER
from .loops import LoopBlocks
from .scans import ScanBlocks
from .scatters import write_scatter
from .tensor_cores.attention_lists import write_attention
from .tensor_cores.totals import write_product
from .tensor_tables import TableBlocks


def render(kernel: AnyKernel, name: str, scale: Scale = UNSCALED) -> BlockSource:
    """Returns the text of one kernel, in the block shape of the heuristics, changed by `scale`."""
    if isinstance(kernel, ScatterKernel):
        drafts = write_scatter(kernel)
    elif isinstance(kernel, AttentionKernel):
        drafts = write_attention(kernel, scale)
    elif isinstance(kernel, ContractKernel):
        drafts = write_product(kernel, scale)
    else:
        kinds: dict[type[AnyKernel], Callable[..., LoopBlocks | ScanBlocks | TableBlocks]] = {
            LoopKernel: LoopBlocks, ScanKernel: ScanBlocks, TableKernel: TableBlocks}
        drafts = [kinds[type(kernel)](kernel, scale).render()]
    arguments = [*(f"p{k}" for k in range(len(kernel.params))), *(f"n{k}" for k in range(len(kernel.sizes)))]
    arguments += ["work"] if any(d.workspace for d in drafts) else []
    signals = any(d.signals for d in drafts)
    arguments += ["flags"] if signals else []
    workspace = ""
    lines = ["import triton", "import triton.language as tl", "import tritonlib as fl", "", ""]
    parts = []
    for k, d in enumerate(drafts):
        given = [*arguments, "bad", *(m.name for m in d.maps)]
        text = [*d.writer.helpers, "@triton.jit", f"def part{k}({', '.join(given)}):",
                *(f"    {d.writer.sym(s)} = n{i}" for i, s in enumerate(kernel.sizes)),
                *("    " + x for x in d.writer.scopes[0].lines), ""]
        lines += text
        parts.append(Part(f"part{k}", d.grid, scale.warped(d.warps), d.stages, d.maps, d.waits))
        workspace = workspace or d.workspace
    typical = dict(kernel.typical) if isinstance(kernel, AnySize) else {}
    widths = dict.fromkeys(d.writer.width for d in drafts)
    narrow = "" if WIDE in widths else " and ".join(w.holds for w in widths if w.holds)
    sizes = tuple("i32" if narrow and not s.name.startswith(WORD) else "i64" for s in kernel.sizes)
    return BlockSource(name, "\n".join(lines) + "\n", tuple(POINTER[p.dtype] for p in kernel.params),
                       sizes, tuple(parts), workspace, narrow,
                       sites=() if isinstance(kernel, TableKernel) else site_table(kernel),
                       usual=bits(kernel.sizes[:63], lambda s: typical.get(s, 1) % 16 == 0),
                       words=bits(kernel.sizes[:64], lambda s: s.name.startswith(WORD)),
                       cleared=not any(d.fills for d in drafts), signals=signals)


def bits(sizes: Sequence[Sym], holds: Callable[[Sym], bool]) -> int:
    return sum(1 << k for k, s in enumerate(sizes) if holds(s))
