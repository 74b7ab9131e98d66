"""Attention as torch calls it: whole for the libraries that have a kernel for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flambeau.ops.facts import describe
from flambeau.torch_compat.dispatch import composite

aten = torch.ops.aten

# ---- as a library's call -----------------------------------------------------------------------------------

Tensor = torch.Tensor
FUSED_ON = ("cuda",)  # where libraries have such kernels, and torch takes apart what they do not take
LINE = 16  # bytes of which a head is a multiple
take_apart = composite(aten.scaled_dot_product_attention.default)  # or not: by torch's own choice


def whole_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Torch's operator while a graph is traced. All kernels want contiguous heads and rows of the mask; those that take
    a mask want heads of whole lines too, and most of them as many for keys as for queries."""
    given = q, k, v, attn_mask
    if q.device.type not in FUSED_ON or {q.dim(), k.dim(), v.dim()} != {4}:
        return take_apart(*given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    q, k, v, mask = in_lines(q), in_lines(k), in_lines(v), None if attn_mask is None else in_lines(attn_mask)
    if is_taken(q, k, v, mask, dropout_p, is_causal, enable_gqa):
        out = take_apart(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        same = all(x is y for x, y in zip(given, (q, k, v, mask), strict=True))
        return out if same else out.contiguous()  # as it is where torch takes it apart
    factor, size = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]
    q, k, v = (F.pad(x, (0, -x.shape[-1] % (LINE // x.itemsize)))
               for x in (q, for_each_head(k, q, enable_gqa), for_each_head(v, q, enable_gqa)))
    if is_taken(q, k, v, mask, dropout_p, is_causal, False):
        return take_apart(q, k, v, mask, dropout_p, is_causal, scale=factor)[..., :size].contiguous()
    return take_apart(*given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def is_taken(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, grouped: bool) -> bool:
    """Whether any kernel takes this call. Torch's operator that says which it would be cannot be asked: on tensors
    without data it sees those of no device."""
    kernels, call = torch.backends.cuda, torch.backends.cuda.SDPAParams(q, k, v, mask, dropout, causal, grouped)
    return (kernels.can_use_flash_attention(call) or kernels.can_use_cudnn_attention(call)
            or kernels.can_use_efficient_attention(call))


def in_lines(x: Tensor) -> Tensor:
    """With a contiguous last dimension. What is the same all along another one stays so."""
    if x.stride(-1) == 1:
        return x
    first = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride()[:-1])]
    return first.clone(memory_format=torch.contiguous_format).expand(x.shape)


def for_each_head(x: Tensor, q: Tensor, grouped: bool) -> Tensor:
    """Keys or values, as many as queries where torch allows for fewer."""
    times, rest = divmod(q.shape[1], x.shape[1])
    return x if times == 1 or rest or not (grouped or x.shape[1] == 1) else x.repeat_interleave(times, 1)


describe(aten.scaled_dot_product_attention.default, traced=whole_attention, traced_exactly=take_apart)


