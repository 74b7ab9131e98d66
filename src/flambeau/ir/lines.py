"""How memory is accessed: what shape and strides reach, which variables act as one, and which elements are adjacent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod

from .expr import Expr, loads, walk
from .index import ONE, ZERO, Dyn, Index, Op, Sym, as_index, walks_as_one

LINE = 64  # elements; longer contiguous runs count no more


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlapping(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share an address: each stride must reach beyond all that smaller ones reach."""
    taken = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < taken:
            return True
        taken += stride * (size - 1)
    return False


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill the memory that they span, each address once."""
    return 0 in shape or (reach(shape, strides) == prod(shape) and not overlapping(shape, strides))


def joined(vars: Sequence[Sym], *exprs: Expr) -> tuple[tuple[Sym, ...], tuple[Expr, ...]]:
    """Merges neighbouring variables that the expressions walk as one. The row-major position of a point stays the
    same."""
    left = list(vars)
    for k in range(len(left) - 2, -1, -1):
        a, b = left[k], left[k + 1]
        if all(walks_as_one(i, a, b) for e in walk(*exprs) for i in e.own_indices()):
            both = Sym(f"{a.name}{b.name}", a.size * b.size)
            exprs = tuple(e.subs({a: as_index(both) // b.size, b: as_index(both) % b.size}) for e in exprs)
            left[k:k + 2] = [both]
    return tuple(left), exprs


def is_deep(factor: Expr, own: Sequence[Sym], depth: Sequence[Sym]) -> bool:
    """Whether a factor is contiguous along the depth, in longer lines than along its own variables."""
    own, (factor,) = joined(own, factor)
    depth, (factor,) = joined(depth, factor)
    return sum(line(e.attr[1][0], depth) - line(e.attr[1][0], own) for e in loads(factor)) > 0


def is_line(address: Index, v: Sym, lanes: int) -> bool:
    """Whether accesses along v are contiguous, and each `lanes` of them from a multiple of `lanes` on are one aligned
    wide access, as far as the strides tell."""
    rest = address - v
    return address.coefficient(v) is ONE and all(n % lanes == 0 for n in (rest.const, *(n for _, n in rest.terms)))


def apart(address: Index, itemsize: int, loops: Collection[Sym], most: int) -> int:
    """Returns the distance in bytes, `most` at most, between the accesses of neighbouring points of these loops. An
    address that depends on a loop only through data or quotients counts as the next element, or as the next row if
    these count rows."""
    address = unclamped(address)
    straight = Index(tuple((m, c) for m, c in address.terms if all(isinstance(a, Sym) for a in m)), 0)

    def step(v: Sym) -> Index:
        if (whole := address.coefficient(v)) is not None:
            return whole
        if (direct := straight.coefficient(v)) is not None and direct is not ZERO:
            return direct
        rows = [Index(((tuple(b for b in m if b is not a), c),), 0) if len(m) > 1 else as_index(c)
                for m, c in address.terms for a in m if isinstance(a, Op | Dyn) and v in a.symbols()]
        return min(rows, key=lambda c: abs(c.const) if c.is_const else most, default=ONE)

    steps = [c for v in loops if (c := step(v)) is not ZERO]
    return min(min((abs(c.const) if c.is_const else most for c in steps), default=0) * itemsize, most)


def reached(address: Index, loops: Iterable[Sym], size: Callable[[Sym], int]) -> int:
    """Returns the number of elements that these loops reach. Loops whose steps fit into what others cover, as in
    overlapping windows, add only a few."""
    mine = [v for v in loops if v in address.symbols()]
    straight = {v: abs(c.const) for v in mine if (c := address.coefficient(v)) is not None and c.is_const and c.const}
    runs: list[list[int]] = []
    for v in sorted(straight, key=lambda v: straight[v]):
        for run in runs:
            if straight[v] % run[0] == 0 and straight[v] // run[0] <= run[1]:
                run[1] += (size(v) - 1) * (straight[v] // run[0])
                break
        else:
            runs.append([straight[v], size(v)])
    return prod(n for _, n in runs) * prod(size(v) for v in mine if v not in straight)


def extent(address: Index, loops: Collection[Sym]) -> int | None:
    """Returns the distance from the first to the last element that these loops reach, both included; None if
    unknown."""
    moving = Index(tuple((m, c) for m, c in address.terms if any(a.symbols() & {*loops} for a in m)), 0)
    lo, hi = moving.bounds()
    return None if lo is None or hi is None else hi - lo + 1


def unclamped(address: Index) -> Index:
    """Returns the address without minima and maxima by constants."""
    out = as_index(address.const)
    for factors, c in address.terms:
        a = factors[0]
        part = Index(((factors, c),), 0)
        if len(factors) == 1 and isinstance(a, Op) and a.kind in ("min", "max") and a.a.is_const is not a.b.is_const:
            part = unclamped(a.b if a.a.is_const else a.a) * c
        out = out + part
    return out


def line(address: Index, vars: Sequence[Sym]) -> float:
    """The approximate number of elements that are contiguous along the innermost variable."""
    if not vars:
        return 0
    step, n = address.coefficient(vars[-1]), vars[-1].size
    assert n is not None
    if step is None or not step.is_const or step.const == 0:
        return 0
    return min(n.const if n.is_const else LINE, LINE) / abs(step.const)
