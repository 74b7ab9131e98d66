"""Attention in the loop language: a contraction, a softmax along its columns, and a second contraction.

    s[row, column]  = the sum over `depth` of query * key
    p[row, column]  = 2 ** score(s), zero where `mask` does not hold, divided by the sum of these over all columns
    out[row, width] = the sum over columns of p * keep * value

for every point of `batch` and `group`; keys and values do not depend on `group` (grouped heads share them). Score, mask
and keep are expressions over `product` (s at a point) and the variables: biases, causal masks, windows, documents, soft
caps and dropout differ in these alone. Nothing of the size of rows times columns is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch

from .dtypes import DType
from .expr import Expr, index_value
from .index import Index, Sym, as_index
from .nodes import Node


@dataclass(frozen=True)
class Listed:
    """A list of blocks in memory: for block `at` of one side there are `count` blocks of the other side, and the one
    with number `step` is `block`."""

    at: Sym
    step: Sym
    count: Expr
    block: Expr


@dataclass(frozen=True)
class Lists:
    """The blocks to compute, `high` rows by `wide` columns each; in all others the mask counts as false. In the blocks
    of `whole` the mask holds everywhere. `by_column`: the same lists for blocks of columns."""

    high: int
    wide: int
    part: Listed
    whole: Listed | None
    part_by_column: Listed | None = None
    whole_by_column: Listed | None = None


@dataclass(frozen=True)
class Gradient:
    """The inputs of a gradient in addition to those of the attention: the gradient of its result, the logarithms of the
    rows' sums, and for each row the sum over `width` of result times gradient."""

    result: Expr  # the gradient of out, over batch, group, row and width
    logs: Expr  # to the base of two, over batch, group and row
    inner: Expr  # over batch, group and row
    given: Expr  # a carry: the gradient of the natural score at a point
    slope: Expr  # over `product` and `given`: the gradient of scale * product
    scale: Expr  # does not vary
    # over `product` and `given`: at each point it is added to the gradient of a tensor that the score reads
    captured: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class Attention(Node):
    """The attention node. Names: out, and to the base of two the logarithms of the rows' sums and their largest scores.
    With a gradient: the gradients of query, key and value, and of captured tensors. `places`: for each of them, the
    element that a point writes, or adds to."""

    kind: ClassVar[str] = "contract"
    places: tuple[tuple[Index, ...], ...]
    batch: tuple[Sym, ...]
    group: Sym
    row: Sym
    column: Sym
    depth: Sym
    width: Sym
    query: Expr
    key: Expr
    value: Expr
    product: Expr  # a carry
    score: Expr  # to the base of two, in the dtype of sums
    mask: Expr | None = None
    keep: Expr | None = None  # a factor of p that is not part of the row's sum: dropout
    lists: Lists | None = None
    gradient: Gradient | None = None
    tf32: bool = field(default=False, kw_only=True)  # factors in float32 may be rounded to what tensor cores take

    @property
    def vars(self) -> tuple[Sym, ...]:
        lists = [x for x in vars(self.lists).values() if isinstance(x, Listed)] if self.lists else []
        return (*self.batch, self.group, self.row, self.column, self.depth, self.width,
                *(v for x in lists for v in (x.at, x.step)))

    @property
    def dtype(self) -> DType:
        """The dtype of sums."""
        return self.product.dtype

    def exprs(self) -> tuple[Expr, ...]:
        return tuple(_exprs(self))

    def factors(self) -> tuple[Expr, ...]:
        """The expressions that are loaded tile by tile."""
        g = self.gradient
        return (self.query, self.key, self.value, *((g.result, g.logs, g.inner) if g else ()))

    def mapped(self, fn: Callable[[Expr], Expr]) -> Attention:
        """Returns the node with `fn` applied to every expression, including those inside indices."""
        return replace(self, **{f.name: _mapped(getattr(self, f.name), fn) for f in fields(self)})


def _exprs(x: Any) -> Iterator[Expr]:
    if isinstance(x, Expr):
        yield x
    elif isinstance(x, Index):
        yield index_value(x)
    elif isinstance(x, tuple):
        for y in x:
            yield from _exprs(y)
    elif is_dataclass(x):
        for f in fields(x):
            yield from _exprs(getattr(x, f.name))


def _mapped(x: Any, fn: Callable[[Expr], Expr]) -> Any:
    if isinstance(x, Expr):
        return fn(x)
    if isinstance(x, Index):
        if x.is_const:
            return x
        e = fn(Expr("index", torch.int64, (), x))
        return e.attr if e.op == "index" else as_index(e.attr)
    if isinstance(x, tuple):
        return tuple(_mapped(y, fn) for y in x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: _mapped(getattr(x, f.name), fn) for f in fields(x)})
    return x
