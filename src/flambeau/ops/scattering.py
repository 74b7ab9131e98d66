"""Writes at computed indices: index_put, index_add, scatter, masked_scatter, put.

If several writes meet, `set` keeps the last in the order of the source, as ATen does on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, highest, is_bool, is_float, lowest, opmath
from flambeau.ir.expr import Expr, binary, cast, const, index_value, require, where
from flambeau.ir.faults import Fault
from flambeau.ir.index import ONE, ZERO, Index, IndexLike, about, as_index, product
from flambeau.ir.nodes import Shape, Value
from flambeau.ir.scalar import eq, maximum

from .facts import EVERYWHERE, NOWHERE, describe, of_family
from .indexing import Advanced, Locate, checked, position, trusted
from .registry import broadcast_shapes, load_at, lower, scalar_at, to_dtype, wrap_dim
from .view import at_least_1d, expand, flat, is_empty, reshape

aten = torch.ops.aten
of_family(exact=EVERYWHERE)

FEW = 2  # elements per added value: from this ratio on, most elements stay unchanged
Target = Callable[[tuple[Index, ...]], Sequence[Index]]
Source = Callable[[tuple[Index, ...]], Expr]


def write(x: Value, source: Sequence[Index], target: Target, value: Source, mode: str = "set",
          mask: Source | None = None, rounds: bool = False) -> Value:
    """x after element target(j), for each j of the source in order, is set to value(j) or combined with it.

    Sums and products of half and bfloat16 accumulate in float32 and are rounded once, unless so few values are added
    that widening all other elements would take longer. Where writes have an order, this is only done if eager rounds
    at each write as well (`rounds`). Bools add as `or`.
    """
    if is_empty(source):
        return x
    kept = x.dtype if mode == "set" or adds_little(x, source, mode, rounds) else opmath(x.dtype)
    if is_bool(x.dtype):
        mode = {"add": "max", "mul": "min"}.get(mode, mode)
    out = build.scatter(x.shape, lambda i: cast(x.load(i), kept), source, target,
                        lambda j: cast(value(j), kept), mode, mask)
    return to_dtype(out, x.dtype)


def adds_little(x: Value, source: Sequence[Index], mode: str, rounds: bool) -> bool:
    """Whether most elements stay unchanged, and the others can be combined in their own dtype: in order, or by atomics.
    """
    g = build.graph()
    caps, (added, points) = g.capabilities, (about(product(shape), g.typical, 0) for shape in (source, x.shape))
    joins = rounds if caps.ordered_scatter else not caps.deterministic and caps.swaps(mode, x.dtype)
    return joins and 0 < added * FEW <= points


# ---- index_put ---------------------------------------------------------------------------------------


@lower(aten.index_put, aten._unsafe_index_put, exact=NOWHERE)
def index_put(x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False,
              locate: Locate = checked) -> Any:
    where_ = Advanced.of(x, indices)
    if where_ is None:
        return _masked_put(x, indices, values, accumulate)
    if not _fits(values.shape, where_.shape):
        return NotImplemented  # eager raises the error
    return write(x, where_.shape, lambda j: where_.at(j, locate), lambda j: load_at(values, j),
                 "add" if accumulate else "set", rounds=True)


# index_put leaves its checks to this operator.
@lower(aten._index_put_impl, exact=NOWHERE, group="writes by row", checks=True)
def index_put_impl(x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False,
                   unsafe: bool = False) -> Any:
    return index_put(x, indices, values, accumulate, trusted if unsafe else checked)


@lower(aten._unsafe_masked_index_put_accumulate, exact=NOWHERE)
def unsafe_masked_index_put_accumulate(x: Value, mask: Value, indices: Sequence[Value | None],
                                       values: Value) -> Any:
    where_ = Advanced.of(x, indices)
    if where_ is None:
        return NotImplemented
    return write(x, where_.shape, lambda j: where_.at(j, trusted), lambda j: load_at(values, j), "add",
                 lambda j: load_at(mask, j), rounds=True)


def _masked_put(x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> Any:
    """x[:, mask] = values. With a single mask, each element can determine for itself which value it takes."""
    masks = [(d, v) for d, v in enumerate(indices) if v is not None]
    if len(masks) != 1 or masks[0][1].dtype is not torch.bool:  # for byte masks, eager warns that they are deprecated
        return NotImplemented
    (first, mask), = masks
    last = first + mask.rank
    # Values are broadcast to (dimensions before, number selected, dimensions after).
    selected = values.shape[last - x.rank - 1] if values.rank > x.rank - last else ONE
    if not _fits(values.shape, (*x.shape[:first], selected, *x.shape[last:])):
        return NotImplemented  # eager raises the error
    if selected is not ONE and is_empty(x.shape):
        return NotImplemented  # without points to compute, a wrong number of values would go unnoticed
    before, total = (None, None) if selected is ONE else chosen_before(mask)

    def body(i: tuple[Index, ...]) -> Expr:
        at = i[first:last]
        chosen = mask.load(at)
        which = ZERO
        if before is not None and total is not None:
            # If the number of values is wrong, an invalid position carries the right one to the error message.
            fits = eq(total.load([]), index_value(selected))
            place = where(fits, before.load(at), -1 - total.load([]))
            which = position(place, selected, Fault.VALUES, mask=chosen | ~fits)
        old, new = x.load(i), cast(load_at(values, (*i[:first], which, *i[last:]), chosen), x.dtype)
        return where(chosen, _sum(old, new) if accumulate else new, old)

    return build.pointwise(x.shape, body)


def _fits(values: Shape, shape: Shape) -> bool:
    """Whether values can be broadcast to a shape; unknown sizes are recorded in the graph as conditions."""
    return len(values) <= len(shape) and all(
        n is ONE or build.graph().agree([n], [m]) for n, m in zip(reversed(values), reversed(shape), strict=False))


def _sum(a: Expr, b: Expr) -> Expr:
    if is_bool(a.dtype):
        return a | b
    return cast(cast(a, opmath(a.dtype)) + cast(b, opmath(a.dtype)), a.dtype)


# ---- masks -------------------------------------------------------------------------------------------


def chosen_before(mask: Value) -> tuple[Value, Value]:
    """For each selected element, how many are selected before it in row-major order; and how many in total."""
    line = flat(mask)
    seen, = build.scan(line.shape, 0, build.simple_combine("sum", torch.int64),
                       lambda i: cast(cast(line.load(i), torch.bool), torch.int64))
    return (reshape(build.pointwise(line.shape, lambda i: seen.load(i) - 1), mask.shape),
            build.pointwise((), lambda i: seen.load([line.shape[0] - 1])))


@lower(aten.masked_scatter, strides="contiguous")
def masked_scatter(x: Value, mask: Value, source: Value) -> Value:
    """Selected elements take those of the source in order."""
    shape = broadcast_shapes(x.shape, mask.shape)
    mask, line = expand(mask, shape), flat(source)
    before, _ = chosen_before(mask)

    def body(i: tuple[Index, ...]) -> Expr:
        chosen = mask.load(i)
        which = position(before.load(i), line.shape[0], Fault.SOURCE, mask=chosen)
        return where(chosen, cast(line.load([which], chosen), x.dtype), load_at(x, i))

    return build.pointwise(shape, body)


@lower(aten.masked_scatter_backward)
def masked_scatter_backward(grad: Value, mask: Value, sizes: Sequence[IndexLike]) -> Value:
    """The gradients of the selected elements packed together, followed by zeros."""
    count = product(sizes)
    mask = expand(mask, grad.shape)
    before, _ = chosen_before(mask)
    zeros = build.pointwise((count,), lambda i: const(0, grad.dtype))
    packed = write(zeros, grad.shape, lambda j: [position(before.load(j), count, Fault.SOURCE, mask=mask.load(j))],
                   lambda j: grad.load(j), mask=lambda j: mask.load(j))
    return reshape(packed, sizes)


# ---- whole slices: index_add, index_copy, index_fill, index_reduce -----------------------------------


def _slices(x: Value, dim: int, index: Value, fault: Fault) -> tuple[Value, Shape, Target]:
    """x (at least 1-dim), the shape of what is written to x[:, index], and where each element of that goes."""
    whole, places = at_least_1d(x), flat(index)
    d = wrap_dim(dim, whole.rank)
    shape = (*whole.shape[:d], places.shape[0], *whole.shape[d + 1:])
    return whole, shape, lambda j: (
        *j[:d], position(places.load([j[d]]), whole.shape[d], fault, d), *j[d + 1:])


@lower(aten.index_add, exact=NOWHERE, group="writes by row")
def index_add(x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    # Eager passes rows and columns to scatter_add, whose error message then appears.
    scatters = x.rank > 1 and wrap_dim(dim, x.rank) in (0, x.rank - 1) and index.dtype is torch.int64 and (
        not isinstance(alpha, Value) and alpha == 1)
    whole, shape, target = _slices(x, dim, index, Fault.ELEMENT if scatters else Fault.SELECTED)
    part, math = at_least_1d(source), opmath(x.dtype)

    def value(j: tuple[Index, ...]) -> Expr:
        new = cast(part.load(j), math)
        return new & const(alpha, math) if is_bool(math) else new * scalar_at(alpha, (), math, math)

    return reshape(write(whole, shape, target, value, "add"), x.shape)


@lower(aten.index_copy, strides="contiguous")
def index_copy(x: Value, dim: int, index: Value, source: Value) -> Value:
    whole, shape, target = _slices(x, dim, index, Fault.COPIED)
    part = at_least_1d(source)
    return reshape(write(whole, shape, target, lambda j: part.load(j)), x.shape)


@lower(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: Value, dim: int, index: Value, value: Any) -> Value:
    whole, shape, target = _slices(x, dim, index, Fault.FILLED)
    return reshape(write(whole, shape, target, lambda j: scalar_at(value, (), x.dtype, x.dtype)), x.shape)


@lower(aten.index_reduce, exact=NOWHERE)
def index_reduce(x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
                 ) -> Value:
    whole, shape, target = _slices(x, dim, index, Fault.SELECTED)
    part = at_least_1d(source)
    return reshape(write_reduced(whole, shape, target, lambda j: part.load(j), reduce, include_self), x.shape)


# ---- element by element: scatter, put ----------------------------------------------------------------


def _elements(x: Value, dim: int, index: Value) -> tuple[Value, Shape, Target]:
    """x (with at least one dimension), the shape of the index, and where each element of the index points.

    An empty index may have any rank, because `write` then does not evaluate it.
    """
    whole, places = at_least_1d(x), at_least_1d(index)
    d = wrap_dim(dim, whole.rank)
    return whole, places.shape, lambda j: (
        *j[:d], position(places.load(j), whole.shape[d], Fault.ELEMENT, d), *j[d + 1:])


def _source(src: Any, dtype: DType) -> Source:
    """The value that an element of the index writes: the element of src at the same place, or a single number."""
    part = at_least_1d(src) if isinstance(src, Value) else src
    return lambda j: part.load(j) if isinstance(part, Value) else scalar_at(part, (), dtype, dtype)


@lower(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(x: Value, dim: int, index: Value, src: Any, *, reduce: str | None = None) -> Value:
    mode = {None: "set", "add": "add", "multiply": "mul"}[reduce]
    whole, shape, target = _elements(x, dim, index)
    return reshape(write(whole, shape, target, _source(src, x.dtype), mode), x.shape)


describe(aten.index_put.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, strides="preserved")
describe(aten.scatter.reduce, aten.scatter.value_reduce, exact=NOWHERE)
lower(aten.scatter_add, exact=NOWHERE, group="writes by element")(partial(scatter, reduce="add"))


@lower(aten.scatter_reduce.two, exact=NOWHERE, group="writes by element")
def scatter_reduce(x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
                   ) -> Value:
    whole, shape, target = _elements(x, dim, index)
    return reshape(write_reduced(whole, shape, target, _source(src, x.dtype), reduce, include_self), x.shape)


@lower(aten.put, exact=NOWHERE, strides="preserved")
def put(x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """Write to elements of x by their row-major position."""
    line, places, values = flat(x), flat(index), flat(source)
    out = write(line, places.shape, lambda j: [position(places.load(j), line.shape[0], Fault.TAKEN)],
                lambda j: values.load(j), "add" if accumulate else "set")
    return reshape(out, x.shape)


# ---- reductions into place ---------------------------------------------------------------------------

_MODES = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def write_reduced(x: Value, source: Shape, target: Target, value: Source, reduce: str, include_self: bool
                  ) -> Value:
    """Reduce all values written to each element of x, including its old value only if include_self."""
    if is_empty(source):
        return x
    mode = _MODES[reduce]
    if not include_self:
        identity = {"add": 0, "mul": 1, "max": lowest(x.dtype), "min": highest(x.dtype)}[mode]
        x = write(x, source, target, lambda j: const(identity, x.dtype))
    if reduce != "mean":
        return write(x, source, target, value, mode)
    math = opmath(x.dtype)
    total = write(build.pointwise(x.shape, lambda i: x.load(i), math), source, target, value, mode)
    count = build.scatter(x.shape, lambda i: const(int(include_self), torch.int64), source, target,
                          lambda j: const(1, torch.int64), "add")

    def body(i: tuple[Index, ...]) -> Expr:
        n = cast(maximum(count.load(i), 1), math)
        return total.load(i) / n if is_float(math) else binary("floordiv", total.load(i), n)

    return build.pointwise(x.shape, body, x.dtype)


@lower(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: Value, output_size: IndexLike | None = None) -> Any:
    """The number 0 repeats[0] times, 1 repeats[1] times, and so on."""
    if output_size is None or is_empty((as_index(output_size),)) or is_empty(repeats.shape):
        return NotImplemented  # without points to compute, a wrong size would go unnoticed
    add = build.simple_combine("sum", torch.int64)
    ends, = build.scan(repeats.shape, 0, add, lambda i: cast(repeats.load(i), torch.int64))

    def start(j: tuple[Index, ...]) -> Expr:
        n = cast(repeats.load(j), torch.int64)
        return ends.load(j) - require(n, n >= 0, Fault.NEGATIVE_REPEATS)

    def step(j: tuple[Index, ...]) -> Expr:
        total = ends.load([repeats.shape[0] - 1])
        return require(const(1, torch.int64), eq(total, index_value(size)), Fault.REPEATED_SIZE)

    # The result increases by one where each number's run starts; at runs of length zero, several steps coincide.
    size = as_index(output_size)
    steps = build.scatter((size,), lambda i: const(0, torch.int64), repeats.shape,
                          lambda j: [position(start(j), size, Fault.SELECTED, mask=start(j) < index_value(size))],
                          step, "add", lambda j: start(j) < index_value(size))
    number, = build.scan((size,), 0, add, lambda i: steps.load(i))
    return build.pointwise((size,), lambda i: number.load(i) - 1, repeats.dtype)
