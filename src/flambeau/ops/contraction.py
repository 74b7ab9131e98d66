"""Contractions: operators that are a library call, or later a template, through the Contract node."""

from __future__ import annotations

import torch

aten = torch.ops.aten

CONTRACTIONS: frozenset[torch._ops.OpOverload] = frozenset((
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.convolution_backward.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
))
