"""Arithmetic on numbers: sums, products, quotients, powers, signs, rounding, bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import and_, or_
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import is_bool, is_float
from flambeau.ir.expr import Expr, binary, cast, const, require, unary, where
from flambeau.ir.faults import Fault
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import (
    abs_,
    ceil,
    clamp,
    copysign,
    eq,
    floor,
    fma,
    isnan,
    math2,
    maximum,
    minimum,
    ne,
    round,
    rsqrt,
    sign,
    sqrt,
    square,
    trunc,
)
from flambeau.ops.facts import EVERYWHERE, ON_CUDA, WIDE, describe
from flambeau.ops.registry import lower, lower_pointwise, pointwise, scalar_at, table
from flambeau.ops.rounding import as_stored, by_kernels, mad, rounds_to, step, stored
from flambeau.torch_compat.prims import has_fma, prims

aten = torch.ops.aten


# ---- sums and products ---------------------------------------------------------------------------------


def plus_multiple(a: Expr, factor: Any, b: Expr) -> Expr:
    """a + factor * b; in floats with one rounding, as ATen's vector loop does."""
    if isinstance(factor, (int, float)) and factor == 1:
        return a | b if is_bool(a.dtype) else a + b
    scale = scalar_at(factor, (), b.dtype, b.dtype)
    if is_bool(a.dtype):
        return a | (scale & b)
    return fma(scale, b, a) if is_float(a.dtype) else a + scale * b


def is_number(x: Any) -> bool:
    return not isinstance(x, Value) or x.number


def is_known_before(x: Any) -> bool:
    """Whether the host knows the value when it launches a kernel."""
    return is_number(x) or x.host


def as_it_is(x: Any, beside: Any) -> Any:
    """Let a scalar act as a number beside float16 or bfloat16 tensors, so that it is not rounded to their dtype."""
    meets = isinstance(x, Value) and not x.rank and are_small(beside) and beside.rank
    return replace(x, number=True) if meets else x


def from_host(a: Any, b: Any) -> tuple[Any, Any]:
    """The operands of kernels that on GPUs take host scalars without rounding them."""
    def read(x: Any, beside: Any) -> Any:
        return as_it_is(x, beside) if isinstance(x, Value) and x.host and build.policy().kernels == "cuda" else x

    return read(a, b), read(b, a)


def without_host(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Leave calls with host scalars to eager on GPUs: whether they are rounded first depends on its kernel."""
    def lowered(*operands: Any, **named: Any) -> Any:
        if build.policy().kernels == "cuda" and any(
                isinstance(x, Value) and x.host and not x.number for x in (*operands, *named.values())):
            return NotImplemented
        return lowering(*operands, **named)

    return lowered


def whole_factor(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Truncate a float factor if the tensors are integers, as eager does; the factor does not affect type promotion."""
    def lowered(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
        if isinstance(value, float) and not any(is_float(t.dtype) for t in (x, a, b)):
            value = int(value)
        return lowering(x, a, b, value=value)

    return lowered


def are_small(*operands: Any) -> bool:
    return any(isinstance(x, Value) and x.dtype in (torch.float16, torch.bfloat16) for x in operands)


def in_vectors_alone(a: Any, b: Any, alpha: Any) -> bool:
    """Whether eager's CPU vector code adds with a single rounding, but its scalar remainder loop does not: for small
    floats, multiples and numbers; for large ones, a multiple of a value that is constant along the vector."""
    once = isinstance(alpha, (int, float)) and alpha == 1
    if are_small(a, b):
        return not once or is_number(a) or is_number(b)
    return not once and not (isinstance(a, Value) and isinstance(b, Value) and a.shape == b.shape)


def unless_in_vectors(formula: Callable[..., Expr]) -> Callable[..., Value]:
    lowered = pointwise(formula)

    def lowering(a: Any, b: Any, alpha: Any = 1) -> Value:
        if build.policy().kernels == "cpu" and in_vectors_alone(a, b, alpha):
            return NotImplemented
        made: Value = lowered(*from_host(a, b), alpha=alpha)
        return made

    return lowering


@lower(aten.add, exact=EVERYWHERE)
@unless_in_vectors
def add(a: Expr, b: Expr, alpha: Any = 1) -> Expr:
    return plus_multiple(a, alpha, b)


@lower(aten.sub, exact=EVERYWHERE)
@unless_in_vectors
def sub(a: Expr, b: Expr, alpha: Any = 1) -> Expr:
    return a - b if alpha == 1 else plus_multiple(a, -alpha, b)


@lower(aten.rsub, exact=EVERYWHERE)
@unless_in_vectors
def rsub(a: Expr, b: Expr, alpha: Any = 1) -> Expr:
    return b - a if alpha == 1 else plus_multiple(b, -alpha, a)


def unrounded(a: Any, b: Any) -> Any:
    """A scalar factor or divisor of small floats: eager does not round it, except for scalars in GPU memory."""
    return b if build.policy().kernels == "cuda" else as_it_is(b, a)


@pointwise
def product(a: Expr, b: Expr) -> Expr:
    return a & b if is_bool(a.dtype) else a * b


@lower(aten.mul, exact=EVERYWHERE)
def mul(a: Any, b: Any) -> Value:
    made: Value = product(*from_host(a, unrounded(a, b)))
    return made


if has_fma():  # missing in some releases
    table("default", {prims.fma: fma})


def is_one(x: Expr) -> bool:
    return x.op == "const" and x.attr == 1


_plus_product = by_kernels(
    lambda x, a, b, value: x + value * a * b,
    cpu=lambda x, a, b, value: mad(value * a, b, x),
    cuda=lambda x, a, b, value: mad(a, b, x) if is_one(value) else mad(value, a * b, x))
_plus_quotient = by_kernels(
    lambda x, a, b, value: x + value * a / b,
    cuda=lambda x, a, b, value: x + a / b if is_one(value) else mad(value, a / b, x))


@lower(aten.addcmul, operands=3, exact=WIDE)
@without_host
@whole_factor
@pointwise(operands=4)
def addcmul(x: Expr, a: Expr, b: Expr, value: Any = 1) -> Expr:
    return _plus_product(x, a, b, value)


@lower(aten.addcdiv, operands=3, exact=WIDE)
@without_host
@pointwise(operands=4)
def addcdiv(x: Expr, a: Expr, b: Expr, value: Any = 1) -> Expr:
    return _plus_quotient(x, a, b, value)


@lower(aten.lerp, exact=WIDE)
@without_host
@pointwise
def lerp(start: Expr, end: Expr, weight: Expr) -> Expr:
    """Exact at both ends: from the start for small weights, from the end for large ones."""
    way = end - start
    return where(abs_(weight) < 0.5, mad(weight, way, start), mad(-way, 1 - weight, end))


# ---- quotients -----------------------------------------------------------------------------------------


@pointwise(kind="float")
def true_quotient(a: Expr, b: Expr) -> Expr:
    return a / b


def quotient(a: Any, b: Any) -> Value:
    made: Value = true_quotient(a, unrounded(a, b))
    return made


def inverse(b: Any) -> Any:
    """The reciprocal of a number, computed in float64 as on the host."""
    if isinstance(b, (Value, Index)):
        made = build.pointwise((), lambda _: 1 / scalar_at(b, (), torch.float64, torch.float64))
        return replace(made, number=True)
    return 1 / b if b else math.copysign(math.inf, b)


@pointwise(kind="float", operands=2)
def times(a: Expr, b: Expr, factor: Any) -> Expr:
    """a * factor, in the dtype of the quotient of a and b."""
    return a * scalar_at(factor, (), a.dtype, a.dtype)


describe(aten.div, exact=EVERYWHERE)
describe(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode, operands=2)


@lower(aten.div.Tensor, aten.div.Scalar, aten.true_divide)
def div(a: Any, b: Any) -> Value:
    if not (is_known_before(b) and build.policy().reciprocals):
        return quotient(a, b)
    made: Value = times(a, b, inverse(b))
    return made


def divided(op: str, a: Expr, b: Expr) -> Expr:
    """A quotient or remainder. Integer division by zero is an error, except on GPUs."""
    result = binary(op, a, b)
    if is_float(a.dtype) or build.graph().capabilities.gpu_eager:
        return result
    return require(result, ne(b, 0), Fault.ZERO_DIVISION)


@pointwise
def trunc_divide(a: Expr, b: Expr) -> Expr:
    return trunc(as_stored(a / b)) if is_float(a.dtype) else divided("div", a, b)


@lower_pointwise(aten.floor_divide)
def floor_divide(a: Expr, b: Expr) -> Expr:
    return divided("floordiv", a, b)


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(a: Value, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None and build.policy().exact and (are_small(a, b) or is_known_before(b)) and (
            rounding_mode == "floor" or is_known_before(b) or build.policy().kernels == "cpu"):
        return NotImplemented  # eager's kernel rounds at each of its steps
    return {None: div, "trunc": trunc_divide, "floor": floor_divide}[rounding_mode](a, b)


table("default", {
    aten.fmod: lambda a, b: divided("fmod", a, b), aten.remainder: lambda a, b: divided("remainder", a, b),
}, exact=EVERYWHERE)


# ---- powers --------------------------------------------------------------------------------------------

# Exponents for which ATen does not use its general power. The negative ones apply to floats only.
_POWERS: dict[float, Callable[[Expr], Expr]] = {
    0: lambda x: const(1, x.dtype), 1: lambda x: x, 2: square, 3: lambda x: step(x * x) * x,
    0.5: sqrt, -0.5: rsqrt, -1: lambda x: 1 / x, -2: lambda x: 1 / step(x * x),
}


@lower_pointwise(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def general_power(base: Expr, exponent: Expr) -> Expr:
    return base if base.op == "const" and base.attr == 1 else binary("pow", base, exponent)


@lower_pointwise(aten.pow.Tensor_Scalar)
def pow(base: Expr, exponent: Expr) -> Expr:
    """The power of a number. Roots of minus zero and minus infinity are not their powers: a CPU has no roots of half
    precision."""
    power, rooted = binary("pow", base, exponent), not rounds_to(torch.float16) or build.graph().device == "cuda"
    if exponent.op == "const" and exponent.attr in _POWERS:
        special = abs(exponent.attr) != 0.5 or rooted if is_float(base.dtype) else exponent.attr >= 0
        return _POWERS[exponent.attr](base) if special else power
    if exponent.op != "const" and is_float(base.dtype) and rooted:
        for root in (0.5, -0.5):
            power = where(eq(exponent, root), _POWERS[root](base), power)
    return power


describe(aten.pow, exact=WIDE)  # by name, for its forms in place and on lists too

table("float", {aten.sqrt: sqrt, aten.reciprocal: lambda x: 1 / x}, exact=EVERYWHERE)
table("float", {aten.rsqrt: rsqrt}, exact=ON_CUDA)


# ---- signs and rounding --------------------------------------------------------------------------------


def _on_floats(formula: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """Apply the formula to floats; integers are unchanged."""
    return lambda x: formula(x) if is_float(x.dtype) else x


def _sign(x: Expr) -> Expr:
    return x if is_bool(x.dtype) else sign(x)


def _signbit(x: Expr) -> Expr:
    return unary("signbit", x) if is_float(x.dtype) else x < 0


table("default", {
    aten.neg: lambda x: -x, aten.abs: abs_, aten.sign: _sign, aten.sgn: _sign, aten._conj_physical: lambda x: x,
    aten.floor: _on_floats(floor), aten.ceil: _on_floats(ceil), aten.trunc: _on_floats(trunc),
    aten.round.default: _on_floats(round), aten.frac: lambda x: x - trunc(x),
}, exact=EVERYWHERE)
describe(aten.round, exact=EVERYWHERE)
describe(aten.deg2rad, aten.rad2deg, strides="with a number")
# Widening a float16 NaN loses its sign on the machine. Some versions of eager's kernels widen before they look at the
# sign, others do not.
_SIGNS = EVERYWHERE | {"cuda": frozenset((torch.float16,))}
table("bool", {aten.signbit: _signbit}, exact=_SIGNS)
table("float", {aten.copysign: copysign}, exact=_SIGNS)
table("float", {
    aten.deg2rad: lambda x: x * (math.pi / 180),
    aten.rad2deg: lambda x: x * (180 / math.pi),
    aten.angle: lambda x: where(isnan(x), x, where(x < 0, const(math.pi, x.dtype), 0)),
}, exact=EVERYWHERE)


@lower_pointwise(aten.round.decimals)
def round_decimals(x: Expr, *, decimals: int) -> Expr:
    """Scale by a positive power of ten whatever the sign of `decimals`, because negative powers are inexact."""
    if decimals == 0 or not is_float(x.dtype):
        return _on_floats(round)(x)
    scale = stored(10.0 ** abs(decimals), x)
    return round(step(x * scale)) / scale if decimals > 0 else round(step(x / scale)) * scale


@lower_pointwise(aten.heaviside, exact=EVERYWHERE)
def heaviside(x: Expr, at_zero: Expr) -> Expr:
    return where(eq(x, 0), at_zero, cast(x > 0, x.dtype))


# ---- bounds --------------------------------------------------------------------------------------------


def _or_of_bools(formula: Callable[..., Expr], of_bools: Callable[..., Expr]) -> Callable[[Expr, Expr], Expr]:
    return lambda a, b: (of_bools if is_bool(a.dtype) else formula)(a, b)


for _op, _exact, _formula, _of_bools in (
    (aten.clamp_min, WIDE, maximum, or_),
    (aten.clamp_max, WIDE, minimum, and_),
    (aten.maximum, ON_CUDA, maximum, or_),
    (aten.minimum, ON_CUDA, minimum, and_),
    (aten.fmax, ON_CUDA, math2("fmax"), or_),
    (aten.fmin, ON_CUDA, math2("fmin"), and_),
):
    lower(_op, exact=_exact)(pointwise(_or_of_bools(_formula, _of_bools)))


@lower_pointwise(aten.clamp, operands=3, exact=WIDE)
def clamp_between(x: Expr, min: Expr | None = None, max: Expr | None = None) -> Expr:
    """Clamp to [min, max]; if min > max, every element becomes max."""
    return clamp(x, min, max)


# On a CPU, eager's choice between 0.0 and -0.0 differs between its vector code and the remainder loop.
describe(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.pow.Tensor_Scalar, operands=1)
describe(aten.lerp.Scalar, operands=2)
describe(aten.clamp.Tensor, aten.clamp_max.Tensor, aten.clamp_min.Tensor, exact=ON_CUDA)
