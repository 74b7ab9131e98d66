"""Pads matrix products whose rows are not aligned for wide loads, such as a vocabulary of 50257 words.

GPU libraries use their fastest kernels only if the contiguous dimension of each matrix is a multiple of some number of
bytes. Where it pays, matrices are padded with zeros to such a size: by the kernel that makes them, or else by a copy (a
parameter is copied once for forward and backward together). The result becomes a view of the padded one; operators read
it, and the backward saves it, in that layout. The caller of the graph gets the strides that eager has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from flambeau.capture.eager_strides import layout, traced
from flambeau.capture.storage import hint, is_view, view_root
from flambeau.ir.tuning import Tuning
from flambeau.ops.facts import LOWERINGS, facts

aten = torch.ops.aten
Sizes = tuple[int, int, int]  # rows, depth and columns of a product


def pad_products(graph: fx.Graph, tuning: Tuning | None) -> None:
    """Pad each product of a graph that becomes faster with padding, the cost of copies included."""
    if tuning is None or not tuning.product_line:
        return
    made: dict[tuple[fx.Node, tuple[int, int]], fx.Node] = {}
    for n in list(graph.nodes):
        product = product_of(n, tuning) if n.op == "call_function" and facts(n.target).factors is not None else None
        if product is not None and product.gain(tuning, made) > 0:
            product.rewrite(made)
    for (x, _), padded in made.items():
        # Other readers can use the padded value, so the unpadded one is only needed if it is a result.
        if padded.args[0] is x and is_ours(x) and not any(u.op == "output" for u in readers(x)):
            replace(x, narrowed(padded, x.meta["val"].shape), but=padded)


@dataclass(frozen=True)
class Matrix:
    """A factor or summand of a product, and how far to pad it."""

    node: fx.Node
    source: fx.Node  # the first node that has the same memory layout, possibly transposed
    pads: tuple[int, int]  # for the last two dimensions in memory order, the contiguous one first

    @property
    def key(self) -> tuple[fx.Node, tuple[int, int]]:
        return self.source, self.pads

    def bytes_copied(self, made: Any) -> int:
        """Bytes that padding has to copy; 0 if one of our kernels makes the matrix: it can write the padded one."""
        return 0 if not any(self.pads) or self.key in made or is_ours(self.source) else size_of(self.source)

    def padded(self, made: dict[Any, fx.Node], at: fx.Node) -> fx.Node:
        if not any(self.pads):
            return self.node
        x, graph = self.source, at.graph
        if self.key not in made:
            pad = [0, self.pads[0], 0, self.pads[1]][:2 * min(x.meta["val"].dim(), 2)]
            with graph.inserting_before(at if x.op == "placeholder" else x.next):
                made[self.key] = call(aten.constant_pad_nd.default, in_rows(x, x), pad)
            if view_root(x).op == "placeholder":  # a parameter: one copy for both forward and backward
                made[self.key].meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with graph.inserting_before(at):
            return in_rows(made[self.key], self.node)


@dataclass(frozen=True)
class PaddedProduct:
    """(c +) a @ b with rows, depth and columns enlarged by `more`."""

    node: fx.Node
    sizes: Sizes
    more: Sizes
    arguments: tuple[Matrix, ...]

    def gain(self, tuning: Tuning, made: Any) -> float:
        """Nanoseconds saved: the speed-up of the product, less the time of copies that would not be made otherwise."""
        enlarged = tuple(m + k for m, k in zip(self.sizes, self.more, strict=True))
        saved = self.nanoseconds(self.sizes, tuning.product_rate_else, tuning) - self.nanoseconds(
            enlarged, tuning.product_rate, tuning)  # type: ignore[arg-type]
        copied = [m.bytes_copied(made) for m in self.arguments]
        if self.more[2] and not all(is_ours(u) for u in readers(self.node)):
            copied.append(size_of(self.node))
        return saved - sum(tuning.launch + 2 * m / tuning.memory_rate for m in copied if m)

    def nanoseconds(self, sizes: Sizes, rate: int, tuning: Tuning) -> float:
        """The estimated time of a product, bound by compute at this rate or by memory traffic."""
        rows, depth, columns = sizes
        t = self.node.meta["val"]
        moved = (rows * depth + depth * columns + rows * columns) * t.itemsize
        computed = rows * depth * columns * t.itemsize  # a multiply-add is two operations; rates are for 16 bits
        return prod(map(hint, t.shape[:-2])) * max(computed / rate, moved / tuning.memory_rate)

    def rewrite(self, made: dict[Any, fx.Node]) -> None:
        n = self.node
        given = [m.padded(made, n) for m in self.arguments]
        with n.graph.inserting_before(n):
            wide = call(n.target, *given, *n.args[len(given):], **n.kwargs)
        replace(n, narrowed(wide, n.meta["val"].shape))
        n.graph.erase_node(n)


# ---- which products to pad -------------------------------------------------------------------------------


def product_of(n: fx.Node, tuning: Tuning) -> PaddedProduct | None:
    """The padded form of a product; None if rows are aligned or of symbolic size, or alignment is irrelevant."""
    place: int = facts(n.target).factors  # type: ignore[assignment]
    a, b = (x.meta["val"] for x in n.args[place:place + 2])  # type: ignore[union-attr]
    if not multiplies_fast(a.dtype) or {a.dtype, b.dtype} != {n.meta["val"].dtype}:
        return None
    # The contiguous dimension is the columns for the result. For a factor it is the depth or its own one.
    crossed = lies_transposed(a), lies_transposed(b)
    lines = crossed[0], not crossed[0] or crossed[1], True
    sizes = a.shape[-2], a.shape[-1], b.shape[-1]
    unit = tuning.product_line // a.itemsize
    rows, depth, columns = more = tuple(
        -m % unit if line and isinstance(m, int) else 0 for m, line in zip(sizes, lines, strict=True))
    results = [u for u in readers(n) if u.op == "output"]
    if not any(more) or len(results) > 1:  # views of one padded tensor would share memory
        return None
    pads = [*[(rows, columns)] * place, (rows, depth), (depth, columns)]
    return PaddedProduct(n, tuple(map(hint, sizes)), more, tuple(  # type: ignore[arg-type]
        matrix(x, p) for x, p in zip(n.args, pads, strict=False)))


def matrix(x: Any, more: tuple[int, int]) -> Matrix:
    """A matrix to be padded by `more` (rows and columns); broadcast dimensions are not padded."""
    val = x.meta["val"]
    last, first = (0 if val.dim() < k or val.shape[-k] == 1 else m for k, m in ((1, more[1]), (2, more[0])))
    return Matrix(x, source_of(x), (first, last) if lies_transposed(val) else (last, first))


def source_of(x: fx.Node) -> fx.Node:
    while is_view(x.target):
        up, val = x.args[0].meta["val"], x.meta["val"]  # type: ignore[union-attr]
        crossed = lies_transposed(up) != lies_transposed(val)
        if up.dim() != val.dim() or layout(up.transpose(-2, -1) if crossed else up) != layout(val):
            break
        x = x.args[0]  # type: ignore[assignment]
    return x


def multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether tensor cores compute products of this dtype."""
    return dtype in (torch.float16, torch.bfloat16) or (
        dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32")


def lies_transposed(t: torch.Tensor) -> bool:
    return bool(t.dim() > 1 and t.stride(-1) != 1 and t.stride(-2) == 1)


def is_ours(n: fx.Node) -> bool:
    """Whether one of our kernels computes this value."""
    op = view_root(n).target
    return op in LOWERINGS and not facts(op).library


def size_of(n: fx.Node) -> int:
    t = n.meta["val"]
    return int(prod(map(hint, t.shape)) * t.itemsize)


def views(n: fx.Node) -> Iterator[fx.Node]:
    for u in list(n.users):
        if is_view(u.target):
            yield u
            yield from views(u)


def readers(n: fx.Node) -> list[fx.Node]:
    """All nodes that read this value or a view of it."""
    return [u for x in (n, *views(n)) for u in x.users if not is_view(u.target)]


# ---- rewriting the graph ---------------------------------------------------------------------------------


def call(op: Any, *args: Any, **named: Any) -> fx.Node:
    """Call an operator in a new node, at the graph's current insertion point."""
    first = next(x for x in args if isinstance(x, fx.Node))
    made = first.graph.call_function(op, args, named)
    values, options = fx.node.map_arg((args, named), lambda x: x.meta["val"])
    with first.meta["val"].fake_mode:
        made.meta["val"] = op(*values, **options)
    return made


def in_rows(n: fx.Node, like: fx.Node) -> fx.Node:
    """Transpose `n` if `like` is stored transposed; this converts from such a layout to rows, and from rows to it."""
    return call(aten.transpose.int, n, -2, -1) if lies_transposed(like.meta["val"]) else n


def narrowed(n: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """Slice a value down to this shape, from the beginning of each dimension."""
    for dim, (have, want) in enumerate(zip(n.meta["val"].shape, shape, strict=True)):
        if isinstance(have, int) and have != want:
            with n.graph.inserting_after(n):
                n = call(aten.slice.Tensor, n, dim, 0, want)
    return n


def replace(old: fx.Node, new: fx.Node, but: fx.Node | None = None) -> None:
    """Replace a value by an equal one with another layout."""
    old.replace_all_uses_with(new, delete_user_cb=lambda u: u is not but)
    moved(new, old.meta["val"])


def moved(n: fx.Node, was: torch.Tensor) -> None:
    """Update the views of a value whose layout was that of `was`. Views that are impossible in the new layout, and
    results of the graph, read a copy in the old layout."""
    copied = []
    for u in n.users if layout(n.meta["val"]) != layout(was) else ():
        before = u.meta.get("val")
        after = traced(u) if is_view(u.target) else before
        if after is not before:
            u.meta["val"] = after
            moved(u, before)  # type: ignore[arg-type]
        elif is_view(u.target) or u.op == "output":
            copied.append(u)
    if copied:
        with n.graph.inserting_after(n):
            copy = n.graph.call_function(aten.clone.default, (n,))
        copy.meta["val"] = was
        for u in copied:
            u.replace_input_with(n, copy)
