"""Checks the results of a graph against torch's metadata: their strides, and which of them share memory.

With the setting `verify`, a program makes this check before it returns its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from flambeau.errors import PromiseError
from flambeau.ir.index import Index
from flambeau.torch_compat.streams import NUMBERS


@dataclass(frozen=True)
class Promises:
    strides: tuple[tuple[Index, ...] | None, ...]  # of each result; None if it is not a tensor
    results: tuple[int, ...]  # an identifier of the memory of each result
    inputs: tuple[int, ...]  # the same for each tensor argument


def promises_of(gm: fx.GraphModule, index: Callable[[Any], Index]) -> Promises:
    """The strides and memory sharing in the metadata that torch captured with the graph, which follows eager."""
    memory: dict[int, int] = {}

    def number(t: Any) -> int:
        return memory.setdefault(t.untyped_storage()._cdata, len(memory)) if isinstance(t, torch.Tensor) else -1

    nodes = list(gm.graph.nodes)
    inputs = [n.meta.get("val") for n in nodes if n.op == "placeholder" and NUMBERS not in n.meta]
    results = [r.meta.get("val") if isinstance(r, fx.Node) and NUMBERS not in r.meta else None
               for r in nodes[-1].args[0]]
    strides = tuple(tuple(index(s) for s in t.stride()) if isinstance(t, torch.Tensor) else None
                    for t in results)
    return Promises(strides, tuple(map(number, results)),
                    tuple(number(t) for t in inputs if isinstance(t, torch.Tensor)))


def kept(results: list[Any], inputs: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...] | None],
         numbers: Sequence[int], given: Sequence[int], donated: Sequence[int]) -> list[Any]:
    """Return the results if they match the promises. Results may use the memory of donated inputs freely."""
    tensors = [(f"result {k}", t, n) for k, (t, n) in enumerate(zip(results, numbers, strict=True)) if n >= 0]
    for (name, t, _), wanted in zip(tensors, [s for s in strides if s is not None], strict=True):
        if t.stride() != wanted:
            raise PromiseError(f"{name} has strides {t.stride()}, but torch expects {wanted}", shapes=[t.shape])
    owners = [(f"input {k}", t, n) for k, (t, n) in enumerate(zip(inputs, given, strict=True)) if k not in donated]
    # Inputs may share memory with each other without torch knowing.
    same = {n: {m for _, other, m in owners if is_one(t, other)} for _, t, n in owners}
    for k, (name, t, n) in enumerate(tensors):
        for other, u, m in [*tensors[:k], *owners]:
            if t.untyped_storage().nbytes() and is_one(t, u) != (n == m or bool(same.get(n, set()) & {m})):
                told = "does" if not is_one(t, u) else "does not"
                raise PromiseError(f"{name} {'does not share' if told == 'does' else 'shares'} the memory of {other}, "
                                   f"but torch expects that it {told}", shapes=[t.shape, u.shape])
    return results


def is_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
