"""Attention to measure: plain, causal, and with masks, as `scaled_dot_product_attention` and as `flex_attention`.

For the former a mask is a tensor, for the latter a function, with a block mask that is made once, as users make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

HALF = torch.bfloat16
Point = Callable[..., Tensor]  # over batch, head, row and column, or over a score and these


@dataclass(frozen=True)
class Pattern:
    """A mask or a bias: functions of the caller's tensors that return a mask or score function."""

    mask: Callable[..., Point] | None = None
    score: Callable[..., Point] | None = None
    tensors: Callable[[str, int, int, int], tuple[Tensor, ...]] = lambda device, batch, heads, length: ()
    whole: Callable[..., Tensor] | None = None  # for scaled_dot_product_attention: the same as one tensor
    causal: bool = False


def at(device: Any, length: int) -> Tensor:
    return torch.arange(length, device=device)


def lengths(device: str, batch: int, heads: int, length: int) -> tuple[Tensor, ...]:
    return torch.linspace(0.3 * length, length, batch, device=device).int(),


def documents(device: str, batch: int, heads: int, length: int) -> tuple[Tensor, ...]:
    place = at(device, length)
    return place * 7 // length + place * 3 // length,


def biases(device: str, batch: int, heads: int, length: int) -> tuple[Tensor, ...]:
    drawn = torch.Generator(device).manual_seed(0)  # the same for both forms
    return torch.randn(1, heads, length, length, device=device, generator=drawn).to(HALF),


def patterns(length: int) -> dict[str, Pattern]:
    wide = length // 8
    return {
        "plain": Pattern(),
        "causal": Pattern(lambda: lambda b, h, m, n: m >= n, causal=True),
        "padding": Pattern(lambda ends: lambda b, h, m, n: n < ends[b], tensors=lengths, whole=lambda ends: (
            at(ends.device, length)[None] < ends[:, None])[:, None, None]),
        "sliding window": Pattern(lambda: lambda b, h, m, n: (m >= n) & (m - n < wide)),
        "documents": Pattern(lambda which: lambda b, h, m, n: (which[m] == which[n]) & (m >= n), tensors=documents,
                             whole=lambda which: ((which[:, None] == which) & square(which, length))[None, None]),
        "additive bias": Pattern(score=lambda bias: lambda s, b, h, m, n: s + bias[0, h, m, n], tensors=biases,
                                 whole=lambda bias: bias),
    }


def square(like: Tensor, length: int) -> Tensor:
    place = at(like.device, length)
    return place[:, None] >= place


def attend(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=pattern.causal)


def flexible(pattern: Pattern, length: int, device: str, batch: int, heads: int) -> Callable[..., Tensor]:
    """Returns the same attention as a call of flex_attention."""
    tensors = pattern.tensors(device, batch, heads, length)
    score = pattern.score(*tensors) if pattern.score else None
    found = None
    if pattern.mask is not None:
        by_batch = batch if pattern.tensors is lengths else None
        found = create_block_mask(pattern.mask(*tensors), by_batch, None, length, length, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=score, block_mask=found)

    return call


def tensors_of(pattern: Pattern, shape: tuple[int, ...], device: str) -> list[Tensor]:
    batch, heads, length, _ = shape
    made = [torch.randn(shape, device=device).to(HALF) for _ in range(3)]
    if pattern.whole is not None:
        return [*made, pattern.whole(*pattern.tensors(device, batch, heads, length)).detach()]
    if pattern.mask is not None and not pattern.causal:
        place = at(device, length)
        points = pattern.mask()(0, 0, place[:, None], place)
        return [*made, points[None, None]]
    return made


def attentions(case: Callable[..., Any], scale: int, sizes: tuple[int, ...] = (128, 64)) -> Iterator[Any]:
    """Yields the cases. `case`: the benchmark's class. Operations count all scores, or half of them if causal."""
    batch, heads, length = (4, 16, 4096) if scale == 1 else (2, 2, max(128, 4096 // scale))  # a block at least
    for size in sizes if scale == 1 else (16,):
        shape = batch, heads, length, size
        whole = 4.0 * prod(shape) * length * 3.5  # forward and backward
        for name, pattern in patterns(length).items():
            yield case(f"{name}, {batch} x {heads} x {length} x {size}", "attention", partial(attend, pattern), (),
                       whole / (2 if pattern.causal else 1), gradient=True, leaves=3,
                       made=partial(tensors_of, pattern, shape),
                       flex=partial(flexible, pattern, length, batch=batch, heads=heads))
