"""The functions with which lowerings write formulas: exp, where, clamp, minimum and so on, on expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .dtypes import DType, is_bool, is_float, opmath
from .expr import Expr, Scalar, binary, cast, const, fold, fresh_carry, fresh_sym, lift, unary
from .index import Index, IndexLike, as_index, upper


def math1(name: str) -> Callable[[Expr], Expr]:
    return lambda x: unary(name, x)


def math2(name: str) -> Callable[[Scalar, Scalar], Expr]:
    return lambda a, b: binary(name, a, b)


exp, exp2, expm1, sigmoid = map(math1, ("exp", "exp2", "expm1", "sigmoid"))
log, log2, rough_log2, log1p = map(math1, ("log", "log2", "rough_log2", "log1p"))
sin, cos, tan, tanh = map(math1, ("sin", "cos", "tan", "tanh"))
erf, erfc, digamma = map(math1, ("erf", "erfc", "digamma"))
sqrt, rsqrt = map(math1, ("sqrt", "rsqrt"))
floor, ceil, trunc, round, sign = map(math1, ("floor", "ceil", "trunc", "round", "sign"))
isnan, isinf, not_ = map(math1, ("isnan", "isinf", "logical_not"))
eq, ne = map(math2, ("eq", "ne"))
minimum, maximum = map(math2, ("min", "max"))  # NaN if either is
pow_, fmod, floordiv, atan2, hypot, copysign = map(math2, ("pow", "fmod", "floordiv", "atan2", "hypot", "copysign"))


def abs_(x: Expr) -> Expr:
    return x if is_bool(x.dtype) or x.dtype is torch.uint8 else unary("abs", x)


def clamp(x: Expr, lo: Scalar | None, hi: Scalar | None) -> Expr:
    x = x if lo is None else maximum(x, lo)
    return x if hi is None else minimum(x, hi)


def square(x: Expr) -> Expr:
    return x * x


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c with one rounding."""
    return Expr("fma", a.dtype, (a, b, c))


def is_finite(x: Expr) -> Expr:
    return ~(unary("isnan", x) | unary("isinf", x)) if is_float(x.dtype) else const(True, torch.bool)


def round_to(x: Expr, dtype: DType) -> Expr:
    """x rounded to a storage dtype and back, as between two eager operators."""
    return cast(cast(x, dtype), opmath(dtype))


def philox(seed: Expr, subsequence: Scalar, counter: Expr, word: int = 0) -> Expr:
    """Word 0..3 of Philox 4x32-10 as an int64 in [0, 2^32)."""
    return Expr("philox", torch.int64, (seed, lift(subsequence, torch.int64), counter), word)


def fold_over(bounds: Sequence[tuple[IndexLike, IndexLike]], inits: Sequence[Expr],
              step: Callable[[tuple[Index, ...], tuple[Expr, ...]], Sequence[Expr]]) -> tuple[Expr, ...]:
    """Writes a small loop nest inside an expression: carries start at `inits` and become step(index, carries).

    bounds: (first, one past the last) per loop. Loops count from zero: lanes whose ranges begin at different places run
    them in lockstep, for as many iterations as the longest range has.
    """
    firsts = [as_index(lo) for lo, _ in bounds]
    loops = []
    for lo, (_, hi) in zip(firsts, bounds, strict=True):
        top = lo.bounds()[1]  # a lower bound may be below what a symbolic size allows
        if top is not None and top < 0:
            raise ValueError("fold_over: loops start at zero or later; shift the index inside the step")
        count = as_index(hi) - lo
        loops.append((fresh_sym(_extent(count if count.is_const else as_index(hi))), as_index(0), count))
    carries = tuple(fresh_carry(e.dtype) for e in inits)
    updates = tuple(step(tuple(lo + v for lo, (v, _, _) in zip(firsts, loops, strict=True)), carries))
    return fold(tuple(loops), carries, tuple(inits), updates)


def _extent(end: Index) -> Index | None:
    """Returns an upper bound of a loop's end over sizes alone: the loop variables around it are split and renamed later
    on."""
    high = end.bounds()[1]
    most = upper(end) if high is None else as_index(max(high, 1))
    return most if all(s.extent is None for s in most.symbols()) else None


def sum_over(bounds: Sequence[tuple[IndexLike, IndexLike]], dtype: DType, term: Callable[[tuple[Index, ...]], Expr]
             ) -> Expr:
    """Returns the sum of term(index) over a loop nest as in `fold_over`."""
    return fold_over(bounds, (const(0, dtype),), lambda index, total: (total[0] + term(index),))[0]
