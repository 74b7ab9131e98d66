"""`scaled_dot_product_attention` while a graph is traced: a library's kernel, or one operator of ours.

Torch chooses a library's kernel for each call, by switches, sizes and strides. If no kernel supports the call, torch
decomposes it into matrix products and a softmax, with all scores in memory. Such a call becomes our operator
(`flambeau::attention`) instead. So does a call that a library supports, if the compilation chooses ours
(`choosing`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flambeau.ir import build
from flambeau.ir.expr import const
from flambeau.ir.nodes import Value
from flambeau.ops.attention import LARGEST, attended, attended_backward, call_of
from flambeau.ops.facts import describe
from flambeau.ops.registry import lower
from flambeau.torch_compat.dispatch import AutoDispatchBelowAutograd, composite

aten = torch.ops.aten
FUSED_ON = ("cuda",)  # devices where libraries and we have fused kernels
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
take_apart = composite(aten.scaled_dot_product_attention.default)  # unless torch chooses a library


@dataclass(frozen=True)
class Asked:
    """The arguments of a call that our operator might compute."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    grouped: bool

    @property
    def wants(self) -> tuple[bool, ...]:
        """Which gradients are needed: of queries, keys, values and mask."""
        given = (self.query, self.key, self.value, self.mask)
        return tuple(x is not None and x.requires_grad for x in given)

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(self.wants)


_choose: ContextVar[Callable[[Asked], bool] | None] = ContextVar("flambeau_attention", default=None)


@contextmanager
def choosing(choose: Callable[[Asked], bool]) -> Iterator[None]:
    """While a graph is traced, let `choose` decide between us and a library for calls that both support."""
    token = _choose.set(choose)
    try:
        yield
    finally:
        _choose.reset(token)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """The replacement for torch's operator while a graph is traced."""
    asked = Asked(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    theirs = partial(take_apart, q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if q.device.type not in FUSED_ON or not fits(asked):
        return theirs()
    if not is_taken(asked):
        return own(asked)
    if not is_ours(asked):
        return theirs()
    with torch.no_grad():  # only the strides of its result are used
        laid = theirs().stride()
    return own(asked, sorted(range(4), key=lambda d: -laid[d]))


def is_ours(asked: Asked) -> bool:
    choose = _choose.get()
    return choose is not None and choose(asked)


def fits(a: Asked) -> bool:
    """Whether our operator supports the call. Invalid calls are left to eager, which raises the error."""
    q, k, v, mask = a.query, a.key, a.value, a.mask
    if not (q.dim() == k.dim() == v.dim() and q.dim() in (3, 4)) or {q.dtype, k.dtype, v.dtype} - {q.dtype} \
            or q.dtype not in DTYPES or not 0 <= a.dropout <= 1 or (mask is not None and a.is_causal):
        return False
    heads = q.shape[-3], k.shape[-3], v.shape[-3]
    shared = heads[1] == heads[2] and (heads[0] == heads[1] or a.grouped and heads[1] > 0 and heads[0] % heads[1] == 0)
    alike = q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and k.shape[-2] == v.shape[-2] and q.shape[-1] == k.shape[-1]
    small = 0 < q.shape[-1] <= LARGEST and 0 < v.shape[-1] <= LARGEST
    return shared and alike and small and (mask is None or fits_mask(mask, (*q.shape[:-1], k.shape[-2]), q.dtype))


def fits_mask(mask: Tensor, shape: tuple[Any, ...], dtype: torch.dtype) -> bool:
    known = mask.dtype in (torch.bool, torch.float32, dtype) and 1 < mask.dim() <= len(shape)
    return known and all(n == 1 or n == wanted for n, wanted in zip(reversed(mask.shape), reversed(shape)))


def is_taken(a: Asked) -> bool:
    """Whether any library kernel supports this call. Torch's operator for this question cannot be used: of fake
    tensors, which have no data, it does not see the device."""
    if a.query.dim() != 4:
        return False
    kernels = torch.backends.cuda
    call = kernels.SDPAParams(a.query, a.key, a.value, a.mask, a.dropout, a.is_causal, a.grouped)
    return (kernels.can_use_flash_attention(call) or kernels.can_use_cudnn_attention(call)
            or kernels.can_use_efficient_attention(call))


def own(a: Asked, order: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
    """Call our operator. `order`: the result's dimensions in memory order, outermost first."""
    q, k, v, mask = a.query, a.key, a.value, a.mask
    if q.dim() == 3:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    # Dropout's random numbers depend on a seed in memory, which forward and backward both read.
    seed = torch.randint(0, 2**62, (), device=q.device) if a.dropout else None
    out = _Attention.apply(q, k, v, mask, seed, list(order), float(a.dropout), a.is_causal, a.scale)
    return out if a.query.dim() == 4 else out.squeeze(0)


describe(aten.scaled_dot_product_attention.default, traced=whole_attention, traced_exactly=take_apart)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, order: list[int],
                *how: Any) -> Tensor:
        with AutoDispatchBelowAutograd():
            out, logs = torch.ops.flambeau.attention.default(q, k, v, mask, seed, *how, order)
        ctx.save_for_backward(q, k, v, mask, seed, out, logs)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_mask = ctx.needs_input_grad[3]
        made = torch.ops.flambeau.attention_backward.default(grad, *ctx.saved_tensors, *ctx.how, of_mask)
        return *made[:3], made[3] if of_mask else None, *[None] * 5


# ---- the operator ------------------------------------------------------------------------------------------

HOW = "float dropout, bool is_causal, float? scale"
GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed"
torch.library.define("flambeau::attention", f"({GIVEN}, {HOW}, int[] order) -> (Tensor, Tensor)")
torch.library.define("flambeau::attention_backward", f"(Tensor grad, {GIVEN}, Tensor out, Tensor logs, {HOW}, "
                     "bool of_mask) -> (Tensor, Tensor, Tensor, Tensor)")


@torch.library.register_fake("flambeau::attention")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, dropout: float, is_causal: bool,
      scale: float | None, order: list[int]) -> tuple[Tensor, Tensor]:
    return empty(q, v, order), q.new_empty(q.shape[:3], dtype=wide_of(q))


def empty(q: Tensor, v: Tensor, order: list[int]) -> Tensor:
    """An empty result: contiguous if torch would decompose the call, otherwise with the library's strides."""
    shape = (*q.shape[:3], v.shape[3])
    return q.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])


@torch.library.register_fake("flambeau::attention_backward")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, out: Tensor,
      logs: Tensor, dropout: float, is_causal: bool, scale: float | None, of_mask: bool) -> tuple[Tensor, ...]:
    of = mask.new_empty(mask.shape) if of_mask and mask is not None else q.new_empty(0)
    return *(torch.empty_like(x) for x in (q, k, v)), of


def wide_of(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


@lower(torch.ops.flambeau.attention.default)
def attention(q: Value, k: Value, v: Value, mask: Value | None, seed: Value | None, dropout: float, is_causal: bool,
              scale: float | None, order: list[int]) -> Any:
    return attended(call_of(q, k, v, mask, is_causal, scale, seed, dropout))[:2]


@lower(torch.ops.flambeau.attention_backward.default, computes=4)
def attention_backward(grad: Value, q: Value, k: Value, v: Value, mask: Value | None, seed: Value | None, out: Value,
                       logs: Value, dropout: float, is_causal: bool, scale: float | None, of_mask: bool) -> Any:
    call = call_of(q, k, v, mask, is_causal, scale, seed, dropout, of_mask)
    nothing = [] if of_mask else [build.pointwise((0,), lambda _: const(0, q.dtype))]
    return [*attended_backward(call, grad, out, logs), *nothing]


# ---- with torch's operators, if a graph runs uncompiled: all scores are in memory ----------------------------


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    wide = wide_of(q)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q.to(wide) @ k.to(wide).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones_like(s[0, 0], dtype=torch.bool).tril()
    if mask is None:
        return s
    return s.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else s + mask.to(wide)


def kept_of(s: Tensor, seed: Tensor | None, dropout: float) -> Tensor | float:
    if seed is None:
        return 1.0
    draws = torch.Generator(s.device).manual_seed(int(seed))
    return (torch.rand(s.shape, generator=draws, device=s.device) >= dropout).to(s.dtype) / max(1 - dropout, 1e-30)


@torch.library.impl("flambeau::attention", "CompositeExplicitAutograd")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, dropout: float, is_causal: bool,
      scale: float | None, order: list[int]) -> tuple[Tensor, Tensor]:
    s = scores_of(q, k, mask, is_causal, scale)
    p = aten._safe_softmax.default(s, -1) * kept_of(s, seed, dropout)
    out = p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1).to(s.dtype)
    return empty(q, v, order).copy_(out), torch.logsumexp(s, -1) / math.log(2)


@torch.library.impl("flambeau::attention_backward", "CompositeExplicitAutograd")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, out: Tensor,
      logs: Tensor, dropout: float, is_causal: bool, scale: float | None, of_mask: bool) -> tuple[Tensor, ...]:
    s, times = scores_of(q, k, mask, is_causal, scale), q.shape[1] // k.shape[1]
    kept, g, factor = kept_of(s, seed, dropout), grad.to(s.dtype), q.shape[-1] ** -0.5 if scale is None else scale
    p = torch.exp(s - logs[..., None] * math.log(2)).masked_fill(s == -math.inf, 0)
    dp = g @ v.repeat_interleave(times, 1).to(s.dtype).mT * kept
    ds = p * (dp - (g * out).sum(-1, keepdim=True))
    dq = ds @ k.repeat_interleave(times, 1).to(s.dtype) * factor
    dk, dv = (x.unflatten(1, (k.shape[1], times)).sum(2) for x in (ds.mT @ q.to(s.dtype) * factor, (p * kept).mT @ g))
    of = ds.sum_to_size(mask.shape).to(mask.dtype) if of_mask and mask is not None else q.new_empty(0)
    return *(torch.empty_like(x).copy_(made) for x, made in ((q, dq), (k, dk), (v, dv))), of.contiguous()
