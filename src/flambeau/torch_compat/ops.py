"""The classes of torch's operators, and functions of operators without a public name."""

from __future__ import annotations

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket", "allow_numbers_as_tensors", "conj", "foreach_add",
           "foreach_div", "foreach_lerp_", "foreach_mul", "foreach_mul_", "foreach_pow", "is_composite", "neg_view"]

# Lazy conjugate and negative views: `torch.conj` returns real tensors unchanged, and the public negative computes.
conj = torch._conj
neg_view = torch._neg_view

# Operators over lists, which optimizers use, by the names that Dynamo knows.
foreach_add = torch._foreach_add
foreach_div = torch._foreach_div
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_pow = torch._foreach_pow

# A context in which calls accept Python numbers where the schema says Tensor, as torch's own functions do.
allow_numbers_as_tensors = torch._C._should_allow_numbers_as_tensors


def is_composite(op: OpOverload) -> bool:
    """Whether autograd sees the operators that this one calls, rather than the operator itself."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
