"""Attention: one kernel for each pass on machines that have them (`Capabilities.attends`), without scores in memory;
otherwise two matrix products with a softmax in between, and five products for the gradient.

A `Call` describes an attention in the loop language: how a scaled product of query and key becomes a score (score and
bias), which scores count (mask), and the factor that dropout applies (keep). Everything else follows from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.attention import Attention, Gradient, Lists
from flambeau.ir.dtypes import DType, is_bool, opmath
from flambeau.ir.expr import Expr, cast, const, fresh_carry, index_value, where
from flambeau.ir.index import ONE, ZERO, Index, Sym, as_index
from flambeau.ir.nodes import Value, as_indices
from flambeau.ir.scalar import eq, exp, fma, log, sqrt
from flambeau.ops.random import draw_word
from flambeau.ops.reduction import accumulate
from flambeau.ops.registry import load_at, lower
from flambeau.torch_compat import TORCH

aten = torch.ops.aten

Where = tuple[Index, ...]  # of a score: batch, query head, row, column
LARGEST = 256  # the largest head size that fits into registers
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Captured:
    """A tensor that scores are computed from, and whose gradient is needed. At each point, `value` of the scaled
    product and of the score's gradient is added to the element at `index`."""

    shape: tuple[Index, ...]
    dtype: DType
    index: Callable[[Where], Sequence[Index]]
    value: Callable[[Expr, Expr, Where], Expr]


@dataclass(frozen=True)
class Call:
    query: Value  # batch, heads, rows, depth
    key: Value  # batch, heads (a divisor of the query heads), columns, depth
    value: Value  # batch, heads as for keys, columns, width
    scale: float | None = None  # None: 1 / sqrt(depth)
    score: Callable[[Expr, Where], Expr] | None = None  # from the scaled product; None: the product itself
    bias: Callable[[Where], Expr] | None = None  # added to the score
    mask: Callable[[Where], Expr] | None = None  # which scores count
    keep: Callable[[Where], Expr] | None = None  # a factor for each probability
    slope: Callable[[Expr, Expr, Where], Expr] | None = None  # a product's gradient, by it and its score's gradient
    lists: Callable[[Index, Index], Lists] | None = None  # from batch and head: the blocks to compute
    captured: Sequence[Captured] = field(default=())

    @property
    def wide(self) -> DType:
        """The dtype in which scores are computed."""
        return opmath(self.query.dtype)

    @property
    def heads(self) -> Index:
        return self.query.shape[1]

    @property
    def group(self) -> Index:
        """The number of query heads per key head."""
        a, b = self.heads, self.key.shape[1]
        return ONE if a is b else a // b

    @property
    def factor(self) -> Expr:
        if self.scale is not None:
            return const(self.scale, self.wide)
        n = self.query.shape[-1]
        return const(1 / math.sqrt(n.const), self.wide) if n.is_const else 1 / sqrt(index_value(n, self.wide))

    def natural(self, product: Expr, at: Where) -> Expr:
        """The score of a given product, in natural units."""
        s = product * self.factor
        s = s if self.score is None else cast(self.score(s, at), self.wide)
        return s if self.bias is None else s + cast(self.bias(at), self.wide)


def is_fused(c: Call) -> bool:
    """Whether the machine has a kernel for it. Gradients of captured tensors are accumulated in no fixed order."""
    caps = build.graph().capabilities
    most = [n.bounds()[1] for n in (c.query.shape[-1], c.value.shape[-1])]
    return caps.attends and all(n is not None and 0 < n <= LARGEST for n in most) and not (
        caps.deterministic and c.captured)


def attended(c: Call) -> tuple[Value, Value, Value]:
    """The result in the queries' dtype, each row's log2 of its sum of exponentials, and each row's largest score in
    base 2 units."""
    return fused(c) if is_fused(c) else composed(c)


def attended_backward(c: Call, grad: Value, out: Value, logs: Value, of_logs: Value | None = None) -> list[Value]:
    """The gradients of queries, keys, values and captured tensors, from the base-2 logarithms. `of_logs`: the gradient
    of the natural logarithms.

    With p the softmax and ds = p * (grad @ v.T - sum(grad * out)):  dq = ds @ k, dk = ds.T @ q, dv = p.T @ grad"""
    wide = c.wide
    inner = accumulate("sum", grad.shape, [grad.rank - 1], wide,
                       lambda i: cast(grad.load(i), wide) * cast(out.load(i), wide))
    if of_logs is not None:  # a logarithm has the slope p, and sum(grad * out) enters with -p
        given, summed = of_logs, inner
        inner = build.pointwise(inner.shape, lambda i: summed.load(i) - cast(given.load(i), wide))
    return (fused_backward if is_fused(c) else composed_backward)(c, grad, logs, inner)


# ---- one kernel --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """The variables of a call's node, also as indices."""

    batch: tuple[Sym, ...]
    group: Sym
    row: Sym
    column: Sym
    depth: Sym
    width: Sym
    key_at: tuple[Index, Index]  # batch and key head
    query_at: tuple[Index, Index]

    @property
    def score(self) -> Where:
        return *self.query_at, as_index(self.row), as_index(self.column)


def points_of(c: Call) -> Points:
    sizes = {"z": c.query.shape[0], "h": c.key.shape[1], "g": c.group, "m": c.query.shape[2], "n": c.key.shape[2],
             "e": c.query.shape[3], "d": c.value.shape[3]}
    z, h, g, m, n, e, d = (Sym(name, size) for name, size in sizes.items())
    at, head, part = as_indices((z, h, g))
    return Points((z, h), g, m, n, e, d, (at, head), (at, head * c.group + part))


def node_of(c: Call, p: Points, names: Sequence[str], places: Sequence[Sequence[Index]], product: Expr,
            gradient: Gradient | None = None) -> tuple[Value, ...]:
    g, wide = build.graph(), c.wide
    row, column, depth, width = (as_index(v) for v in (p.row, p.column, p.depth, p.width))
    score = c.natural(product, p.score) * LOG2E
    if c.score is None:  # saves one multiplication
        factor = c.factor * const(LOG2E, wide)
        score = product * factor if c.bias is None else fma(product, factor, cast(c.bias(p.score), wide) * LOG2E)
    return g.add(Attention(
        tuple(names), tuple(map(tuple, places)), p.batch, p.group, p.row, p.column, p.depth, p.width,
        c.query.load((*p.query_at, row, depth)), c.key.load((*p.key_at, column, depth)),
        c.value.load((*p.key_at, column, width)), product, score, None if c.mask is None else c.mask(p.score),
        None if c.keep is None else cast(c.keep(p.score), wide), None if c.lists is None else c.lists(*p.query_at),
        gradient, tf32="product" in g.capabilities.tf32, origin=build.origin()))


def fused(c: Call) -> tuple[Value, Value, Value]:
    g, p = build.graph(), points_of(c)
    shape = c.query.shape[:3]
    made = g.add_buffer((*shape, c.value.shape[3]), c.query.dtype), *(g.add_buffer(shape, c.wide) for _ in range(2))
    query = (*p.query_at, as_index(p.row))
    out, logs, tops = node_of(c, p, [b.name for b in made], ((*query, as_index(p.width)), query, query),
                              fresh_carry(c.wide))
    return out, logs, tops


def fused_backward(c: Call, grad: Value, logs: Value, inner: Value) -> list[Value]:
    g, p, wide = build.graph(), points_of(c), c.wide
    product, given = fresh_carry(wide), fresh_carry(wide)
    query, key = (*p.query_at, as_index(p.row)), (*p.key_at, as_index(p.column))
    depth, width = as_index(p.depth), as_index(p.width)
    names = [g.add_buffer(x.shape, x.dtype).name for x in (c.query, c.key, c.value)]
    names += [g.add_buffer(x.shape, opmath(x.dtype)).name for x in c.captured]
    scaled = product * c.factor
    slope = given if c.slope is None else cast(c.slope(scaled, given, p.score), wide)
    captured = tuple(cast(x.value(scaled, given, p.score), opmath(x.dtype)) for x in c.captured)
    places = [(*query, depth), (*key, depth), (*key, width), *(x.index(p.score) for x in c.captured)]
    made = node_of(c, p, names, places, product, Gradient(
        grad.load((*query, width)), logs.load(query), inner.load(query), given, slope, c.factor, captured))
    return [*made[:3], *rounded(c, made[3:])]


def rounded(c: Call, captured: Sequence[Value]) -> list[Value]:
    return [build.pointwise(v.shape, v.load, x.dtype) for v, x in zip(captured, c.captured, strict=True)]


# ---- two products, and five for the gradient ---------------------------------------------------------------


def product(a: Value, b: Value) -> Value:
    """a @ b over the last two dimensions, in the accumulator's dtype."""
    return build.contract((*a.shape[:-1], b.shape[-1]), a.shape[-1:], lambda i: a.load((*i[:-2], i[-1])),
                          lambda i: b.load((*i[:-3], i[-1], i[-2])), opmath(a.dtype))


def transposed(v: Value) -> Value:
    return v.view((*v.shape[:-2], v.shape[-1], v.shape[-2]), lambda i: (*i[:-2], i[-1], i[-2]))


def for_each_head(c: Call, v: Value) -> Value:
    """Keys or values, repeated for each query head."""
    shape = v.shape[0], c.heads, *v.shape[2:]
    return v if c.group is ONE else v.view(shape, lambda i: (i[0], i[1] // c.group, *i[2:]))


def summed_heads(c: Call, v: Value) -> Value:
    """Gradients of keys or values, summed over the query heads that share them."""
    if c.group is ONE:
        return v
    shape = (v.shape[0], c.key.shape[1], c.group, *v.shape[2:])
    return accumulate("sum", shape, [2], v.dtype, lambda i: v.load((i[0], i[1] * c.group + i[2], *i[3:])))


def scores(c: Call) -> tuple[Value, Value]:
    """The products of queries and keys, and the scores, which are -inf where masked."""
    total = product(c.query, transposed(for_each_head(c, c.key)))

    def body(i: Where) -> Expr:
        s = c.natural(total.load(i), i)
        return s if c.mask is None else where(c.mask(i), s, const(-math.inf, c.wide))

    return total, build.pointwise(total.shape, body)


def composed(c: Call) -> tuple[Value, Value, Value]:
    """softmax(scores) @ v (zero for rows that are fully masked), the logarithms and the largest scores."""
    wide, (_, s) = c.wide, scores(c)
    largest = accumulate("max", s.shape, [3], wide, s.load)

    def body(i: Where) -> Expr:
        m = largest.load(i[:-1])
        return where(eq(m, -math.inf), const(0, wide), exp(s.load(i) - m))

    e = build.pointwise(s.shape, body)
    sums = accumulate("sum", s.shape, [3], wide, e.load)
    total = product(kept(c, e), for_each_head(c, c.value))

    def share(i: Where) -> Expr:
        n = sums.load(i[:-1])
        return total.load(i) / where(eq(n, 0), const(1, wide), n)

    out = build.pointwise(total.shape, share, c.query.dtype)
    logs = build.pointwise(sums.shape, lambda i: (largest.load(i) + log(sums.load(i))) * LOG2E)
    return out, logs, times(largest, LOG2E)


def kept(c: Call, v: Value) -> Value:
    keep = c.keep
    return v if keep is None else build.pointwise(v.shape, lambda i: v.load(i) * cast(keep(i), c.wide))


def composed_backward(c: Call, grad: Value, logs: Value, inner: Value) -> list[Value]:
    wide, (total, s) = c.wide, scores(c)

    def softmax(i: Where) -> Expr:
        n = cast(logs.load(i[:-1]), wide)
        return where(eq(n, -math.inf) | eq(s.load(i), -math.inf), const(0, wide), exp(s.load(i) - n * math.log(2)))

    p = build.pointwise(s.shape, softmax)
    dp = kept(c, product(grad, transposed(for_each_head(c, c.value))))
    given = build.pointwise(s.shape, lambda i: p.load(i) * (dp.load(i) - inner.load(i[:-1])))

    def slope(i: Where) -> Expr:
        g, seen = given.load(i), p.load(i)
        g = g if c.slope is None else where(eq(seen, 0), 0, cast(c.slope(total.load(i) * c.factor, g, i), wide))
        return g * c.factor

    ds = build.pointwise(s.shape, slope)
    made = [product(ds, for_each_head(c, c.key)), summed_heads(c, product(transposed(ds), c.query)),
            summed_heads(c, product(transposed(kept(c, p)), grad))]

    def added(x: Captured) -> Value:
        def value(i: Where) -> Expr:
            e = x.value(total.load(i) * c.factor, given.load(i), i)
            return where(eq(p.load(i), 0), 0, cast(e, opmath(x.dtype)))

        return build.scatter(x.shape, lambda _: const(0, opmath(x.dtype)), s.shape, x.index, value, "add")

    captured = [added(x) for x in c.captured]
    return [*(build.pointwise(m.shape, m.load, x.dtype) for m, x in zip(made, (c.query, c.key, c.value), strict=True)),
            *rounded(c, captured)]


# ---- the calls of torch ------------------------------------------------------------------------------------


def causal(offset: Index) -> Callable[[Where], Expr]:
    """The causal mask: each row sees columns up to its own number plus `offset`."""
    return lambda i: index_value(i[3]) <= index_value(i[2] + offset)


def call_of(q: Value, k: Value, v: Value, mask: Value | None, is_causal: bool, scale: float | None,
            seed: Value | None = None, dropout: float = 0.0, of_mask: bool = False) -> Call:
    """A call of `scaled_dot_product_attention`: boolean masks select scores, other masks are added to them."""
    hides = mask is not None and is_bool(mask.dtype)

    def read(i: Where) -> Expr:
        assert mask is not None
        return load_at(mask, i)

    def keep(i: Where) -> Expr:
        assert seed is not None
        row = (i[0] * q.shape[1] + i[1]) * q.shape[2] + i[2]
        number = draw_word(seed, row, i[3])
        return where(number >= dropout, const(1 / (1 - dropout) if dropout < 1 else 0, torch.float32), 0)

    captured = [Captured(mask.shape, mask.dtype, lambda i: places_in(mask, i), lambda s, given, i: given)] \
        if of_mask and mask is not None else []
    return Call(q, k, v, scale, bias=read if mask is not None and not hides else None,
                mask=read if hides else causal(ZERO) if is_causal else None,
                keep=keep if seed is not None and dropout else None, captured=captured)


def places_in(v: Value, i: Where) -> list[Index]:
    """The index of the element that broadcasting puts at i."""
    return [ZERO if n is ONE else x for n, x in zip(v.shape, i[len(i) - v.rank:], strict=True)]


# Before 2.13, torch's metadata says float32 for the logarithms, although float64 inputs give float64.
_ODD: set[DType] = {torch.float64} if TORCH < (2, 13) else set()


def is_ours(q: Value, k: Value, v: Value, dropout: Any, scale: Any) -> bool:
    return (build.contracts() and q.dtype not in _ODD and dropout == 0
            and isinstance(scale, (int, float, type(None))) and q.rank == k.rank == v.rank == 4
            and k.shape[1] is v.shape[1] and shares_heads(q.shape[1], k.shape[1]))


def shares_heads(queries: Index, keys: Index) -> bool:
    """Whether each key head serves the same number of query heads."""
    return queries is keys or bool(queries.is_const and keys.is_const and keys.const and not queries.const % keys.const)


@lower(aten._scaled_dot_product_flash_attention_for_cpu.default, library=True)
def attention_for_cpu(q: Value, k: Value, v: Value, dropout_p: Any = 0.0, is_causal: bool = False, *,
                      attn_mask: Value | None = None, scale: Any = None) -> Any:
    if not is_ours(q, k, v, dropout_p, scale):
        return NotImplemented
    out, logs, _ = attended(call_of(q, k, v, attn_mask, is_causal, scale))
    return out, times(logs, math.log(2))


@lower(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, library=True)
def attention_for_cpu_backward(grad: Value, q: Value, k: Value, v: Value, out: Value, logsumexp: Value, dropout_p: Any,
                               is_causal: bool, *, attn_mask: Value | None = None, scale: Any = None) -> Any:
    if not is_ours(q, k, v, dropout_p, scale) or q.shape[1] is not k.shape[1]:
        return NotImplemented
    call = call_of(q, k, v, attn_mask, is_causal, scale)
    return tuple(attended_backward(call, grad, out, times(logsumexp, LOG2E)))


def times(v: Value, number: float) -> Value:
    return build.pointwise(v.shape, lambda i: v.load(i) * number)
