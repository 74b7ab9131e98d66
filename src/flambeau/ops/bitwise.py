"""Bit patterns: logic and shifts on integers, divisors, and floats taken apart."""

from __future__ import annotations

import math
from operator import and_, invert, or_, xor

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_float, opmath
from flambeau.ir.expr import Expr, binary, cast, const, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import abs_, eq, isnan, math2, ne
from flambeau.ops.facts import EVERYWHERE, of_family
from flambeau.ops.registry import lower, lower_pointwise, table

aten = torch.ops.aten
of_family(exact=EVERYWHERE)


table("default", {
    aten.bitwise_and: and_, aten.bitwise_or: or_, aten.bitwise_xor: xor, aten.bitwise_not: invert,
    aten.gcd: math2("gcd"), aten.lcm: math2("lcm"),
})


def _out_of_width(a: Expr, shift: Expr) -> Expr:
    """Whether the shift count is out of range, where the machine's shift is not the arithmetic one."""
    negative = shift < 0 if shift.dtype.is_signed else const(False, torch.bool)
    return negative | (shift >= a.dtype.itemsize * 8)


@lower_pointwise(aten.bitwise_left_shift, aten.__lshift__)
def left_shift(a: Expr, shift: Expr) -> Expr:
    if is_float(a.dtype):
        return a * binary("pow", const(2, a.dtype), shift)
    return where(_out_of_width(a, shift), 0, binary("shl", a, shift))


@lower_pointwise(aten.bitwise_right_shift, aten.__rshift__)
def right_shift(a: Expr, shift: Expr) -> Expr:
    if is_float(a.dtype):
        return a / binary("pow", const(2, a.dtype), shift)
    sign = where(a < 0, const(-1, a.dtype), 0) if a.dtype.is_signed else const(0, a.dtype)
    return where(_out_of_width(a, shift), sign, binary("shr", a, shift))


# ---- floats --------------------------------------------------------------------------------------------


def bitcast(x: Expr, dtype: DType) -> Expr:
    return Expr("bitcast", dtype, (x,))


@lower_pointwise(aten.nextafter, math=False)
def nextafter(x: Expr, toward: Expr) -> Expr:
    """The neighbour in x's own dtype; for 16 bits, by adding one to the bit pattern or subtracting one."""
    wide = opmath(x.dtype)
    if wide is x.dtype:
        return binary("nextafter", x, toward)
    bits, a, b = bitcast(x, torch.int16), cast(x, wide), cast(toward, wide)
    first = where(b < 0, const(-(2**15) + 1, torch.int16), 1)  # the smallest subnormal, with b's sign
    step = where((a < b) ^ (a < 0), const(1, torch.int16), -1)
    moved = bitcast(where(eq(a, 0), first, bits + step), x.dtype)
    return where(isnan(a), x, where(isnan(b) | eq(a, b), toward, moved))


# dtype -> integer dtype of the same width, number of fraction bits, exponent bias
_FIELDS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


@lower(aten.frexp.Tensor, strides="preserved")
def frexp(x: Value) -> tuple[Value, Value]:
    """x = mantissa * 2^exponent with |mantissa| in [0.5, 1); zero, infinity and NaN are returned with exponent 0."""
    compute = opmath(x.dtype)
    integer, fraction, bias = _FIELDS[compute]
    exponent_field = (2 * bias + 1) << fraction

    def parts(i: tuple[Index, ...]) -> tuple[Expr, Expr]:
        v = cast(x.load(i), compute)
        ordinary = ne(v, 0) & (abs_(v) < math.inf)
        subnormal = abs_(v) < torch.finfo(compute).tiny
        bits = bitcast(where(subnormal, v * 2.0**fraction, v), integer)
        exponent = binary("shr", bits & exponent_field, fraction) - (bias - 1)
        exponent = exponent - where(subnormal, const(fraction, integer), 0)
        mantissa = bitcast((bits & ~exponent_field) | ((bias - 1) << fraction), compute)
        return where(ordinary, mantissa, v), where(ordinary, exponent, 0)

    return (build.pointwise(x.shape, lambda i: parts(i)[0], x.dtype),
            build.pointwise(x.shape, lambda i: parts(i)[1], torch.int32))
