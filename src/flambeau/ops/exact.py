"""Which lowerings give the very bits of eager's kernels. In exact numerics the others are calls of those kernels.

A lowering is exact where nothing is rounded (values are moved, compared or chosen), or where its formula is that of
eager's kernel, rounding by rounding. What a formula's functions (exp, tanh) are worth is the machine's to say:
`Capabilities.inexact`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from flambeau.ir.dtypes import DType
from flambeau.ops.registry import FAMILIES
from flambeau.torch_compat.ops import OpOverload

# Families in which nothing is rounded, but for the operators that add up or compute.
MOVES = frozenset(("bitwise", "cast", "comparison", "factory", "indexing", "scattering", "shape", "sorting",
                   "view"))
SUMS = frozenset((
    "_index_put_impl", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "bartlett_window", "blackman_window",
    "col2im", "hamming_window", "hann_window", "index_add", "index_put", "index_reduce", "kaiser_window", "linspace",
    "logspace", "put", "range", "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward", "scatter_add",
    "scatter_reduce", "unfold_backward",
))
# Among equal elements, eager's kernel finds the one that its own algorithm comes to.
TIED = frozenset(("kthvalue", "median", "mode", "nanmedian", "sort.default", "topk"))
# Of the other families, the operators that choose one of their values.
CHOICES = frozenset((
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "all", "any", "argmax", "argmin", "cummax", "cummin", "embedding",
    "fractional_max_pool2d", "fractional_max_pool3d", "max", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "max_unpool2d", "max_unpool3d", "min", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
))
# And those whose formula is eager's on every device: at most one rounding, or several in a plain order.
PLAIN = frozenset((
    "_conj_physical", "_prelu_kernel", "_prelu_kernel_backward", "abs", "add", "angle", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "copy", "copysign", "deg2rad", "div", "floor", "fmod", "frac", "hardshrink", "hardtanh",
    "heaviside", "leaky_relu", "leaky_relu_backward", "mul", "neg", "pow", "rad2deg", "reciprocal",
    "relu", "remainder", "round", "rsub", "sgn", "sign", "signbit", "sqrt", "sub", "threshold",
    "threshold_backward", "trunc", "zero",
))
# On a CPU, eager computes small floats in float32 up to the end within its vectors, and step by step in what is left
# over after them: formulas of several steps are those of float32 and float64. So is the sign of zeros that are bounds.
CPU_WIDE = frozenset((
    "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "hardsigmoid", "hardsigmoid_backward", "hardswish", "lerp",
    "native_dropout_backward", "pow", "sigmoid_backward", "tanh_backward",
))
FORMULAS = {
    # Of what is missing here, some differ in eager itself between its vectors and what is left over: whether NaN has a
    # slope, and whether a number shrinks to minus zero.
    "cpu": PLAIN | CPU_WIDE,
    "cuda": PLAIN | frozenset((
        "acos", "acosh", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh", "celu", "cos", "cosh", "elu",
        "elu_backward", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fmax", "fmin", "gelu", "gelu_backward", "glu",
        "glu_backward", "hardshrink_backward", "hardsigmoid", "hardsigmoid_backward", "hardswish", "hardswish_backward",
        "hardtanh_backward", "hypot", "lerp", "lgamma", "log", "log10", "log1p", "log2", "log_sigmoid_backward",
        "log_sigmoid_forward", "logaddexp", "logaddexp2", "logit", "logit_backward", "maximum", "minimum", "mish",
        "mish_backward", "native_dropout_backward", "rsqrt", "sigmoid", "sigmoid_backward", "silu", "silu_backward",
        "sin", "sinc", "sinh", "softplus", "softplus_backward", "softshrink", "softshrink_backward", "tan",
        "tanh", "tanh_backward",
    )),
}
# By the dtypes of what is read and made, what is a call where it otherwise is not. The machine takes the sign from a
# NaN in float16 when it widens it; some versions of eager's kernels widen before they look at the sign, others do not.
CALLS = {
    "cpu": {torch.float16: CPU_WIDE, torch.bfloat16: CPU_WIDE},
    "cuda": {torch.float16: frozenset(("copysign", "signbit"))},
}
# Which of 0.0 and -0.0 is chosen depends, in eager's kernels for a CPU, on whether they are within a vector or left
# over; in its reductions without an index, on the order in which they compare.
TIES = {
    "cpu": ("clamp.Tensor", "clamp_max.Tensor", "clamp_min.Tensor", "max.default", "min.default"),
    "cuda": ("max.default", "min.default"),
}
FOREACH = "_foreach_"


def is_exact(op: OpOverload, device: str, dtypes: Collection[DType] = ()) -> bool:
    """Whether what the lowering computes has the bits of eager's kernel there, its functions apart, in these dtypes."""
    namespace, _, name = op._schema.name.partition("::")
    if name.startswith(FOREACH):
        name = name.removeprefix(FOREACH)
    elif FAMILIES[op] in MOVES:
        tied = not TIED.isdisjoint((name, f"{name}.{op._overloadname}"))
        return name not in SUMS and not tied and "reduce" not in op._overloadname
    called = any(name in CALLS[device].get(d, ()) for d in dtypes)
    if called or f"{name}.{op._overloadname or 'default'}" in TIES[device]:
        return False
    return namespace == "aten" and (name in CHOICES or name in FORMULAS[device])
