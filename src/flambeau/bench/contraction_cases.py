"""Contractions to measure: random matrix products, fused operators, FP8, attention with masks, experts.

Shapes are drawn from a seed; `scale` divides them, for machines on which only the results matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.bench.attention_cases import attentions

Make = Callable[..., Tensor]
HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]  # of its arguments, which are bfloat16 unless `made` says otherwise
    operations: float
    gradient: bool = False
    dynamic: bool = False
    aligned: bool = True
    made: Callable[[str], list[Tensor]] | None = None
    peers: tuple[str, ...] = ()  # the only backends that support it, if not all do
    leaves: int = 64  # only so many of the first arguments have gradients
    flex: Callable[..., Callable[..., Any]] | None = None  # of a device: the same as a call of flex_attention

    def tensors(self, device: str) -> list[Tensor]:
        torch.manual_seed(0)
        given = self.made(device) if self.made else [
            torch.randn(s, device=device).to(HALF) * (s[-1] ** -0.25) for s in self.shapes]
        return [t.requires_grad_(self.gradient and t.dtype is HALF and t.dim() > 1 and k < self.leaves)
                for k, t in enumerate(given)]


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def swiglu(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.silu(x @ a.t()) * (x @ b.t())


def quantised(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b).relu()
    return y.to(FP8), y.abs().amax()


def dropped(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + F.dropout(F.linear(x, w, b), 0.1)


# Name: the function, and the number of matrices of the result's shape that it takes after x, w and b.
TAILS: dict[str, tuple[Callable[..., Any], int]] = {
    "bias + tanh": (lambda x, w, b: torch.tanh(F.linear(x, w, b)), 0),
    "bias + sigmoid": (lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), 0),
    "bias + exp": (lambda x, w, b: torch.exp(F.linear(x, w, b)), 0),
    "bias + gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), 0),
    "bias + gelu tanh": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), 0),
    "residual": (lambda x, w, b, r: r + F.linear(x, w, b), 1),
    "residual + dropout": (dropped, 1),
    "cast to FP8 with amax": (quantised, 0),
}


def products(draw: random.Random, count: int, scale: int) -> Iterator[Case]:
    """Yields square, tall and skinny products; one in six with odd sizes."""
    for k in range(count):
        m, n, depth = (2 ** draw.uniform(6, 13), 2 ** draw.uniform(6, 13), 2 ** draw.uniform(6, 14))
        if k % 3 == 1:
            m = 2 ** draw.uniform(4, 7)
        unit = 1 if k % 6 == 5 else 8
        sizes = [max(unit, round(s / scale / unit) * unit) for s in (m, n, depth)]
        m, n, depth = sizes
        yield Case(f"{m} x {n} x {depth}", "products", product, ((m, depth), (n, depth)), 2.0 * m * n * depth,
                   aligned=unit == 8)


def tails(draw: random.Random, count: int, scale: int) -> Iterator[Case]:
    """Yields every tail with one large shape, and others with drawn ones, in turns."""
    names = [*TAILS, "SwiGLU"]
    large = [(8192, 4096, 8192)] * len(names)
    drawn = [(round(2 ** draw.uniform(9, 14) / 64) * 64, round(2 ** draw.uniform(9, 13) / 64) * 64,
              round(2 ** draw.uniform(9, 13) / 64) * 64) for _ in range(count)]
    numbered = [*enumerate(large + drawn)]
    turns = zip_longest(numbered[:len(large)], numbered[len(large):])
    for k, shape in (at for turn in turns for at in turn if at is not None):
        m, n, depth = (max(16, s // scale) for s in shape)
        name = names[k % len(names)]
        two = name == "SwiGLU"
        function, matrices = (swiglu, 0) if two else TAILS[name]
        given = ((m, depth), (n, depth), (n, depth) if two else (n,), *((m, n) for _ in range(matrices)))
        yield Case(f"{name}, {m} x {n} x {depth}{', dynamic' if k % 4 == 3 else ''}", "tails", function, given,
                   2.0 * m * n * depth * (2 if two else 1), dynamic=k % 4 == 3)


# ---- FP8 and experts -------------------------------------------------------------------------------------------

BLOCK = 128  # elements that share a scale
GROUPED = "experts"


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, fast: bool = False
           ) -> Tensor:
    return torch.ops.aten._scaled_mm(a, b.t(), scale_a, scale_b, bias, None, HALF, fast)


def fp8_products(scale: int) -> Iterator[Case]:
    """Yields one product for each way to scale its factors and to sum it."""
    m, n, depth = (max(BLOCK, size // scale // BLOCK * BLOCK) for size in (8192, 4096, 8192))

    def made(kind: str, device: str) -> list[Tensor]:
        factors = [torch.randn(size, depth, device=device).to(FP8) for size in (m, n)]
        if kind == "block scales":  # for a in columns, one for each row and 128 elements; for b for each square
            of_a = torch.rand(depth // BLOCK, m, device=device).t()
            return [*factors, of_a, torch.rand(n // BLOCK, depth // BLOCK, device=device).t()]
        shapes = ((), ()) if kind == "per tensor" else ((m, 1), (1, n))
        return [*factors, *(torch.rand(s, device=device) + 0.5 for s in shapes), torch.randn(n, device=device).to(HALF)]

    for kind in ("per tensor", "per row", "block scales"):
        for fast in (True, False):
            yield Case(f"{kind}, {'fast' if fast else 'precise'}, {m} x {n} x {depth}", "FP8",
                       partial(scaled, fast=fast), (), 2.0 * m * n * depth, made=partial(made, kind),
                       peers=("eager", "inductor", "flambeau"))


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.aten._grouped_mm(x, w, ends)


def experts(draw: random.Random, scale: int) -> Iterator[Case]:
    """Yields products with rows assigned to experts at random, and one plain product of as many rows."""
    rows, depth, columns = (max(64, size // scale) for size in (16384, 4096, 4096))
    work = 2.0 * rows * depth * columns
    yield Case(f"one, {rows} x {columns} x {depth}", GROUPED, product, ((rows, depth), (columns, depth)), work)
    for count in (8, 64):
        ends = [*sorted(draw.randrange(rows + 1) for _ in range(count - 1)), rows]

        def made(device: str, count: int = count, ends: list[int] = ends) -> list[Tensor]:
            return [torch.randn(rows, depth, device=device).to(HALF) * depth ** -0.25,
                    torch.randn(count, depth, columns, device=device).to(HALF) * depth ** -0.25,
                    torch.tensor(ends, dtype=torch.int32, device=device)]

        yield Case(f"{count}, {rows} x {columns} x {depth}", GROUPED, grouped, (), work, made=made,
                   peers=("eager", "inductor", "flambeau", "own"))


def cases(seed: int, scale: int = 1, count: int = 60, tailed: int = 20) -> list[Case]:
    draw = random.Random(seed)
    return [*products(draw, count, scale), *tails(draw, tailed, scale), *fp8_products(scale), *experts(draw, scale),
            *attentions(Case, scale)]
