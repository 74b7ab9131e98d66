"""Functions with which lowerings make nodes: `pointwise`, `reduce`, `scan`, `segment`, `scatter`, `extern`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from .dtypes import DType, highest, is_bool, is_float, lowest
from .expr import Expr, Scalar, binary, cast, index_value, lift, rewrite, unary, where
from .index import ONE, WORD, Index, IndexLike, Sym, as_index
from .nodes import (
    Combine,
    Contract,
    Extern,
    Graph,
    Host,
    Pointwise,
    Ragged,
    Reduce,
    Scan,
    Scatter,
    Segment,
    Value,
    as_indices,
    contiguous_strides,
    dim_vars,
)
from .numerics import Policy

_current: ContextVar[Graph] = ContextVar("flambeau_graph")
_origin: ContextVar[str] = ContextVar("flambeau_origin", default="")

Body = Callable[[tuple[Index, ...]], Expr]


@contextmanager
def building(graph: Graph, origin: str = "") -> Iterator[Graph]:
    """Makes lowerings within this block add their nodes to `graph`."""
    token, named = _current.set(graph), _origin.set(origin)
    try:
        yield graph
    finally:
        _current.reset(token)
        _origin.reset(named)


def graph() -> Graph:
    return _current.get()


def origin() -> str:
    """The operator that is being lowered."""
    return _origin.get()


def policy() -> Policy:
    """The numerics policy of the current graph: where it may compute differently from eager."""
    return graph().policy


def contracts() -> bool:
    """Whether the operator that is being lowered becomes a kernel even where a library has one."""
    return graph().capabilities.contracts or _origin.get() in graph().own


def pointwise(shape: Sequence[IndexLike], body: Body, dtype: DType | None = None, laid: bool = False) -> Value:
    """Returns the value of `shape` whose element i is body(i). `laid`: it is stored in memory, with the last dimension
    contiguous."""
    g = graph()
    vars = dim_vars(shape)
    e = body(as_indices(vars))
    e = e if dtype is None else cast(e, dtype)
    sizes = [as_index(n) for n in shape]
    buffer = g.add_buffer(sizes, e.dtype, strides=contiguous_strides(sizes) if laid else None)
    return g.add(Pointwise((buffer.name,), vars, e, laid, origin=_origin.get()))[0]


def run_number(found: Host, dtype: DType) -> Value:
    """Returns a number known only at run time, passed in a word of 64 bits. For a float, `found` computes the bits of a
    double."""
    g = graph()
    word = next((s for s, known in g.numbers.items() if known == found), Sym(f"{WORD}{len(g.numbers)}", lo=None))
    g.numbers[word] = found
    bits = index_value(word)
    return pointwise((), lambda _: Expr("bitcast", torch.float64, (bits,)) if is_float(dtype) else bits, dtype)


def is_word(e: Expr) -> bool:
    """Whether this is a run-time float as it arrives: a word reinterpreted as a double."""
    return e.op == "bitcast" and e.args[0].op == "index"


def reduce(shape: Sequence[IndexLike], axes: Sequence[int], combine: Combine,
           body: Callable[[tuple[Index, ...]], Expr | tuple[Expr, ...]], keepdim: bool = False
           ) -> tuple[Value, ...]:
    """Returns one value per component of `combine`: body over `shape`, combined over `axes`. Without axes, the body
    itself."""
    g = graph()
    vars = dim_vars(shape)
    reduced = frozenset(axes)
    inputs = _several(body(as_indices(vars)))
    if not axes:
        return tuple(pointwise(shape, _always(e)) for e in inputs)
    kept = [as_index(n) for i, n in enumerate(shape) if i not in reduced]
    names = tuple(g.add_buffer(kept, d).name for d in combine.dtypes)
    out = g.add(Reduce(names, vars, reduced, combine, inputs, origin=_origin.get()))
    return tuple(unsqueeze(v, sorted(reduced)) for v in out) if keepdim else out


def contract(shape: Sequence[IndexLike], depth: Sequence[IndexLike], left: Body, right: Body, dtype: DType,
             kind: str = "product", promoted: int = 0,
             ragged: tuple[int, Sym | int, Callable[[Index], Expr]] | None = None) -> Value:
    """Returns the value of `shape` that sums left(i) * right(i) over `depth`, in `dtype`. The indices of the depth come
    last in i.

    See `Contract` for `promoted`. `ragged` is the position of the ragged variable, the variable of parts or its
    position, and a function that returns where a part ends (see `Ragged`).
    """
    g = graph()
    kept = [as_index(n) for n in shape]
    vars = dim_vars((*kept, *depth))
    i = as_indices(vars)
    factors = Expr("mul", dtype, (cast(left(i), dtype), cast(right(i), dtype)))
    buffer, in_parts = g.add_buffer(kept, dtype), None
    if ragged is not None:
        place, part, ends = ragged
        part = vars[part] if isinstance(part, int) else part
        in_parts = Ragged(vars[place], part, ends(as_index(part)))
    return g.add(Contract((buffer.name,), vars, frozenset(range(len(kept), len(vars))), simple_combine("sum", dtype),
                          (factors,), origin=_origin.get(), tf32=kind in g.capabilities.tf32, promoted=promoted,
                          ragged=in_parts))[0]


def _several(e: Expr | tuple[Expr, ...]) -> tuple[Expr, ...]:
    return e if isinstance(e, tuple) else (e,)


def _always(e: Expr) -> Body:
    return lambda _: e


def unsqueeze(v: Value, axes: Sequence[int]) -> Value:
    """Returns a view with size-1 dimensions inserted, so that they are at `axes` (ascending) of the result."""
    shape: list[Index] = list(v.shape)
    for a in axes:
        shape.insert(a, as_index(1))
    keep = [i for i in range(len(shape)) if i not in set(axes)]
    return v.view(shape, lambda i: [i[k] for k in keep])


def segment(shape: Sequence[IndexLike], axis: int, lo: Callable[[tuple[Index, ...]], Expr],
            hi: Callable[[tuple[Index, ...]], Expr], combine: Combine,
            body: Callable[[tuple[Index, ...]], Expr | tuple[Expr, ...]]) -> tuple[Value, ...]:
    """Like `reduce` over one axis whose index runs from lo(i) to hi(i) - 1, both within shape[axis].

    lo and hi see the index with zero at `axis`."""
    g = graph()
    vars = dim_vars(shape)
    i = as_indices(vars)
    outer = tuple(as_index(0) if k == axis else x for k, x in enumerate(i))
    e = body(tuple(as_index(v) if k == axis else x for k, (v, x) in enumerate(zip(vars, i, strict=True))))
    kept = [as_index(n) for k, n in enumerate(shape) if k != axis]
    names = tuple(g.add_buffer(kept, d).name for d in combine.dtypes)
    return g.add(Segment(names, vars, frozenset((axis,)), combine, _several(e),
                         lo(outer), hi(outer), origin=_origin.get()))


def scan(shape: Sequence[IndexLike], axis: int, combine: Combine,
         body: Callable[[tuple[Index, ...]], Expr | tuple[Expr, ...]], reverse: bool = False,
         dtypes: Sequence[DType] | None = None,
         finish: Callable[[tuple[Expr, ...]], tuple[Expr, ...]] | None = None) -> tuple[Value, ...]:
    """Returns one value per component of `combine`: body combined along `axis` from the start up to each point.

    The running values have the dtypes of the combine. The stored values may be narrower (`dtypes`), or computed from
    the running values by `finish`.
    """
    g = graph()
    vars = dim_vars(shape)
    inputs = _several(body(as_indices(vars)))
    results = combine.left if finish is None else finish(combine.left)
    kept = dtypes or combine.dtypes
    if vars[axis].size is ONE:  # nothing comes before an element
        given = dict(zip(combine.left, inputs, strict=True))
        return tuple(pointwise(shape, _always(rewrite(e, lambda x: given.get(x, x))), d)
                     for e, d in zip(results, kept, strict=True))
    names = tuple(g.add_buffer([as_index(n) for n in shape], d).name for d in kept)
    return g.add(Scan(names, vars, axis, combine, inputs, reverse, results, origin=_origin.get()))


def scatter(shape: Sequence[IndexLike], init: Body, source: Sequence[IndexLike],
            target: Callable[[tuple[Index, ...]], Sequence[IndexLike]], value: Body, mode: str = "set",
            mask: Body | None = None, permutes: bool = False) -> Value:
    """Returns an array of `shape` that starts as init(i). For each j in `source`, in order, element target(j) becomes
    value(j) (mode set) or is combined with it (add, mul, min, max). `permutes`: each element is the target of exactly
    one j."""
    g = graph()
    out_vars = dim_vars(shape, "o")
    vars = dim_vars(source)
    j = as_indices(vars)
    start = init(as_indices(out_vars))
    buffer = g.add_buffer([as_index(n) for n in shape], start.dtype)
    return g.add(Scatter((buffer.name,), out_vars, start, vars, tuple(as_index(t) for t in target(j)), value(j),
                         mode, None if mask is None else mask(j), permutes, permutes, origin=_origin.get()))[0]


def extern(target: Any, args: Sequence[Any], kwargs: dict[str, Any], metas: Sequence[tuple[Any, DType, Any] | None],
           tuple_result: bool = False, kind: type[Extern] = Extern, out: Any = None,
           effect: bool = False) -> tuple[Value | None, ...]:
    """Calls `target` unchanged. `metas`: (shape, dtype, strides) of each tensor it returns, None for a None."""
    g = graph()
    names, positions = [], []
    for k, m in enumerate(metas):
        if m is not None:
            shape, dtype, strides = m
            laid = tuple(as_index(s) for s in strides)
            names.append(g.add_buffer([as_index(n) for n in shape], dtype, strides=laid).name)
            positions.append(k)
    node = kind(tuple(names), target, tuple(args), tuple(kwargs.items()),
                tuple(positions) if tuple_result else None, out, effect, origin=_origin.get())
    made = iter(g.add(node))
    return tuple(None if m is None else next(made) for m in metas)


# ---- combines ----------------------------------------------------------------------------------------


def make_combine(name: str, dtypes: Sequence[DType], identity: Sequence[Scalar],
                 fn: Callable[[tuple[Expr, ...], tuple[Expr, ...]], tuple[Expr, ...]]) -> Combine:
    left = tuple(Expr("carry", d, (), f"l{k}") for k, d in enumerate(dtypes))
    right = tuple(Expr("carry", d, (), f"r{k}") for k, d in enumerate(dtypes))
    return Combine(name, left, right, fn(left, right),
                   tuple(lift(x, d) for x, d in zip(identity, dtypes, strict=True)))


@cache
def simple_combine(name: str, dtype: DType) -> Combine:
    """sum, prod, min, max (NaN wins), any, all, xor over one component."""
    ops: dict[str, tuple[str, Any]] = {
        "sum": ("add", 0), "prod": ("mul", 1), "min": ("min", highest(dtype)), "max": ("max", lowest(dtype)),
        "any": ("bitwise_or", False), "all": ("bitwise_and", True)}
    op, start = ops[name]
    if is_bool(dtype):
        op = {"min": "bitwise_and", "max": "bitwise_or", "sum": "bitwise_or", "prod": "bitwise_and"}.get(name, op)
    return make_combine(name, (dtype,), (start,), lambda a, b: (binary(op, a[0], b[0]),))


@cache
def arg_combine(name: str, dtype: DType, index: DType = torch.int64) -> Combine:
    """min or max with its index; NaN wins; on ties the first index."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        (av, ai), (bv, bi) = a, b
        better = bv > av if name == "max" else bv < av
        equal = binary("eq", av, bv)
        if is_float(dtype):
            a_nan, b_nan = unary("isnan", av), unary("isnan", bv)
            better = ~(av >= bv if name == "max" else av <= bv) & ~a_nan  # a comparison with NaN does not hold
            equal = equal | (a_nan & b_nan)
        take = better | (equal & (bi < ai))
        return where(take, bv, av), where(take, bi, ai)

    start = lowest(dtype) if name == "max" else highest(dtype)
    # An index past every real one: the identity never wins a tie against an element.
    return make_combine(f"arg{name}", (dtype, index), (start, torch.iinfo(index).max // 2), fn)


