"""Sample values for the symbolic sizes of a graph.

ATen's rules compare sizes and strides. If these are symbols, a rule is evaluated at some sample numbers for them, and
its answers are expressed in the symbols again. The first sample has the sizes that the graph was captured with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from flambeau.runtime.placement import flat

# Odd primes, so that no product of them equals another one, or a size that is a constant.
PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
Numbers = dict[Any, Any]


class UnknownSize(ValueError):
    """Raised for a size that only data determines."""


class SizeSamples:
    """Sample numbers for all symbols of a graph. A graph without symbols has one sample without numbers."""

    def __init__(self, graph: fx.Graph, may_hold: bool = False) -> None:
        self.graph, self.may_hold = graph, may_hold
        self.held: list[torch.Tensor] = []  # tensors whose strides are only right at the first sample
        self.draw()

    def draw(self) -> None:
        hints: Numbers = {}
        envs: list[Any] = []
        for x in symbolic(self.graph):
            if x.node.expr.is_Symbol and x.node.hint is not None and x.node.expr not in hints:
                hints[x.node.expr] = sympy.Integer(int(x.node.hint))
                envs.append(x.node.shape_env)
        self.numbers = [hints]
        if hints:
            self.numbers += further(hints, envs[0])

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard the sizes and strides of these tensors at the values of the first sample."""
        for t in tensors:
            for s in (*t.shape, *t.stride()):
                if isinstance(s, torch.SymInt) and s.node.hint is not None:
                    int(s)  # a guard
        self.draw()

    def __len__(self) -> int:
        return len(self.numbers)

    def value(self, x: Any, k: int) -> int:
        """The value of a size at sample k."""
        if not isinstance(x, torch.SymInt):
            return int(x)
        found = x.node.expr.xreplace(self.numbers[k])
        if not found.is_Integer:
            raise UnknownSize(str(found))
        return int(found)

    def written(self, wanted: Sequence[Sequence[int]], candidates: Iterable[Sequence[Any]], shape: Sequence[Any]
                ) -> list[Any] | None:
        """Symbolic strides that have these values at the samples; None if there are none. Each dimension is taken from
        one of the candidates, or from an array that is packed in this order."""
        if len(self) == 1 and not self.numbers[0]:
            return list(wanted[0])
        order = sorted(range(len(shape)), key=lambda d: (wanted[0][d], wanted[0][d] * self.value(shape[d], 0), -d))
        products: list[Any] = [1]  # some of eager's kernels count empty dimensions as one, others do not
        whole: list[Any] = [1]
        for d in order:
            products.append(products[-1] * torch.sym_max(shape[d], 1))
            whole.append(whole[-1] * shape[d])
        out = []
        for d in range(len(shape)):
            found = next((c for c in (*(s[d] for s in candidates if len(s) == len(shape)), *products, *whole)
                          if all(self.value(c, k) == w[d] for k, w in enumerate(wanted))), None)
            if found is None:
                return None
            out.append(found)
        return out


def symbolic(graph: fx.Graph) -> Iterable[torch.SymInt]:
    for n in graph.nodes:
        for t in flat(n.meta.get("val")):
            sizes = (*t.shape, *t.stride(), t.storage_offset()) if isinstance(t, torch.Tensor) and (
                t.layout is torch.strided) else (t,)
            yield from (s for s in sizes if isinstance(s, torch.SymInt))


def further(hints: Numbers, env: Any) -> list[Numbers]:
    """A second sample that satisfies the graph's guards, with as many sizes changed as they allow."""
    guards = [env.replace(g.expr) for g in env.guards]
    names = sorted(hints, key=str)

    def holds(numbers: Numbers) -> bool:
        ranges = ((n, env.var_to_range[s]) for s, n in numbers.items() if s in env.var_to_range)
        return all(r.lower <= n <= r.upper for n, r in ranges) and all(
            g.xreplace(numbers) == sympy.true for g in guards)

    for ordered in (names, names[::-1]):
        numbers = {s: sympy.Integer(PRIMES[k % len(PRIMES)]) for k, s in enumerate(ordered)}
        if holds(numbers):
            return [numbers]
    numbers = dict(hints)
    for k, s in enumerate(names):
        here = hints[s]
        for other in (sympy.Integer(PRIMES[k % len(PRIMES)]), *(here * n + 1 for n in (3, 2, 1)), here * 3, here * 2,
                      here - 1):
            if other != here and holds(numbers | {s: other}):
                numbers[s] = other
                break
    return [numbers] if numbers != hints and holds(numbers) else []
