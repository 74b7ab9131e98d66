"""One kernel in several block shapes, from which a target chooses the fastest."""

from __future__ import annotations

from dataclasses import replace

from flambeau.ir.index import Dyn, Index, as_index, upper
from flambeau.ir.program import AnyKernel, AttentionKernel, ContractKernel, Kernel, ScatterKernel, TableKernel
from flambeau.ir.tuning import AROUND, OTHER_BLOCKS, OTHER_TILES

from ..source import BlockSource, host_text
from .kernel import render


def variants(kernel: AnyKernel, source: BlockSource) -> BlockSource:
    """The source of a kernel with alternatives beside it.

    Kernels that start from what lies in their own results, as updates in place and scatters do, have none: they cannot
    be launched twice. Neither have those whose results nobody could compare, since no size says how long they are, or
    since they lie all over memory. Products have some all the same, for what was found elsewhere.
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
        if known and product:  # there are no more
            break
        if not known:
            made.append(replace(other, name=f"{source.name}.{len(made) + 1}"))
    return replace(source, results=tuple(results), alternatives=tuple(made))


def results_of(kernel: Kernel | AttentionKernel) -> list[tuple[int, str]]:
    """Which pointers are results, and how many elements each has."""
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
    """One past the last element that is written, over sizes of the run."""
    if any(isinstance(a, Dyn) for a in address.atoms()):
        return None
    # The range of a size of the run is no end: it may be far beyond what there is of it.
    fixed = all(s.extent is not None and s.extent.is_const for s in address.symbols())
    high = address.bounds()[1] if fixed else None
    end = upper(address) + 1 if high is None else as_index(high + 1)
    return None if any(s.extent is not None for s in end.symbols()) else end
