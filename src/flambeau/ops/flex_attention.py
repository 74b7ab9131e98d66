"""`flex_attention`: attention whose scores and mask are functions of the caller, lowered into the kernel.

Blocks that the caller's `BlockMask` does not list are not computed, as in torch's own kernels. In eager, torch
evaluates only the mask function, which gives the same result if the lists were made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from flambeau.ir import build
from flambeau.ir.attention import Listed, Lists
from flambeau.ir.dtypes import DType, is_float, opmath
from flambeau.ir.expr import Expr, cast, const, index_value
from flambeau.ir.index import ONE, ZERO, Index, Sym, as_index
from flambeau.ir.nodes import Value
from flambeau.ops.attention import Call, Captured, Where, attended, attended_backward
from flambeau.ops.formulas import Formula, NotAnExpression, expressions
from flambeau.ops.indexing import checked
from flambeau.ops.reduction import accumulate
from flambeau.ops.registry import lower, lower_higher

higher = torch.ops.higher_order
LEAST = 16  # rows or columns: block sizes must be multiples of this
EVERYTHING = 1 << 30  # the block size from which on torch has one block for everything, when the caller gave none


def numbers(at: Where) -> list[Expr]:
    """Batch, head, row and column, as the caller's functions get them."""
    return [index_value(i, torch.int32) for i in at]


def mask_of(function: Formula, others: Sequence[Any]) -> Callable[[Where], Expr] | None:
    """The mask as a condition; None if all scores count."""

    def mask(at: Where) -> Expr:
        e, = expressions(function, numbers(at), others)
        assert isinstance(e, Expr)
        return cast(e, torch.bool)

    probe = mask(tuple(as_index(Sym(f"probe{k}")) for k in range(4)))
    return None if probe.op == "const" and probe.attr is True else mask


def score_of(function: Formula, others: Sequence[Any], dtype: DType) -> Callable[[Expr, Where], Expr] | None:
    """The score as a function of the product; None if it is the product itself."""

    def score(s: Expr, at: Where) -> Expr:
        e, = expressions(function, [s, *numbers(at)], others)
        assert isinstance(e, Expr)
        return e

    probe = Expr("carry", dtype, (), "probe")
    return None if score(probe, tuple(as_index(Sym(f"probe{k}")) for k in range(4))) is probe else score


def lists_of(tables: Sequence[Any], high: Any, wide: Any) -> Callable[[Index, Index], Lists] | None:
    """The blocks to compute for each batch and head; None if all blocks are computed."""
    known = [isinstance(n, int) and n % LEAST == 0 for n in (high, wide)]
    if not all(known) or min(high, wide) >= EVERYTHING or tables[0] is None:
        return None

    def lists(batch: Index, head: Index) -> Lists:
        def listed(k: int, name: str) -> Listed | None:
            count, blocks = tables[2 * k:2 * k + 2]
            if count is None or blocks is None:
                return None
            at, step = Sym(f"{name}_at", count.shape[2]), Sym(f"{name}_step", blocks.shape[3])
            where = [ZERO if n is ONE else i for n, i in zip(count.shape, (batch, head), strict=False)]
            return Listed(at, step, count.load((*where, as_index(at))),
                          blocks.load((*where, as_index(at), as_index(step))))

        part, *others = (listed(k, name) for k, name in enumerate(("part", "whole", "part_down", "whole_down")))
        assert part is not None
        return Lists(high, wide, part, *others)

    return lists


def call_of(query: Value, key: Value, value: Value, score_mod: Formula, block_mask: Sequence[Any], scale: float,
            score_others: Sequence[Any], mask_others: Sequence[Any]) -> Call:
    """The `Call` of a flex attention. Keys and values may be shared by the whole batch."""
    *tables, high, wide, mask_mod = block_mask
    key, value = (v if v.shape[0] is query.shape[0] else v.view(
        (query.shape[0], *v.shape[1:]), lambda i: (ZERO, *i[1:])) for v in (key, value))
    return Call(query, key, value, scale, score_of(score_mod, score_others, opmath(query.dtype)),
                mask=mask_of(mask_mod, mask_others), lists=lists_of(tables[2:10], high, wide))


def is_plain(*values: Any) -> bool:
    return all(isinstance(v, Value) and is_float(v.dtype) for v in values) and len({v.dtype for v in values}) == 1


def without_lists(at: int) -> Callable[..., tuple[Any, ...]]:
    """A rule that drops block lists if all blocks are computed. `at`: the mask's position among a node's arguments."""

    def rule(_: Any, *args: Any) -> tuple[Any, ...]:
        *lists, high, wide, mask = args[at]
        # Kernels are specialized on the block size, so this adds a guard.
        sizes = [int(n.meta["val"]) if isinstance(n, fx.Node) else n for n in (high, wide)]
        lists = [*lists[:2], *[None] * len(lists[2:])] if min(sizes) >= EVERYTHING else lists
        return *args[:at], (*lists, *sizes, mask), *args[at + 1:]

    return rule


@lower_higher(higher.flex_attention, keeps_less=without_lists(4))
def flex_attention(query: Value, key: Value, value: Value, score_mod: Formula, block_mask: Sequence[Any], scale: Any,
                   options: Any, score_others: Sequence[Any] = (), mask_others: Sequence[Any] = ()) -> Any:
    """The result, each row's log2 of its sum, and each row's largest score, both in base 2."""
    if not is_plain(query, key, value) or not isinstance(scale, (int, float)):
        return NotImplemented
    try:
        out, *statistics = attended(call_of(query, key, value, score_mod, block_mask, scale, score_others, mask_others))
    except NotAnExpression:
        return NotImplemented
    return [out, *(build.pointwise(v.shape, v.load, torch.float32) for v in statistics)]


@lower_higher(higher.flex_attention_backward, keeps_less=without_lists(9))
def flex_attention_backward(
        query: Value, key: Value, value: Value, out: Value, logs: Value, grad: Value | None, of_logs: Value | None,
        score_mod: Formula, joint: Formula, block_mask: Sequence[Any], scale: Any, options: Any,
        score_others: Sequence[Any] = (), mask_others: Sequence[Any] = ()) -> Any:
    """The gradients of queries, keys, values, and of each tensor that scores are computed from (None for others)."""
    if not is_plain(query, key, value) or not isinstance(scale, (int, float)):
        return NotImplemented
    with_scatters()
    try:
        c = call_of(query, key, value, score_mod, block_mask, scale, score_others, mask_others)
        c, owners = with_slope(c, joint, score_others)
    except NotAnExpression:
        return NotImplemented
    if grad is None:
        grad = build.pointwise(out.shape, lambda _: const(0, out.dtype))
    if of_logs is not None:
        of_logs = scaled(of_logs, 1 / math.log(2))
    dq, dk, dv, *captured = attended_backward(c, grad, out, logs, of_logs)
    dk, dv = (v if x.shape[0] is v.shape[0] else summed(v) for v, x in ((dk, key), (dv, value)))
    each: dict[int, Value] = {}
    for k, v in zip(owners, captured, strict=True):
        each[k] = plus(each[k], v) if k in each else v
    return [dq, dk, dv, [each.get(k) for k in range(len(score_others))]]


def with_slope(c: Call, joint: Formula, others: Sequence[Any]) -> tuple[Call, list[int]]:
    """The call with its score's gradient, and the position in `others` of each tensor whose gradient is captured.
    `joint` takes the product, its place, the score's gradient and the tensors; it returns the gradients of the
    others."""
    dtype = c.wide

    @cache
    def found(s: Expr, given: Expr, at: Where) -> list[Any]:
        return expressions(joint, [s, *numbers(at), given], others)

    def value(k: int, part: int) -> Callable[[Expr, Expr, Where], Expr]:
        def of(s: Expr, given: Expr, at: Where) -> Expr:
            e = found(s, given, at)[k]
            return e[part].value if isinstance(e, list) else e

        return of

    def index(k: int, part: int) -> Callable[[Where], Sequence[Index]]:
        return lambda at: tuple(found(*unknown, at)[k][part].index)

    unknown = Expr("carry", dtype, (), "s"), Expr("carry", dtype, (), "given")
    probe = found(*unknown, tuple(as_index(Sym(f"probe{k}")) for k in range(4)))
    captured: list[Captured] = []
    owners: list[int] = []
    for k, (tensor, made) in enumerate(zip(others, probe[5:], strict=True)):
        if not isinstance(tensor, Value) or made is None:
            continue
        for part, _ in enumerate(made if isinstance(made, list) else [made]):
            if not isinstance(made, list) and tensor.shape:
                raise NotAnExpression
            captured.append(Captured(tensor.shape, tensor.dtype, index(5 + k, part) if tensor.shape else lambda at: (),
                                     value(5 + k, part)))
            owners.append(k)
    slope = None if probe[0] is unknown[1] else value(0, 0)
    return replace(c, slope=slope, captured=captured), owners


@cache
def with_scatters() -> None:
    """Register the operator with which torch writes gradients of indexed tensors; it exists once torch traced one."""
    lower(torch.ops.flex_lib.zeros_and_scatter.default)(zeros_and_scatter)


def zeros_and_scatter(shape: Sequence[Any], indices: Sequence[Value], value: Value) -> Value:
    sizes = tuple(as_index(n) for n in shape)
    return build.scatter(sizes, lambda _: const(0, value.dtype), (), lambda _: [
        checked(v.load(()), n, k) for k, (v, n) in enumerate(zip(indices, sizes, strict=True))],
        lambda _: value.load(()), "add")


def scaled(v: Value, by: float) -> Value:
    return build.pointwise(v.shape, lambda i: v.load(i) * by)


def plus(a: Value, b: Value) -> Value:
    wide = opmath(a.dtype)
    return build.pointwise(a.shape, lambda i: cast(a.load(i), wide) + cast(b.load(i), wide), a.dtype)


def summed(v: Value) -> Value:
    """The sum over the batch, for keys or values that are shared by the whole batch."""
    wide = opmath(v.dtype)
    total = accumulate("sum", v.shape, [0], wide, lambda i: cast(v.load(i), wide), keepdim=True)
    return build.pointwise(total.shape, total.load, v.dtype)
