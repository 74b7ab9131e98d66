"""One kernel in several block shapes, from which a target chooses the fastest."""

from __future__ import annotations

from dataclasses import replace

from flambeau.ir.index import Dyn, Index, as_index, upper
from flambeau.ir.program import AnyKernel, AttentionKernel, ContractKernel, Kernel, ScatterKernel, TableKernel
from flambeau.ir.tuning import AROUND, OTHER_BLOCKS, OTHER_TILES

from ..source import BlockSource, host_text
from .kernel import render


def variants(kernel: AnyKernel, source: BlockSource) -> BlockSource:
    """Returns the source of a kernel with alternative block shapes attached.

    Kernels that start from the contents of their own results, such as updates in place and scatters, have none: they
    cannot be launched twice. Nor have kernels whose results cannot be compared, because no size tells how long they are
    or because they are spread over memory. Products have alternatives all the same, for tiles that were found
    elsewhere.
    """
    if isinstance(kernel, (ScatterKernel, TableKernel)):
        return source
    product = isinstance(kernel, ContractKernel)
    results = results_of(kernel)
    if not results and not product:
        return source
    made: list[BlockSource] = []
    for t in OTHER_BLOCKS if isinstance(kernel, AttentionKernel) else OTHER_TILES if product else AROUND:
        other = render(kernel, source.name, t)
        known = any((other.text, other.parts) == (s.text, s.parts) for s in (source, *made))
        if known and product:  # further scales give the same tile again
            break
        if not known:
            made.append(replace(other, name=f"{source.name}.{len(made) + 1}"))
    return replace(source, results=tuple(results), alternatives=tuple(made))


def results_of(kernel: Kernel | AttentionKernel) -> list[tuple[int, str]]:
    """Returns the pointers that are results, each with its number of elements; empty if a kernel has no comparable
    results."""
    results = []
    for at, p in enumerate(kernel.params):
        if p.aliased:
            return []
        if p.written:
            ends = [end_of(a) for name, a in kernel.stores if name == p.name]
            known = [e for e in ends if e is not None]
            if not known or len(known) < len(ends):
                return []
            names = {s: f"n{k}" for k, s in enumerate(kernel.sizes)}
            results.append((at, f"max({', '.join(host_text(e, names) for e in known)}, 0)"))
    return results


def end_of(address: Index) -> Index | None:
    """One past the last element that is written, over run-time sizes; None if unknown."""
    if any(isinstance(a, Dyn) for a in address.atoms()):
        return None
    # The range of a run-time size gives no end: it may be far beyond the actual size.
    fixed = all(s.extent is not None and s.extent.is_const for s in address.symbols())
    high = address.bounds()[1] if fixed else None
    end = upper(address) + 1 if high is None else as_index(high + 1)
    return None if any(s.extent is not None for s in end.symbols()) else end
