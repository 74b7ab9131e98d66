"""Dtypes that eager's kernels on CPUs do not take, of operators whose lowerings would: eager raises, and so do we.

Such a call is left to ATen, whose error names the kernel and the dtype. Only integers and bools: what a kernel computes
in half precision is no less right for eager's lack of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flambeau.ir.dtypes import FLOATS, SUPPORTED, DType

BOOL = frozenset((torch.bool,))
INTEGRAL = SUPPORTED - frozenset(FLOATS)
NO_BYTES = INTEGRAL - {torch.uint8}  # images of bytes are taken
NO_LONGS = INTEGRAL - {torch.int64}

REFUSED: dict[str, frozenset[DType]] = {
    **dict.fromkeys((
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_log_softmax", "_prelu_kernel", "_softmax",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "binary_cross_entropy", "celu", "frac", "gelu", "glu",
        "grid_sampler_2d", "grid_sampler_3d", "hardshrink", "hardsigmoid", "hardswish", "huber_loss", "hypot",
        "igamma", "igammac", "im2col", "lerp", "log_sigmoid_forward", "logaddexp", "logaddexp2", "logcumsumexp",
        "max_unpool2d", "max_unpool3d", "mish", "multi_margin_loss", "nextafter", "nll_loss_forward", "silu",
        "smooth_l1_loss", "softplus", "std", "std_mean", "upsample_linear1d", "upsample_trilinear3d", "var",
        "var_mean"), INTEGRAL),
    **dict.fromkeys((
        "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
        "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest1d", "upsample_nearest2d",
        "upsample_nearest3d"), NO_BYTES),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), NO_LONGS),
    **dict.fromkeys((
        "abs", "addcdiv", "addcmul", "argmax", "argmin", "ceil", "clamp", "floor", "fmod",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "pow", "reflection_pad1d", "reflection_pad2d",
        "reflection_pad3d", "relu", "remainder", "round", "threshold", "trunc"), BOOL),
}
# Their tensors must have one dtype.
ALIKE = ("binary_cross_entropy",)


def is_refused(op: Any, dtypes: Sequence[DType]) -> bool:
    """Whether eager on a CPU has no kernel of the operator for tensors of these dtypes."""
    name = op._schema.name.removeprefix("aten::")
    kinds = REFUSED.get(name)
    return kinds is not None and bool(dtypes) and all(d in kinds for d in dtypes) or (
        name in ALIKE and len(set(dtypes)) > 1)
