"""Activation functions, each beside its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, cast, const, index_value, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import abs_, clamp, erf, exp, expm1, isnan, log, log1p, maximum, minimum, sigmoid, tanh
from flambeau.ops.facts import EVERYWHERE, ON_CUDA, WIDE, describe, of_family
from flambeau.ops.registry import lower, lower_pointwise, pointwise, wrap_dim
from flambeau.ops.rounding import by_kernels, is_exact, mad, mad_by_steps, step, stored, stored_anywhere

aten = torch.ops.aten
of_family(fuses=True, is_map=True)


# ---- piecewise linear ----------------------------------------------------------------------------------


@lower_pointwise(aten.relu, exact=EVERYWHERE, group="light activations")
def relu(x: Expr) -> Expr:
    return maximum(x, 0)


@lower_pointwise(aten.threshold, operands=1, exact=EVERYWHERE)
def threshold(x: Expr, threshold: float, value: float) -> Expr:
    return where(x <= stored(threshold, x), value, x)


@lower_pointwise(aten.threshold_backward, operands=2, exact=EVERYWHERE, group="light activations")
def threshold_backward(grad: Expr, x: Expr, threshold: float) -> Expr:
    return where(x <= stored(threshold, x), 0, grad)


@lower_pointwise(aten.leaky_relu, operands=1, exact=EVERYWHERE)
def leaky_relu(x: Expr, negative_slope: float = 0.01) -> Expr:
    return where(x > 0, x, x * negative_slope)


def _sign_of_result(find: Callable[..., Any], grad: Any, x: Any, slope: Any, is_result: bool) -> tuple[Any, ...]:
    """Read the result instead of the argument: the gradient only needs the sign, which is the same, and the result is
    saved anyway for its readers. An argument computed by a preceding norm then need not be saved."""
    if is_result or not isinstance(slope, float | int) or slope <= 0:
        return grad, x, slope, is_result
    made = find(aten.leaky_relu.default, x, slope) or (find(aten.leaky_relu.default, x) if slope == 0.01 else None)
    return (grad, x, slope, False) if made is None else (grad, made, slope, True)


@lower_pointwise(aten.leaky_relu_backward, operands=2, exact=EVERYWHERE, keeps_less=_sign_of_result)
def leaky_relu_backward(grad: Expr, x: Expr, negative_slope: float, self_is_result: bool = False) -> Expr:
    """Works with the argument or the result, because they have the same sign."""
    return where(x > 0, grad, grad * negative_slope)


@lower_pointwise(aten._prelu_kernel, exact=EVERYWHERE, checks=True)
def prelu(x: Expr, weight: Expr) -> Expr:
    return where(x > 0, x, weight * x)


@pointwise
def _prelu_backward_x(grad: Expr, x: Expr, weight: Expr) -> Expr:
    return where(x > 0, grad, weight * grad)


@pointwise
def _prelu_backward_weight(grad: Expr, x: Expr) -> Expr:
    return where(x > 0, 0, x * grad)


@lower(aten._prelu_kernel_backward, exact=EVERYWHERE)
def prelu_backward(grad: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    """The weight's gradient is per element; another operator sums it over the broadcast dimensions."""
    return _prelu_backward_x(grad, x, weight), _prelu_backward_weight(grad, x)


@lower_pointwise(aten.hardtanh, operands=1, exact=EVERYWHERE, strides="preserved")
def hardtanh(x: Expr, min_val: float = -1, max_val: float = 1) -> Expr:
    if x.dtype is torch.uint8:  # uint8 has no negative bounds: older torch releases raise, newer ones clamp at zero
        min_val, max_val = max(min_val, 0), max(max_val, 0)
    return clamp(x, min_val, max_val)


@lower_pointwise(aten.hardtanh_backward, operands=2, exact=ON_CUDA)
def hardtanh_backward(grad: Expr, x: Expr, min_val: float, max_val: float) -> Expr:
    return where((x <= min_val) | (x >= max_val), 0, grad)


_sixth = by_kernels(lambda x: x / 6, cuda=lambda x: x * const(1 / 6, x.dtype))


@lower_pointwise(aten.hardsigmoid, exact=WIDE)
def hardsigmoid(x: Expr) -> Expr:
    return _sixth(clamp(x + 3, 0, 6))


@lower_pointwise(aten.hardsigmoid_backward, exact=WIDE)
def hardsigmoid_backward(grad: Expr, x: Expr) -> Expr:
    # Eager multiplies by a sixth in single precision, whatever the dtype.
    sixth = cast(const(1 / 6, torch.float32), x.dtype)
    return where((x > -3) & (x < 3), grad * sixth if is_exact() else grad / 6, 0)


@lower_pointwise(aten.hardswish, exact=WIDE, group="light activations")
def hardswish(x: Expr) -> Expr:
    return _sixth(x * clamp(x + 3, 0, 6))


@lower_pointwise(aten.hardswish_backward, exact=ON_CUDA, group="light activations")
def hardswish_backward(grad: Expr, x: Expr) -> Expr:
    return where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))


_nothing = by_kernels(lambda x: x * 0, cuda=lambda x: where(isnan(x), x, 0))


@lower_pointwise(aten.softshrink, operands=1, exact=ON_CUDA)
def softshrink(x: Expr, lambd: float = 0.5) -> Expr:
    """NaN falls into the middle case, and stays."""
    width = stored(lambd, x)
    return where(x > width, x - width, where(x < -width, x + width, _nothing(x)))


@lower_pointwise(aten.hardshrink, operands=1, exact=EVERYWHERE)
def hardshrink(x: Expr, lambd: float = 0.5) -> Expr:
    width = stored_anywhere(lambd, x)
    return where((x >= -width) & (x <= width), 0, x)


def _shrink_backward(grad: torch.Tensor, x: torch.Tensor, lambd: float) -> Any:
    """Keep the operator whole for symbolic sizes, for which torch cannot compute its metadata."""
    if all(isinstance(n, int) for n in x.shape):
        return NotImplemented  # then the operator stays whole
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


describe(aten.hardshrink_backward.default, aten.softshrink_backward.default, decomposed=_shrink_backward)
describe(aten.mish_backward.default, instead=aten.mish_backward.default)
describe(aten.silu_backward.default, instead=aten.silu_backward.default)


@lower_pointwise(aten.softshrink_backward, aten.hardshrink_backward, operands=2, exact=ON_CUDA)
def shrink_backward(grad: Expr, x: Expr, lambd: float) -> Expr:
    width = stored(lambd, x)
    return where((x >= -width) & (x <= width), 0, grad)


# ---- exponential units ---------------------------------------------------------------------------------


@lower_pointwise(aten.elu, operands=1, exact=ON_CUDA, group="activations")
def elu(x: Expr, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expr:
    return where(x > 0, x * scale, expm1(x * input_scale) * (const(alpha, x.dtype) * scale))


@lower(aten.elu_backward, exact=ON_CUDA, group="activations")
def elu_backward(grad: Value, alpha: float, scale: float, input_scale: float, is_result: bool,
                 x: Value) -> Value:
    def formula(grad: Expr, x: Expr) -> Expr:
        most, start = const(alpha, x.dtype) * scale, grad * input_scale
        slope = start * (x + most) if is_result else start * most * exp(x * input_scale)
        return where(x <= 0, slope, grad * scale)  # written so that NaN has the slope of positive arguments

    return pointwise(formula)(grad, x)


lower(aten.celu, operands=1, exact=ON_CUDA)(lambda x, alpha=1.0: elu(x, alpha, 1, 1 / alpha))


@lower_pointwise(aten.softplus, operands=1, exact=ON_CUDA, group="activations")
def softplus(x: Expr, beta: float = 1, threshold: float = 20) -> Expr:
    return where(x * beta > threshold, x, log1p(exp(x * beta)) / beta)


@lower_pointwise(aten.softplus_backward, operands=2, exact=ON_CUDA, group="activations")
def softplus_backward(grad: Expr, x: Expr, beta: float, threshold: float) -> Expr:
    if is_exact():
        z = exp(x * beta)
        return where(x * beta > threshold, grad, grad * z / (z + 1))
    return where(x * beta > threshold, grad, grad * sigmoid(x * beta))


# ---- sigmoid and its kin -------------------------------------------------------------------------------


@lower_pointwise(aten.sigmoid_backward, exact=WIDE)
def sigmoid_backward(grad: Expr, y: Expr) -> Expr:
    return step(grad * step(1 - y)) * y


@lower_pointwise(aten.tanh_backward, exact=WIDE)
def tanh_backward(grad: Expr, y: Expr) -> Expr:
    return grad * mad_by_steps(-y, y, 1)


def _exp_of_minus_abs(x: Expr) -> Expr:
    """exp(-|x|), in (0, 1]: never overflows."""
    return exp(-abs_(x))


@pointwise
def _log_sigmoid(x: Expr) -> Expr:
    return minimum(x, 0) - log1p(_exp_of_minus_abs(x))


@lower(aten.log_sigmoid_forward, exact=ON_CUDA, strides="contiguous")
def log_sigmoid(x: Value) -> tuple[Value, Value]:
    """Also exp(-|x|) for the gradient, which ATen does not save for tensors on NVIDIA GPUs."""
    if build.graph().device != "cuda":
        return _log_sigmoid(x), pointwise(_exp_of_minus_abs)(x)
    return _log_sigmoid(x), build.pointwise((0,), lambda i: const(0, x.dtype))


@pointwise(operands=3)
def _log_sigmoid_backward(grad: Expr, x: Expr, small: Expr | None) -> Expr:
    small = _exp_of_minus_abs(x) if small is None else small
    if is_exact():
        rest = small / (1 + small)
        return grad * where(x < 0, 1 - rest, rest)
    return grad * where(x < 0, const(1, x.dtype), small) / (1 + small)


@lower(aten.log_sigmoid_backward, exact=ON_CUDA)
def log_sigmoid_backward(grad: Value, x: Value, buffer: Value) -> Value:
    """grad * sigmoid(-x), from exp(-|x|)."""
    return _log_sigmoid_backward(grad, x, None if build.graph().device == "cuda" else buffer)


@lower_pointwise(aten.logit, operands=1, kind="float", exact=ON_CUDA)
def logit(x: Expr, eps: float | None = None) -> Expr:
    if eps is None:
        return log(x / (1 - x))
    high = 1 - const(eps, x.dtype)
    p = where(x < eps, eps, where(x > high, high, x))
    return log(p / (1 - p))


@lower_pointwise(aten.logit_backward, operands=2, exact=ON_CUDA)
def logit_backward(grad: Expr, x: Expr, eps: float | None = None) -> Expr:
    """Outside of the interval the slope is zero, or NaN if there is no eps."""
    low, outside = (0.0, math.nan) if eps is None else (eps, 0.0)
    return where((x < low) | (x > 1 - const(low, x.dtype)), outside, grad / (x * (1 - x)))


@lower_pointwise(aten.silu, exact=ON_CUDA, group="activations")
def silu(x: Expr) -> Expr:
    return x / (1 + exp(-x)) if is_exact() else x * sigmoid(x)


@lower_pointwise(aten.silu_backward, exact=ON_CUDA, group="activations")
def silu_backward(grad: Expr, x: Expr) -> Expr:
    y = sigmoid(x)
    return grad * y * mad(x, 1 - y, 1)


def _mish_ratio(x: Expr) -> Expr:
    """n with tanh(log(1 + e^x)) = n / (n + 2): no cancellation, and beyond 20 the quotient is one anyway."""
    e = exp(minimum(x, 20))
    return e * (e + 2)


@lower_pointwise(aten.mish, exact=ON_CUDA, group="activations")
def mish(x: Expr) -> Expr:
    """x * tanh(softplus(x))"""
    if is_exact():
        return x * tanh(log1p(exp(x)))
    n = _mish_ratio(x)
    return x * (n / (n + 2))


@lower_pointwise(aten.mish_backward, exact=ON_CUDA, group="activations")
def mish_backward(grad: Expr, x: Expr) -> Expr:
    if is_exact():
        y = tanh(log1p(exp(x)))
        return grad * mad(x * sigmoid(x), mad(-y, y, 1), y)
    n = _mish_ratio(x)
    y, slope = n / (n + 2), 4 * (n + 1) / ((n + 2) * (n + 2))
    return grad * (y + x * sigmoid(x) * slope)


def _halves(x: Value, dim: int) -> tuple[tuple[Index, ...], Any, Any]:
    """The shape of half of x along dim, and functions that read the first and the second half."""
    dim = wrap_dim(dim, x.rank)
    size = x.shape[dim] // 2
    shape = tuple(size if k == dim else n for k, n in enumerate(x.shape))
    compute = opmath(x.dtype)

    def half(shift: Index | int) -> Any:
        return lambda i: cast(x.load([n + shift if k == dim else n for k, n in enumerate(i)]), compute)

    return shape, half(0), half(size)


@lower(aten.glu, exact=ON_CUDA)
def glu(x: Value, dim: int = -1) -> Value:
    shape, first, second = _halves(x, dim)
    return build.pointwise(shape, lambda i: first(i) * sigmoid(second(i)), x.dtype)


@lower(aten.glu_backward, exact=ON_CUDA)
def glu_backward(grad: Value, x: Value, dim: int) -> Value:
    """The first half is scaled by the gate, the second by the gate's slope."""
    dim = wrap_dim(dim, x.rank)
    shape, first, second = _halves(x, dim)
    size = shape[dim]

    def body(i: tuple[Index, ...]) -> Expr:
        j = tuple(n % size if k == dim else n for k, n in enumerate(i))
        gate, g = sigmoid(second(j)), cast(grad.load(j), opmath(grad.dtype))
        slope = (1 - gate) * gate * g * first(j) if is_exact() else g * first(j) * gate * (1 - gate)
        return where(index_value(i[dim]) < index_value(size), g * gate, slope)

    return build.pointwise(x.shape, body, x.dtype)


# ---- gelu ----------------------------------------------------------------------------------------------

_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_argument(x: Expr) -> Expr:
    return _TANH_SCALE * mad(const(_TANH_CUBIC, x.dtype), x * x * x, x)


@lower_pointwise(aten.gelu, exact=ON_CUDA, group="activations")
def gelu(x: Expr, *, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        return 0.5 * x * (1 + tanh(_tanh_argument(x)))
    return x * 0.5 * (1 + erf(x * _SQRT_HALF))


@lower_pointwise(aten.gelu_backward, exact=ON_CUDA, group="activations")
def gelu_backward(grad: Expr, x: Expr, *, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        y = tanh(_tanh_argument(x))
        slope = _TANH_SCALE * mad(3 * const(_TANH_CUBIC, x.dtype), x * x, 1)
        return grad * (0.5 * (1 + y) + 0.5 * x * mad(-y, y, 1) * slope)
    density = exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return grad * (0.5 * (1 + erf(x * _SQRT_HALF)) + x * density)
