"""Sums along one dimension with weights from a table: resizing, its gradient, and averages over windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType
from flambeau.ir.expr import Expr
from flambeau.ir.index import Dyn, Index, Op, as_index
from flambeau.ir.nodes import Value, as_indices, dim_vars
from flambeau.ir.scalar import cast, computed, const, fold_over, index_value, ne, where
from flambeau.ops.plane import Place, nearest, within


def table(size: Index, body: Callable[[Index], Expr]) -> Callable[[Index], Expr]:
    """A value for each position of a dimension, computed once."""
    t = build.pointwise((size,), lambda i: body(i[0]))
    return lambda o: t.load((o,))


def narrow(size: Index) -> DType:
    """Positions as wide as a float keep the lanes alike."""
    top = size.bounds()[1]
    return torch.int32 if top is not None and top < 2**31 else torch.int64


def position_table(size: Index, source: Index, body: Callable[[Index], Expr]) -> Callable[[Index], Index]:
    top = source.bounds()[1]
    t = table(size, lambda o: cast(body(o), narrow(source)))
    return lambda o: computed(t(o), 0, None if top is None else top - 1)


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
    low, _, most = span(here)

    def low_of(i: Index) -> Index:
        return span(i)[0]

    if most is None:
        return Column(size, span, weight, dtype, None, low_of, None)
    # What takes more than a multiplication to find is found once, in a table.
    simple = not any(isinstance(a, Dyn) or (isinstance(a, Op) and a.kind in ("div", "mod")) for a in low.atoms())
    first = low_of if simple else position_table(size, source, lambda i: index_value(low_of(i)))
    if most > LONG:  # along a row, as its elements are
        weights = build.pointwise((size, as_index(most)), lambda i: weight(low_of(i[0]) + i[1], i[0]))
    else:
        table_ = build.pointwise((as_index(most), size), lambda i: weight(low_of(i[1]) + i[0], i[1]))
        weights = table_.view((size, most), lambda i: (i[1], i[0]))
    return Column(size, span, weight, dtype, most, first, weights)


def gather_along(x: Value, dim: int, c: Column) -> Value:
    source = x.shape[dim]

    def share(i: Place, j: Index, w: Expr, there: Expr) -> Expr:
        value = cast(x.load((*i[:dim], nearest(j, source), *i[dim + 1:])), c.dtype)
        # A zero weight is no contact: what is infinite beyond reach stays out.
        return where(there & ne(w, 0), value * w, 0)

    def term(i: Place, k: Index) -> Expr:
        assert c.weights is not None
        j = c.first(i[dim]) + k
        return share(i, j, c.weights.load((i[dim], k)), within(j, source))

    def by_table(i: Place) -> Expr:
        assert c.count is not None
        return fold_over([(0, c.count)], (const(0, c.dtype),), lambda k, carry: (carry[0] + term(i, k[0]),))[0]

    def by_range(i: Place) -> Expr:
        low, high, _ = c.span(i[dim])
        return fold_over([(low, high)], (const(0, c.dtype),), lambda j, carry: (
            carry[0] + share(i, j[0], c.weight(j[0], i[dim]), within(j[0], source)),))[0]

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
