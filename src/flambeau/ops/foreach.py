"""Operators on lists of tensors: the operator on one tensor, applied to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import is_float
from flambeau.ir.index import offset_of, product
from flambeau.ir.nodes import Value
from flambeau.ops.arithmetic import div, general_power, pow, quotient
from flambeau.ops.registry import LOWERINGS, lower, overloads
from flambeau.torch_compat.ops import OpOverload

aten = torch.ops.aten

_UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor",
    "frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid",
    "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "zero",
)


def power(base: Any, exponent: Any) -> Any:
    """The power operator for lists. There are no special cases for simple exponents in eager's GPU kernel, nor for
    exponents in tensors."""
    floats = isinstance(base, Value) and is_float(base.dtype)
    tensors = isinstance(exponent, Value) and not exponent.number
    return (general_power if tensors or build.policy().kernels == "cuda" and floats else pow)(base, exponent)


_OTHERS = {
    "add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": quotient,
    "pow": power, "maximum": aten.maximum.default, "minimum": aten.minimum.default,
    "clamp_min": aten.clamp_min.Tensor, "clamp_max": aten.clamp_max.Tensor, "lerp": aten.lerp.Tensor,
    "addcmul": aten.addcmul.default, "addcdiv": aten.addcdiv.default,
    "copy": aten.copy.default, "mm": aten.mm.default,
    "norm": aten.linalg_vector_norm.default, "max": aten.max.default,
}
# For each operator on lists the operator on one tensor, or a lowering if eager's kernels for lists differ. When
# dividing by a single number, eager divides a list as it divides a tensor.
_ONE: dict[str, Any] = {**{name: getattr(aten, name).default for name in _UNARY}, **_OTHERS}
# On GPUs eager has one kernel for a whole list, with other formulas than for one tensor; but not for every list.
_OF_ONE_KERNEL = (aten._foreach_div.ScalarList, aten._foreach_pow.Scalar, aten._foreach_pow.ScalarList)
_OF_OVERLOADS = dict.fromkeys((aten._foreach_div.Scalar, aten._foreach_div.Tensor), div)


def along_lists(overload: OpOverload, one: Any) -> Callable[..., Any]:
    """Apply the operator to each tensor: list arguments are split with the tensors, others are passed to each call."""
    names = [a.name for a in overload._schema.arguments]
    by_name = {a.name for a in overload._schema.arguments if a.kwarg_only or a.name == "dtype"}

    def lowered(*args: Any, **kwargs: Any) -> Any:
        lowering = LOWERINGS.get(one) if isinstance(one, OpOverload) else one
        if lowering is None:
            return NotImplemented
        given = dict(zip(names, args, strict=False)) | kwargs
        if overload in _OF_ONE_KERNEL and build.policy().kernels == "cuda" and not in_one_kernel(args[0]):
            return NotImplemented

        def call(k: int) -> Any:
            mine = {name: _element(value, k, name) for name, value in given.items()}
            return lowering(*(v for name, v in mine.items() if name not in by_name),
                            **{name: v for name, v in mine.items() if name in by_name})

        made = [call(k) for k in range(max(len(v) for v in given.values() if isinstance(v, (list, tuple))))]
        return NotImplemented if any(m is NotImplemented for m in made) else made

    return lowered


def in_one_kernel(tensors: Sequence[Value]) -> bool:
    """Whether the list is taken by eager's single kernel: floats of one dtype without gaps."""
    buffers = [build.graph().buffers[t.buffer] for t in tensors]
    return len({t.dtype for t in tensors}) == 1 and is_float(tensors[0].dtype) and all(
        t.is_whole(b) and (b.strides is None or offset_of((n - 1 for n in b.shape), b.strides) + 1 is product(b.shape))
        for t, b in zip(tensors, buffers, strict=True))


def _element(value: Any, k: int, name: str) -> Any:
    if isinstance(value, (list, tuple)):
        return value[k]
    if isinstance(value, Value) and name == "scalars":  # a tensor with one number for each
        return value.view((), lambda i: (k,))
    return value


for _name, _one in _ONE.items():
    if (_packet := getattr(aten, f"_foreach_{_name}", None)) is not None:  # some releases lack some operators
        for _overload in overloads(_packet):
            lower(_overload)(along_lists(_overload, _OF_OVERLOADS.get(_overload, _one)))
