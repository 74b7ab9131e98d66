"""What must be computed before a node: the values that it reads, and those that its sizes and numbers are read from.

The number of nonzero elements is the size of one value, and `.item()` is the number in another one. Loops over that
many elements, or kernels that compute with the number, read neither value, but they come after both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flambeau.ir.index import Index
from flambeau.ir.nodes import Extern, Graph, Host, Node, Scatter, Value


class Needs:
    def __init__(self, graph: Graph) -> None:
        self.buffers = graph.buffers
        self._numbers = {s.name: h.needs for s, h in graph.numbers.items()}
        self._made = {name for n in graph.nodes for name in n.names}
        self._behind: dict[str, frozenset[str]] = {}
        self._none = not any(map(self.behind, self._numbers))  # all sizes and numbers are those of the inputs

    def behind(self, number: str) -> frozenset[str]:
        """The computed values that a number, given by its name, comes from."""
        if number not in self._behind:
            self._behind[number] = frozenset()  # a number does not need itself
            direct = self._numbers.get(number, frozenset())
            self._behind[number] = (direct & self._made).union(*map(self.behind, direct - self._made))
        return self._behind[number]

    def of(self, n: Node) -> set[str]:
        """The values that must be computed before a node."""
        return n.reads() if self._none else n.reads().union(*map(self.behind, self._named(n)))

    def of_results(self, results: Iterable[Any]) -> set[str]:
        """The values behind the results of a graph."""
        return {name for x in results for s in numbers_in(x) for name in self.behind(s)} | {
            x.buffer for x in results if isinstance(x, Value)}

    def _named(self, n: Node) -> set[str]:
        """The names of all numbers in a node; among them its loop variables, behind which is nothing."""
        if isinstance(n, Extern):
            return set(numbers_in((n.args, n.kwargs)))
        out = {s.name for e in n.exprs() for s in e.symbols()}
        vars = (*getattr(n, "vars", ()), *(n.out_vars if isinstance(n, Scatter) else ()))
        out.update(numbers_in([v.size for v in vars]))
        for name in n.names:
            b = self.buffers[name]
            out.update(numbers_in((b.shape, b.strides or ())))
        return out


def numbers_in(x: Any) -> Iterable[str]:
    """The names of the numbers in a value, an index, or arguments of a call."""
    if isinstance(x, Index):
        yield from (s.name for s in x.symbols())
    elif isinstance(x, Host):
        yield from x.needs
    elif isinstance(x, Value):
        yield from numbers_in((x.shape, x.index, x.strides or (), x.offset))
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from numbers_in(y)
