"""Products of scaled small floats, with scales for a tensor, for each row and column, or for blocks of the depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import FP8, DType
from flambeau.ir.expr import Expr, cast
from flambeau.ir.index import ONE, ZERO, Index
from flambeau.ir.nodes import Value
from flambeau.ops.registry import load_at, lower

aten = torch.ops.aten
BLOCK = 128  # elements of the depth per scale, and per partial sum before accumulation in float32
WHOLE, LINES, BY_LINE, BY_SQUARE = 0, 1, 4, 5  # torch's ScalingType: a tensor, rows and columns, 1 x 128, 128 x 128
BLOCKS, KNOWN = {BY_LINE, BY_SQUARE}, {WHOLE, LINES, BY_LINE, BY_SQUARE}
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


Place = Callable[[Index, Index], Sequence[Index]]  # from a line and a depth index to the index of the scale


def place(how: int | None, across: bool) -> Place:
    """The place of a scale. `across`: the scale's second dimension is that of the lines."""

    def at(line: Index, k: Index) -> Sequence[Index]:
        found = line // BLOCK if how == BY_SQUARE else line, ZERO if how == LINES else k // BLOCK
        return found[::-1] if across else found

    return at


def recipe(scale: Value, lines: Index, depth: Index, across: bool) -> int | None:
    """How a factor with so many lines is scaled, deduced from the shape of its scale; None if it is an unknown way."""
    if all(n is ONE for n in scale.shape):
        return WHOLE
    if scale.rank != 2 or not all(n.is_const for n in (*scale.shape, lines, depth)):
        return None
    count, blocks = (n.const for n in (scale.shape[::-1] if across else scale.shape))
    if (count, blocks) == (lines.const, 1):
        return LINES
    if depth.const % BLOCK or blocks < depth.const // BLOCK:
        return None
    return BY_LINE if count == lines.const else BY_SQUARE if count == -(-lines.const // BLOCK) else None


def scaled_product(a: Value, b: Value, scales: Sequence[Value], kinds: Sequence[int | None], places: Sequence[Place],
                   bias: Value | None, dtype: DType | None, fast: bool) -> Any:
    """(a * scale) @ (b * scale) + bias. Tensor cores keep some 22 bits when they sum small floats: unless `fast`, the
    sum of each 128 elements is added up in float32."""
    if not build.contracts() or a.dtype not in FP8 or b.dtype not in FP8 or dtype not in OUTPUTS or None in kinds:
        return NotImplemented
    inner, *others = (kind in BLOCKS for kind in kinds)
    if others != [inner]:
        return NotImplemented
    wide = torch.float32

    def scale(number: int, line: Index, k: Index) -> Expr:
        given, whole = scales[number], kinds[number] == WHOLE
        return cast(given.load([ZERO] * given.rank if whole else places[number](line, k)), wide)

    def left(i: tuple[Index, ...]) -> Expr:
        x = cast(a.load((i[0], i[2])), wide)
        return x * scale(0, i[0], i[2]) if inner else x

    def right(i: tuple[Index, ...]) -> Expr:
        x = cast(b.load((i[2], i[1])), wide)
        return x * scale(1, i[1], i[2]) if inner else x

    shape = a.shape[0], b.shape[1]
    total = build.contract(shape, a.shape[1:], left, right, wide, promoted=0 if fast else BLOCK)

    def body(i: tuple[Index, ...]) -> Expr:
        x = total.load(i) if inner else total.load(i) * (scale(0, i[0], ZERO) * scale(1, i[1], ZERO))
        return x if bias is None else x + cast(load_at(bias, i), wide)

    return build.pointwise(shape, body, dtype)


@lower(aten._scaled_mm.default, library=True, takes_fp8=True)
def scaled_mm(a: Value, b: Value, scale_a: Value, scale_b: Value, bias: Value | None = None,
              scale_result: Value | None = None, out_dtype: DType | None = None, use_fast_accum: bool = False) -> Any:
    """A scaled product whose scales are laid out like the factors, for rows, 1 x 128 blocks and 128 x 128 blocks."""
    if scale_result is not None:
        return NotImplemented
    kinds = recipe(scale_a, a.shape[0], a.shape[1], False), recipe(scale_b, b.shape[1], a.shape[1], True)
    places = place(kinds[0], False), place(kinds[1], True)
    return scaled_product(a, b, (scale_a, scale_b), kinds, places, bias, out_dtype, use_fast_accum)


@lower(aten._scaled_mm_v2.default, library=True, takes_fp8=True)
def scaled_mm_by_recipe(a: Value, b: Value, scale_a: Sequence[Value], recipe_a: Sequence[int], swizzle_a: Sequence[int],
                        scale_b: Sequence[Value], recipe_b: Sequence[int], swizzle_b: Sequence[int],
                        bias: Value | None = None, out_dtype: DType | None = None,
                        contraction_dim: Sequence[int] = (), use_fast_accum: bool = False) -> Any:
    """A scaled product by recipe: for both factors, scales of lines have the lines first, scales of squares last."""
    given, kinds = (*scale_a, *scale_b), (*recipe_a, *recipe_b)
    if any((*swizzle_a, *swizzle_b, *contraction_dim)) or len(given) != 2 or not {*kinds} <= KNOWN \
            or any(kind in BLOCKS and a.shape[1] % BLOCK is not ZERO for kind in kinds):
        return NotImplemented
    places = [place(kind, kind == BY_SQUARE or (kind == LINES and s.shape[0] is ONE))
              for kind, s in zip(kinds, given, strict=True)]
    return scaled_product(a, b, given, kinds, places, bias, out_dtype, use_fast_accum)
