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
from flambeau.ir.index import Index, Op, Sym, about, as_index, ceildiv, minimum
from flambeau.ir.nodes import Combine, Value, as_indices, dim_vars, narrow
from flambeau.ir.scalar import fold_over, ne, sum_over
from flambeau.ops.plane import Place, nearest, together, within


def table(size: Index, body: Callable[[Index], Expr]) -> Callable[[Index], Expr]:
    """A value for each position of a dimension, computed once."""
    t = build.pointwise((size,), lambda i: body(i[0]))
    return lambda o: t.load((o,))


def position_table(size: Index, source: Index, body: Callable[[Index], Expr]) -> Callable[[Index], Index]:
    top = source.bounds()[1]
    t = table(size, lambda o: cast(body(o), narrow(source)))
    return lambda o: computed(t(o), 0, None if top is None else top - 1)


def tabled(size: Index, source: Index, fn: Callable[[Index], Index]) -> Callable[[Index], Index]:
    """A position for each element of a dimension: what takes more than a multiplication is found once, in a table."""
    here, = as_indices(dim_vars((size,)))
    if all(isinstance(a, Sym) or (isinstance(a, Op) and (splits(a, size) or is_free(a))) for a in fn(here).atoms()):
        return fn
    t = table(size, lambda o: cast(index_value(fn(o)), narrow(source)))
    return lambda o: computed(t(o), *fn(here).bounds())


def splits(a: Op, size: Index) -> bool:
    """A smaller or larger one, or a division that falls away when the dimension is cut into parts of equal length."""
    if a.kind in ("min", "max"):
        return True
    return a.b.is_const and size.is_const and int(size) % int(a.b) == 0 and isinstance((a.a - a.a.const).atom(), Sym)


def is_free(a: Op) -> bool:
    """A division that takes no time beside a read, and is computed in 32 bits."""
    if not build.graph().capabilities.waits_for_memory or not a.b.is_const:
        return False
    return not a.a.can_leave(1 << 31) or isinstance((a.a - a.a.const).atom(), Sym)


TAPS = 16  # reads of one point that take less time than to keep what some of them come to
LONG = 32  # elements of a sum that is worth a reduction: lanes of their own, joined at the end

Span = Callable[[Index], tuple[Index, Index, int | None]]


@dataclass(frozen=True)
class Column:
    """For every element of a dimension, which elements of another add up to it, and with what weights.

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
        return minimum(span(i)[0], source - 1)  # of an empty span it may be the end

    if most is None:
        return Column(size, span, weight, dtype, None, low_of, None)
    first = tabled(size, source, low_of)
    if most > LONG:  # along a row, as its elements are
        weights = build.pointwise((size, as_index(most)), lambda i: weight(low_of(i[0]) + i[1], i[0]))
    else:
        table_ = build.pointwise((as_index(most), size), lambda i: weight(low_of(i[1]) + i[0], i[1]))
        weights = table_.view((size, most), lambda i: (i[1], i[0]))
    return Column(size, span, weight, dtype, most, first, weights)


def gather_along(x: Value, dim: int, c: Column) -> Value:
    source = x.shape[dim]

    def share(i: Place, j: Index, w: Expr, there: Expr | None = None) -> Expr:
        value = cast(x.load((*i[:dim], j, *i[dim + 1:])), c.dtype)
        # A zero weight is no contact: what is infinite beyond reach stays out.
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
    """Along several dimensions. The last is the one that is not read in order: it comes where the data is least."""
    grows = any(c.size.is_const and x.shape[dim].is_const and int(c.size) > int(x.shape[dim])
                for dim, c in columns.items())
    for dim in sorted(columns, reverse=grows):
        x = gather_along(x, dim, columns[dim])
    return x


# ---- shares: element o of m has the part of n elements that it overlaps -------------------------------------

Several = Sequence[Expr]


def share_of(o: Index, n: Index, m: Index) -> tuple[Index, Index]:
    """The part of n cells that cell o of m overlaps, ends rounded outwards.

    Which cells of m hold cell x of n is the same question with the roles changed: share_of(x, m, n)."""
    return (o * n) // m, ceildiv((o + 1) * n, m)


def share_lengths(source: Index, size: Index) -> tuple[int, int]:
    """The least and the most elements that a share has; about, where sizes are known at the run alone."""
    n, m = (max(1, about(each, build.graph().typical, 1)) for each in (source, size))
    return -(-n // m), -((math.gcd(n, m) - n - m) // m)  # shares begin at multiples of gcd / m of an element


def share_length(source: Index, size: Index, dtype: DType) -> Callable[[Index], Expr]:
    """How many elements the share of a place has: a table, where that takes divisions."""
    def length(o: Index) -> Index:
        start, end = share_of(o, source, size)
        return end - start

    here, = as_indices(dim_vars((size,)))
    free = build.graph().capabilities.waits_for_memory  # divisions take no time beside a read
    if length(here).is_const or free or not (source.is_const and size.is_const):
        return lambda o: index_value(length(o), dtype)
    return table(size, lambda o: index_value(length(o), dtype))


def are_long(source: Index, size: Index) -> bool:
    """Whether shares are reduced in lanes, and not from their first element to the last."""
    return source.is_const and size.is_const and share_lengths(source, size)[0] > LONG


def few_taps(sizes: Sequence[tuple[Index, Index]]) -> bool:
    """Whether all that shares of several dimensions (each a source and a size) have in common is read at once, since
    that takes less time than to keep what one dimension comes to."""
    known = all(n.is_const and m.is_const for n, m in sizes)
    return build.graph().capabilities.waits_for_memory and known and \
        math.prod(share_lengths(n, m)[1] for n, m in sizes) <= TAPS


def along_shares(shape: Sequence[Index], dim: int, size: Index, read: Callable[[Place], Several], combine: Combine,
                 kept: bool = True) -> Callable[[Place], Several]:
    """What `read` gives, over `shape`, combined over each share of one dimension, which becomes `size` long; kept in
    memory, or computed where it is asked for."""
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
        return made(lambda i: fold_over([share_of(i[dim], source, size)], combine.identity,
                                        lambda j, c: step(c, element(i, j[0]))))
    least, most = share_lengths(source, size)
    start = tabled(size, source, lambda o: share_of(o, source, size)[0])
    length = share_length(source, size, torch.int32)

    # All shares have the first `least` elements; what some have beyond is added at the end.
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
