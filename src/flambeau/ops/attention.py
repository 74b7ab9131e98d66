"""Attention where a machine has no library for it: two products with a softmax between them, five for the gradient.

Scale and mask are part of the first product's kernel, and the division by a row's sum is part of the second's. ATen
calls these operators on CPUs; on other devices it takes attention apart into products and a softmax itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import DType, is_bool, opmath
from flambeau.ir.expr import Expr, cast, const, index_value, where
from flambeau.ir.index import Index
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import eq, exp, log, sqrt
from flambeau.ops.reduction import accumulate
from flambeau.ops.registry import load_at, lower
from flambeau.torch_compat import TORCH

aten = torch.ops.aten

Where = tuple[Index, ...]


# Before 2.13 torch's metadata calls the logarithms float32, which float64's are not.
_ODD: set[DType] = {torch.float64} if TORCH < (2, 13) else set()


def is_ours(q: Value, k: Value, v: Value, dropout: Any, scale: Any) -> bool:
    return (build.graph().capabilities.contracts and q.dtype not in _ODD and dropout == 0
            and isinstance(scale, (int, float, type(None))) and q.rank == k.rank == v.rank == 4
            and q.shape[1] is k.shape[1] is v.shape[1])


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
    if not is_ours(q, k, v, dropout_p, scale):
        return NotImplemented
    s = scores(q, k, is_causal, attn_mask, scale)
    wide, axes = s.dtype, [s.rank - 1]
    largest = accumulate("max", s.shape, axes, wide, s.load)

    def body(i: Where) -> Expr:
        m = largest.load(i[:-1])
        return where(eq(m, -math.inf), const(0, wide), exp(s.load(i) - m))

    e = build.pointwise(s.shape, body)
    sums = accumulate("sum", s.shape, axes, wide, e.load)
    total = product(e, v)

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
    if not is_ours(q, k, v, dropout_p, scale):
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
