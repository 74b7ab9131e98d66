"""Attention: a library call if the machine has one; otherwise two matrix products with a softmax between them (five
products for the gradient).

Torch chooses a library's kernel for each call, by switches, sizes and strides, and takes the call apart into products
and a softmax where none takes it. That is slow on GPUs (in float32, with all scores in memory), so arguments that no
kernel would take are copied to be such (`whole_attention`).

In kernels of our own, scale and mask are part of the first product's, and the division by a row's sum is part of the
second's. ATen calls these operators on CPUs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_bool, opmath
from flambeau.ir.expr import Expr, cast, const, index_value, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import eq, exp, log, sqrt
from flambeau.ops.facts import describe
from flambeau.ops.reduction import accumulate
from flambeau.ops.registry import load_at, lower
from flambeau.torch_compat import TORCH
from flambeau.torch_compat.dispatch import composite

aten = torch.ops.aten

Where = tuple[Index, ...]


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


# ---- by kernels of our own ---------------------------------------------------------------------------------

# Before 2.13 torch's metadata calls the logarithms float32, which float64's are not.
_ODD: set[DType] = {torch.float64} if TORCH < (2, 13) else set()


def is_ours(q: Value, k: Value, v: Value, dropout: Any, scale: Any) -> bool:
    return (build.contracts() and q.dtype not in _ODD and dropout == 0
            and isinstance(scale, (int, float, type(None))) and q.rank == k.rank == v.rank == 4)


def heads_of(x: Value, q: Value) -> Value | None:
    """Keys or values with a head for each of the queries', of which several in a row may share one; None if they do
    not go together."""
    n, of = x.shape[1], q.shape[1]
    if n is of:
        return x
    if not (n.is_const and of.is_const and n.const and of.const % n.const == 0):
        return None
    times = of.const // n.const
    return x.view((x.shape[0], of, *x.shape[2:]), lambda i: (i[0], i[1] // times, *i[2:]))


def factor(q: Value, scale: float | None, dtype: DType) -> Expr:
    if scale is not None:
        return const(scale, dtype)
    n = q.shape[-1]
    return const(1 / math.sqrt(n.const), dtype) if n.is_const else 1 / sqrt(index_value(n, dtype))


def product(a: Value, b: Value) -> Value:
    """a @ b over the last two dimensions, in the dtype of sums."""
    return build.contract((*a.shape[:-1], b.shape[-1]), a.shape[-1:], lambda i: a.load((*i[:-2], i[-1])),
                          lambda i: b.load((*i[:-3], i[-1], i[-2])), opmath(a.dtype))


def transposed(v: Value) -> Value:
    return v.view((*v.shape[:-2], v.shape[-1], v.shape[-2]), lambda i: (*i[:-2], i[-1], i[-2]))


def scores(q: Value, k: Value, causal: bool, mask: Value | None, scale: float | None) -> Value:
    """scale * q @ k.T, with the mask; -inf where nothing may be seen."""
    total = product(q, transposed(k))
    wide = total.dtype

    def body(i: Where) -> Expr:
        s = total.load(i) * factor(q, scale, wide)
        hidden = const(-math.inf, wide)
        if mask is not None:
            m = load_at(mask, i)
            s = where(m, s, hidden) if is_bool(mask.dtype) else s + cast(m, wide)
        return where(index_value(i[-1]) <= index_value(i[-2]), s, hidden) if causal else s

    return build.pointwise(total.shape, body)


@lower(aten._scaled_dot_product_flash_attention_for_cpu.default, library=True)
def attention(q: Value, k: Value, v: Value, dropout_p: Any = 0.0, is_causal: bool = False, *,
              attn_mask: Value | None = None, scale: Any = None) -> Any:
    """softmax(scores) @ v, zero where all is hidden, and the logarithms of the rows' sums of exponentials."""
    keys, values = heads_of(k, q), heads_of(v, q)
    if not is_ours(q, k, v, dropout_p, scale) or keys is None or values is None:
        return NotImplemented
    s = scores(q, keys, is_causal, attn_mask, scale)
    wide, axes = s.dtype, [s.rank - 1]
    largest = accumulate("max", s.shape, axes, wide, s.load)

    def body(i: Where) -> Expr:
        m = largest.load(i[:-1])
        return where(eq(m, -math.inf), const(0, wide), exp(s.load(i) - m))

    e = build.pointwise(s.shape, body)
    sums = accumulate("sum", s.shape, axes, wide, e.load)
    total = product(e, values)

    def share(i: Where) -> Expr:
        n = sums.load(i[:-1])
        return total.load(i) / where(eq(n, 0), const(1, wide), n)

    out = build.pointwise(total.shape, share, q.dtype)
    return out, build.pointwise(sums.shape, lambda i: largest.load(i) + log(sums.load(i)))


@lower(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, library=True)
def attention_backward(grad: Value, q: Value, k: Value, v: Value, out: Value, logsumexp: Value, dropout_p: Any,
                       is_causal: bool, *, attn_mask: Value | None = None, scale: Any = None) -> Any:
    """With p the softmax and ds = scale * p * (grad @ v.T - sum(grad * out)):

    dq = ds @ k, dk = ds.T @ q, dv = p.T @ grad"""
    if not is_ours(q, k, v, dropout_p, scale) or not q.shape[1] is k.shape[1] is v.shape[1]:
        return NotImplemented
    s = scores(q, k, is_causal, attn_mask, scale)
    wide = s.dtype

    def softmax(i: Where) -> Expr:
        n = cast(logsumexp.load(i[:-1]), wide)
        return where(eq(n, -math.inf), const(0, wide), exp(s.load(i) - n))

    p = build.pointwise(s.shape, softmax)
    inner = accumulate("sum", grad.shape, [grad.rank - 1], wide,
                       lambda i: cast(grad.load(i), wide) * cast(out.load(i), wide))
    dp = product(grad, transposed(v))
    ds = build.pointwise(s.shape, lambda i: factor(q, scale, wide) * p.load(i) * (dp.load(i) - inner.load(i[:-1])))
    made = product(ds, k), product(transposed(ds), q), product(transposed(p), grad)
    return tuple(build.pointwise(m.shape, m.load, x.dtype) for m, x in zip(made, (q, k, v), strict=True))
