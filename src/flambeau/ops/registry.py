"""The registry of lowerings: `@lower` binds an operator to its function; `@pointwise` makes one from a formula."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, Operand, int_to_float, is_bool, number_dtype, opmath, promote
from flambeau.ir.expr import Expr, cast, const, index_value, lift
from flambeau.ir.index import Index, as_index
from flambeau.ir.nodes import Value
from flambeau.ops.facts import LOWERINGS, describe, describing_file
from flambeau.ops.rounding import storing
from flambeau.torch_compat.ops import HigherOrderOperator, OpOverload

F = TypeVar("F", bound=Callable[..., Any])



def overloads(op: Any) -> Iterable[OpOverload]:
    """The functional overloads of an operator: what a functionalised graph can contain."""
    if isinstance(op, OpOverload):
        return [op]
    every = [getattr(op, name) for name in op.overloads()]
    return [o for o in every if not o._schema.is_mutable
            and any("Tensor" in str(a.type) for a in (*o._schema.arguments, *o._schema.returns))]


def lower(*ops: Any, **facts: Any) -> Callable[[F], F]:
    """Register the function as the lowering of these operators (packets: all functional overloads), together with facts
    about them: the fields of `Facts`.

    It gets the operator's arguments with Values for tensors and Indices for symbolic sizes, and returns a Value or a
    tuple of them. Returning NotImplemented hands this call to ATen, counted and named. An operator that `reads_memory`
    gets its first argument in a buffer with the memory layout that it has in eager.
    """
    family = describing_file()

    def register(fn: F) -> F:
        for op in ops:
            describe(op, **facts)
            for overload in overloads(op):
                LOWERINGS[overload] = fn
                describe(overload, family=family)
        return fn

    return register


HIGHER: dict[HigherOrderOperator, Callable[..., Any]] = {}


def lower_higher(op: HigherOrderOperator, **facts: Any) -> Callable[[F], F]:
    """`@lower` for higher-order operators, whose function arguments become functions of values (`formulas.Formula`).
    Results may be lists of results, and None for an absent one."""
    describe(op, **facts)

    def register(fn: F) -> F:
        HIGHER[op] = fn
        return fn

    return register


def operand(x: Any) -> Operand:
    if isinstance(x, Value):
        return Operand(x.dtype, None if x.number else x.rank)
    return Operand(torch.int64 if isinstance(x, Index) else number_dtype(x), None)


def broadcast_shapes(*shapes: Sequence[Index]) -> tuple[Index, ...]:
    """The broadcast shape. Sizes not known to be equal are recorded in the graph: they must be equal at run time."""
    rank = max((len(s) for s in shapes), default=0)
    one = as_index(1)
    out = [one] * rank
    for s in shapes:
        for k, n in enumerate(s, rank - len(s)):
            if out[k] is one:
                out[k] = n
            elif n is not one:
                build.graph().agree([out[k]], [n])
    return tuple(out)


def load_at(v: Value, where: Sequence[Index], mask: Expr | None = None) -> Expr:
    """The element of v that broadcasting puts at `where`."""
    own = where[len(where) - v.rank:] if v.rank else ()
    one = as_index(1)
    return v.load([as_index(0) if n is one else i for n, i in zip(v.shape, own, strict=True)], mask)


_KINDS: dict[str, Callable[[DType], DType]] = {
    "default": lambda d: d,  # results in the promoted dtype
    "float": int_to_float,  # integers become the default float (exp, true division)
    "bool": lambda d: d,  # comparisons: promoted inside, bool outside
    "int_to_long": lambda d: torch.int64 if is_bool(d) else d,
}


def pointwise(fn: Callable[..., Any] | None = None, *, kind: str = "default", operands: int | None = None,
              math: bool = True) -> Any:
    """Turn a formula on expressions into a function on values: promotion, broadcasting, opmath, result dtype.

    The first `operands` parameters (by default all those without a default value) are tensors or numbers that
    take part in promotion; the others are plain arguments. With math=False the formula sees the storage dtype
    (for moving and comparing, where widening first would change nothing).
    """
    if fn is None:
        return functools.partial(pointwise, kind=kind, operands=operands, math=math)
    names = list(inspect.signature(fn).parameters.values())
    count = operands if operands is not None else sum(
        p.default is p.empty and p.kind is not p.KEYWORD_ONLY for p in names)

    @functools.wraps(fn)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        for p in names[len(args):count]:
            args = (*args, kwargs.pop(p.name, None if p.default is p.empty else p.default))
        head, rest = args[:count], args[count:]
        given = [a for a in head if a is not None]
        common = _KINDS[kind](promote(operand(a) for a in given))
        compute = opmath(common) if math else common
        shape = broadcast_shapes(*(a.shape for a in head if isinstance(a, Value)))

        def body(where: tuple[Index, ...]) -> Expr:
            scalars = [None if a is None else scalar_at(a, where, common, compute) for a in head]
            with storing(common):
                return lift(fn(*scalars, *rest, **kwargs), compute)

        return build.pointwise(shape, body, torch.bool if kind == "bool" else common)

    lowered.operands = count  # type: ignore[attr-defined]
    return lowered


def scalar_at(a: Any, where: Sequence[Index], common: DType, compute: DType) -> Expr:
    """Operand `a` at an index, in the dtype the formula computes in."""
    if isinstance(a, Value):
        read = load_at(a, where)
        return cast(read if a.number else cast(read, common), compute)  # numbers are not rounded to the tensors' dtype
    if isinstance(a, Index):
        return index_value(a, compute)
    return const(a, compute)


def lower_pointwise(*ops: Any, kind: str = "default", operands: int | None = None, math: bool = True, **facts: Any
                    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`@lower(op, ...)` over `@pointwise(...)` in one line."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lower(*ops, **facts)(pointwise(fn, kind=kind, operands=operands, math=math))

    return register


def table(kind: str, rows: dict[Any, Callable[..., Expr]], **facts: Any) -> None:
    """Register many one-line formulas: {aten.exp: exp, ...}."""
    for op, formula in rows.items():
        lower(op, **facts)(pointwise(formula, kind=kind))


class OutOfRange(IndexError):
    """Raised for an argument that eager rejects although torch's tracing may accept it: the call is left to eager,
    which raises its error at run time."""


def wrap_dim(dim: int, rank: int) -> int:
    """A dimension counted from the start, from one that may count from the end; rank 0 counts as one dimension."""
    size = max(rank, 1)
    if not -size <= dim < size:
        raise OutOfRange(f"Dimension out of range (expected to be in range of [{-size}, {size - 1}], but got {dim})")
    return dim % size


def wrap_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """All given dimensions counted from the start; None or empty means every dimension."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(sorted({wrap_dim(d, rank) for d in dims})) if rank else ()


def to_dtype(v: Value, dtype: DType) -> Value:
    return v if v.dtype is dtype else build.pointwise(v.shape, lambda i: v.load(i), dtype)
