"""Operators that work on one dimension at a time: weighted sums from a table, such as resizing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr, cast, computed, index_value, rewrite, where
from flambeau.ir.index import Dyn, Index, Op, Sym, about, as_index, ceildiv, minimum
from flambeau.ir.nodes import Combine, Value, as_indices, dim_vars, narrow
from flambeau.ir.scalar import fold_over, ne, sum_over
from flambeau.ops.plane import Place, nearest, together, within

Ends = Callable[[Index], tuple[Index, Index]]  # the first and the end of a range for each element of a dimension


def table(size: Index, body: Callable[[Index], Expr]) -> Callable[[Index], Expr]:
    """A function of a dimension's position that is computed once and stored in a table."""
    t = build.pointwise((size,), lambda i: body(i[0]))
    return lambda o: t.load((o,))


def position_table(size: Index, source: Index, body: Callable[[Index], Expr]) -> Callable[[Index], Index]:
    top = source.bounds()[1]
    t = table(size, lambda o: cast(body(o), narrow(source)))
    return lambda o: computed(t(o), 0, None if top is None else top - 1)


def tabled(size: Index, source: Index, fn: Callable[[Index], Index]) -> Callable[[Index], Index]:
    """A position for each element of a dimension, stored in a table if it takes more than a multiplication and reads.
    """
    here, = as_indices(dim_vars((size,)))
    free = (isinstance(a, (Sym, Dyn)) or (isinstance(a, Op) and (splits(a, size) or is_free(a)))
            for a in fn(here).atoms())
    if all(free):
        return fn
    t = table(size, lambda o: cast(index_value(fn(o)), narrow(source)))
    return lambda o: computed(t(o), *fn(here).bounds())


def tabled_span(size: Index, source: Index, span: Ends) -> Ends:
    """A range of a dimension for each element of another, from tables where divisions take time."""
    if build.graph().capabilities.waits_for_memory:
        return span
    low, high = tabled(size, source, lambda i: span(i)[0]), tabled(size, source + 1, lambda i: span(i)[1])
    return lambda i: (low(i), high(i))


def splits(a: Op, size: Index) -> bool:
    """A min or max, or a division that vanishes when the dimension is split into parts of equal length."""
    if a.kind in ("min", "max"):
        return True
    return a.b.is_const and size.is_const and int(size) % int(a.b) == 0 and isinstance((a.a - a.a.const).atom(), Sym)


def is_free(a: Op) -> bool:
    """Whether a division takes no time beside a load, and can be computed in 32 bits."""
    if not build.graph().capabilities.waits_for_memory or not a.b.is_const:
        return False
    return not a.a.can_leave(1 << 31) or isinstance((a.a - a.a.const).atom(), Sym)


TAPS = 16  # loads of one point that are cheaper than storing partial sums
LONG = 32  # elements from which on a sum is a reduction with several lanes

Span = Callable[[Index], tuple[Index, Index, int | None]]


@dataclass(frozen=True)
class Column:
    """For every element of a dimension, the elements of another that are summed for it, and their weights.

    first(i), count and weights[i, k]: the sum over k < count of weights[i, k] * x[first(i) + k]. Or, where the sizes
    are not known: the sum over j in span(i) of weight(j, i) * x[j].
    """

    size: Index
    span: Span
    weight: Callable[[Index, Index], Expr]
    dtype: DType
    count: int | None
    first: Callable[[Index], Index]
    weights: Value | None


def column(size: Index, source: Index, span: Span, weight: Callable[[Index, Index], Expr], dtype: DType) -> Column:
    here, = as_indices(dim_vars((size,)))
    _, _, most = span(here)

    def low_of(i: Index) -> Index:
        return minimum(span(i)[0], source - 1)  # an empty span may start at the end

    if most is None:
        ends = tabled_span(size, source, lambda i: span(i)[:2])
        return Column(size, lambda i: (*ends(i), None), weight, dtype, None, low_of, None)
    first = tabled(size, source, low_of)
    if most > LONG:  # stored along rows, as the reduced elements are
        weights = build.pointwise((size, as_index(most)), lambda i: weight(low_of(i[0]) + i[1], i[0]))
    else:
        table_ = build.pointwise((as_index(most), size), lambda i: weight(low_of(i[1]) + i[0], i[1]))
        weights = table_.view((size, most), lambda i: (i[1], i[0]))
    return Column(size, span, weight, dtype, most, first, weights)


def gather_along(x: Value, dim: int, c: Column) -> Value:
    source = x.shape[dim]

    def share(i: Place, j: Index, w: Expr, there: Expr | None = None) -> Expr:
        value = cast(x.load((*i[:dim], j, *i[dim + 1:])), c.dtype)
        # A zero weight means no contact, so that infinities out of reach do not contribute.
        return where(ne(w, 0) if there is None else there & ne(w, 0), value * w, 0)

    def term(i: Place, k: Index) -> Expr:
        assert c.weights is not None
        j = c.first(i[dim]) + k
        return share(i, nearest(j, source), c.weights.load((i[dim], k)), within(j, source))

    def by_table(i: Place) -> Expr:
        assert c.count is not None
        return sum_over([(0, c.count)], c.dtype, lambda k: term(i, k[0]))

    def by_range(i: Place) -> Expr:
        low, high, _ = c.span(i[dim])
        return sum_over([(low, high)], c.dtype, lambda j: share(i, j[0], c.weight(j[0], i[dim])))

    shape = (*x.shape[:dim], c.size, *x.shape[dim + 1:])
    if c.count is not None and c.count > LONG:
        return build.reduce((*shape, as_index(c.count)), [x.rank], build.simple_combine("sum", c.dtype),
                            lambda i: term(i[:-1], i[-1]))[0]
    return build.pointwise(shape, by_range if c.count is None else by_table)


def gather_all(x: Value, columns: dict[int, Column]) -> Value:
    """Gather along several dimensions. The last dimension is not read in order, so it is done with the least data."""
    grows = any(c.size.is_const and x.shape[dim].is_const and int(c.size) > int(x.shape[dim])
                for dim, c in columns.items())
    for dim in sorted(columns, reverse=grows):
        x = gather_along(x, dim, columns[dim])
    return x


# ---- shares: element o of m covers the part of n elements that it overlaps ----------------------------------

Several = Sequence[Expr]


def share_of(o: Index, n: Index, m: Index) -> tuple[Index, Index]:
    """The range of the n cells that cell o of m overlaps, with ends rounded outwards.

    Conversely, the cells of m that contain cell x of n are share_of(x, m, n)."""
    return (o * n) // m, ceildiv((o + 1) * n, m)


def share_lengths(source: Index, size: Index) -> tuple[int, int]:
    """The smallest and largest number of elements in a share; approximate if sizes are only known at run time."""
    n, m = (max(1, about(each, build.graph().typical, 1)) for each in (source, size))
    return -(-n // m), -((math.gcd(n, m) - n - m) // m)  # shares begin at multiples of gcd / m of an element


def share_length(source: Index, size: Index, dtype: DType) -> Callable[[Index], Expr]:
    """The number of elements in the share of a place, from a table if it takes divisions."""
    def length(o: Index) -> Index:
        start, end = share_of(o, source, size)
        return end - start

    here, = as_indices(dim_vars((size,)))
    free = build.graph().capabilities.waits_for_memory  # divisions are free beside loads
    if length(here).is_const or free or not (source.is_const and size.is_const):
        return lambda o: index_value(length(o), dtype)
    return table(size, lambda o: index_value(length(o), dtype))


def are_long(source: Index, size: Index) -> bool:
    """Whether shares are reduced in several lanes, and not sequentially."""
    return source.is_const and size.is_const and share_lengths(source, size)[0] > LONG


def few_taps(sizes: Sequence[tuple[Index, Index]]) -> bool:
    """Whether all elements in the shares of several dimensions (each a source and a size) are read at once, because
    that is faster than storing the sums along one dimension."""
    known = all(n.is_const and m.is_const for n, m in sizes)
    return build.graph().capabilities.waits_for_memory and known and \
        math.prod(share_lengths(n, m)[1] for n, m in sizes) <= TAPS


def along_shares(shape: Sequence[Index], dim: int, size: Index, read: Callable[[Place], Several], combine: Combine,
                 kept: bool = True) -> Callable[[Place], Several]:
    """Combine the values of `read`, over `shape`, in each share of one dimension, which becomes `size` long. The result
    is stored in memory, or computed where it is used (`kept=False`)."""
    source, dtypes = shape[dim], combine.dtypes
    shape = (*shape[:dim], size, *shape[dim + 1:])

    def element(i: Place, j: Index) -> Several:
        return [cast(e, d) for e, d in zip(read((*i[:dim], j, *i[dim + 1:])), dtypes, strict=True)]

    def step(a: Several, b: Several) -> Several:
        stand = dict(zip((*combine.left, *combine.right), (*a, *b), strict=True))
        memo: dict[Expr, Expr] = {}
        return [rewrite(e, lambda x: stand.get(x, x), None, memo) for e in combine.result]

    def made(body: Callable[[Place], Several]) -> Callable[[Place], Several]:
        values = together(shape, body, dtypes)
        return lambda i: [v.load(i) for v in values]

    if not (size.is_const and source.is_const):
        span = tabled_span(size, source, lambda o: share_of(o, source, size))
        return made(lambda i: fold_over([span(i[dim])], combine.identity, lambda j, c: step(c, element(i, j[0]))))
    least, most = share_lengths(source, size)
    start = tabled(size, source, lambda o: share_of(o, source, size)[0])
    length = share_length(source, size, torch.int32)

    # All shares have at least `least` elements; the additional ones of some are added at the end.
    def rest(i: Place, have: Several) -> Several:
        for k in range(least, most):
            more = step(have, element(i, nearest(start(i[dim]) + k, source)))
            inside = length(i[dim]) > k
            have = [where(inside, new, old) for new, old in zip(more, have, strict=True)]
        return have

    if kept and are_long(source, size):
        common = build.reduce((*shape, as_index(least)), [len(shape)], combine,
                              lambda i: tuple(element(i[:-1], start(i[dim]) + i[-1])))
        return made(lambda i: rest(i, [c.load(i) for c in common]))

    def body(i: Place) -> Several:
        have = element(i, start(i[dim]))
        if kept and least > 1:
            return rest(i, fold_over([(1, least)], have, lambda k, c: step(c, element(i, start(i[dim]) + k[0]))))
        for k in range(1, least):
            have = step(have, element(i, start(i[dim]) + k))
        return rest(i, have)

    return made(body) if kept else cache(body)
