"""Chooses the memory order of intermediate values, for which torch prescribes none.

A value takes the order of the values it is computed from, so that its kernel walks both in order. If that gives none (a
scatter writes anywhere), it takes the order of the values computed from it. The channels of a channels-last image thus
stay contiguous between the two steps of a resize.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, ZERO, Index, Sym, as_index, is_nonneg
from flambeau.ir.nodes import Buffer, Graph, Node, Pointwise, Reduce, Scatter, contiguous_strides

from .fusion.inline import materialised

Order = tuple[int, ...]  # dimensions, the one with the largest step first


def settle_layouts(graph: Graph) -> None:
    fixed = materialised(graph)  # values read from outside the kernels have the layout that their readers expect
    readers: dict[str, list[Node]] = defaultdict(list)
    for n in graph.nodes:
        for name in n.reads():
            readers[name].append(n)
    for n in graph.nodes:
        for name in n.names:
            b = graph.buffers[name]
            if b.strides is None and name not in fixed:
                orders = (*by_sources(n, graph.buffers), *by_readers(name, readers[name], graph.buffers))
                b.strides = laid_out(b.shape, orders[0]) if orders else None
    for b in graph.buffers.values():
        if b.strides is None:
            b.strides = contiguous_strides(b.shape)


def by_sources(n: Node, buffers: dict[str, Buffer]) -> Iterator[Order]:
    """Yields the order in which a node walks each buffer that it reads, the largest buffer first."""
    if isinstance(n, (Pointwise, Reduce)):
        vars = n.kept if isinstance(n, Reduce) else n.vars
        read = [e.attr for e in loads(*n.exprs())]
        for name, index in sorted(read, key=lambda at: -(s.const if (s := buffers[at[0]].numel).is_const else 0)):
            order = walked(vars, index, buffers[name])
            if order is not None:
                yield order


def by_readers(name: str, readers: Sequence[Node], buffers: dict[str, Buffer]) -> Iterator[Order]:
    """Yields the order in which each map that reads the whole buffer, element by element, writes its result."""
    for r in readers:
        if isinstance(r, Pointwise) and not isinstance(r, Scatter):
            out = buffers[r.names[0]]
            plain = tuple(as_index(v) if v.size is not ONE else ZERO for v in r.vars)
            for e in loads(r.body):
                if e.attr[0] == name and e.attr[1] == plain:
                    order = walked(r.vars, plain, out)
                    if order is not None:
                        yield order


def walked(vars: Sequence[Sym], index: Sequence[Index], b: Buffer) -> Order | None:
    """The variables, largest step in memory first; None unless each of them has one and the steps can be compared."""
    if b.strides is None:
        return None
    steps: list[tuple[int, int, int]] = []
    for k, v in enumerate(vars):
        if v.size is ONE:
            steps.append((0, 0, k))
            continue
        spots = [d for d, i in enumerate(index) if v in i.symbols()]
        stride = b.strides[spots[0]] if len(spots) == 1 else ZERO
        c = index[spots[0]].coefficient(v) if spots else None
        if c is not None and c.is_const:
            stride = stride * c
        if len(stride.terms) + bool(stride.const) != 1 or not is_nonneg(stride):  # a step of zero is none
            return None
        (mono, coef), = stride.terms or (((), stride.const),)
        steps.append((-len(mono), -coef, k))
    return tuple(k for _, _, k in sorted(steps))


def laid_out(shape: Sequence[Index], order: Order) -> tuple[Index, ...]:
    packed = contiguous_strides([shape[k] for k in order])
    return tuple(packed[order.index(k)] for k in range(len(shape)))
