"""Pads matrix products whose rows are not aligned for wide loads, such as a vocabulary of 50257 words.

Libraries of GPUs take a product to their fastest kernels only if the contiguous dimension of each matrix is a multiple
of some bytes. Where that pays, matrices are padded with zeros up to it: by the kernel that makes them, or else by a
copy, of a parameter once for forward and backward together. The result is a view of the padded one, which is read and
kept for the backward as it is; the caller of the graph is given the strides that eager has.
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
    """Rewrite the products of a graph that are faster so, copies included."""
    if tuning is None or not tuning.product_line:
        return
    made: dict[tuple[fx.Node, tuple[int, int]], fx.Node] = {}
    for n in list(graph.nodes):
        product = product_of(n, tuning) if n.op == "call_function" and facts(n.target).factors is not None else None
        if product is not None and product.gain(tuning, made) > 0:
            product.rewrite(made)
    for (x, _), padded in made.items():
        # Nobody needs it by itself, unless it is a result: others read the padded one.
        if padded.args[0] is x and is_ours(x) and not any(u.op == "output" for u in readers(x)):
            replace(x, narrowed(padded, x.meta["val"].shape), but=padded)


@dataclass(frozen=True)
class Matrix:
    """An argument of a product, and what is missing to the sizes of the padded one."""

    node: fx.Node
    source: fx.Node  # the first node in whose memory it is, as it is or transposed
    pads: tuple[int, int]  # of the last two dimensions in the order of memory, the contiguous one first

    @property
    def key(self) -> tuple[fx.Node, tuple[int, int]]:
        return self.source, self.pads

    def bytes_copied(self, made: Any) -> int:
        """None where a kernel of ours makes it, which makes the padded one instead."""
        return 0 if not any(self.pads) or self.key in made or is_ours(self.source) else size_of(self.source)

    def padded(self, made: dict[Any, fx.Node], at: fx.Node) -> fx.Node:
        if not any(self.pads):
            return self.node
        x, graph = self.source, at.graph
        if self.key not in made:
            pad = [0, self.pads[0], 0, self.pads[1]][:2 * min(x.meta["val"].dim(), 2)]
            with graph.inserting_before(at if x.op == "placeholder" else x.next):
                made[self.key] = call(aten.constant_pad_nd.default, in_rows(x, x), pad)
            if view_root(x).op == "placeholder":  # a parameter: its copy serves forward and backward
                made[self.key].meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with graph.inserting_before(at):
            return in_rows(made[self.key], self.node)


@dataclass(frozen=True)
class PaddedProduct:
    """(c +) a @ b with rows, depth and columns that are larger by `more`."""

    node: fx.Node
    sizes: Sizes
    more: Sizes
    arguments: tuple[Matrix, ...]

    def gain(self, tuning: Tuning, made: Any) -> float:
        """Nanoseconds that it saves: those of the product, less those of copies that nobody would make otherwise."""
        enlarged = tuple(m + k for m, k in zip(self.sizes, self.more, strict=True))
        saved = self.nanoseconds(self.sizes, tuning.product_rate_else, tuning) - self.nanoseconds(
            enlarged, tuning.product_rate, tuning)  # type: ignore[arg-type]
        copied = [m.bytes_copied(made) for m in self.arguments]
        if self.more[2] and not all(is_ours(u) for u in readers(self.node)):
            copied.append(size_of(self.node))
        return saved - sum(tuning.launch + 2 * m / tuning.memory_rate for m in copied if m)

    def nanoseconds(self, sizes: Sizes, rate: int, tuning: Tuning) -> float:
        """A product waits for what it computes, at this rate, or for what it moves."""
        rows, depth, columns = sizes
        t = self.node.meta["val"]
        moved = (rows * depth + depth * columns + rows * columns) * t.itemsize
        computed = rows * depth * columns * t.itemsize  # two operations for each product, counted in 16 bits
        return prod(map(hint, t.shape[:-2])) * max(computed / rate, moved / tuning.memory_rate)

    def rewrite(self, made: dict[Any, fx.Node]) -> None:
        n = self.node
        given = [m.padded(made, n) for m in self.arguments]
        with n.graph.inserting_before(n):
            wide = call(n.target, *given, *n.args[len(given):], **n.kwargs)
        replace(n, narrowed(wide, n.meta["val"].shape))
        n.graph.erase_node(n)


# ---- what is there ---------------------------------------------------------------------------------------


def product_of(n: fx.Node, tuning: Tuning) -> PaddedProduct | None:
    """None where all lines are whole, where nobody knows before the run, or where lines do not matter."""
    place: int = facts(n.target).factors  # type: ignore[assignment]
    a, b = (x.meta["val"] for x in n.args[place:place + 2])  # type: ignore[union-attr]
    if not multiplies_fast(a.dtype) or {a.dtype, b.dtype} != {n.meta["val"].dtype}:
        return None
    # Contiguous are the columns of the result, and of each factor the depth or what is its own.
    crossed = lies_transposed(a), lies_transposed(b)
    lines = crossed[0], not crossed[0] or crossed[1], True
    sizes = a.shape[-2], a.shape[-1], b.shape[-1]
    unit = tuning.product_line // a.itemsize
    rows, depth, columns = more = tuple(
        -m % unit if line and isinstance(m, int) else 0 for m, line in zip(sizes, lines, strict=True))
    results = [u for u in readers(n) if u.op == "output"]
    if not any(more) or len(results) > 1:  # views of one result, which share memory
        return None
    pads = [*[(rows, columns)] * place, (rows, depth), (depth, columns)]
    return PaddedProduct(n, tuple(map(hint, sizes)), more, tuple(  # type: ignore[arg-type]
        matrix(x, p) for x, p in zip(n.args, pads, strict=False)))


def matrix(x: Any, more: tuple[int, int]) -> Matrix:
    """`more`: rows and columns; none along what is broadcast."""
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
    """Whether tensor cores take it."""
    return dtype in (torch.float16, torch.bfloat16) or (
        dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32")


def lies_transposed(t: torch.Tensor) -> bool:
    return bool(t.dim() > 1 and t.stride(-1) != 1 and t.stride(-2) == 1)


def is_ours(n: fx.Node) -> bool:
    """Whether a kernel of ours computes it."""
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
    """Whoever takes it, or a view of it."""
    return [u for x in (n, *views(n)) for u in x.users if not is_view(u.target)]


# ---- what becomes of it ----------------------------------------------------------------------------------


def call(op: Any, *args: Any, **named: Any) -> fx.Node:
    """A new node, where its graph inserts now."""
    first = next(x for x in args if isinstance(x, fx.Node))
    made = first.graph.call_function(op, args, named)
    values, options = fx.node.map_arg((args, named), lambda x: x.meta["val"])
    with first.meta["val"].fake_mode:
        made.meta["val"] = op(*values, **options)
    return made


def in_rows(n: fx.Node, like: fx.Node) -> fx.Node:
    """The transpose, where the other lies so: of that itself, what lies in rows, and of rows, what lies like it."""
    return call(aten.transpose.int, n, -2, -1) if lies_transposed(like.meta["val"]) else n


def narrowed(n: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """The beginning of it, of this shape."""
    for dim, (have, want) in enumerate(zip(n.meta["val"].shape, shape, strict=True)):
        if isinstance(have, int) and have != want:
            with n.graph.inserting_after(n):
                n = call(aten.slice.Tensor, n, dim, 0, want)
    return n


def replace(old: fx.Node, new: fx.Node, but: fx.Node | None = None) -> None:
    """By the same values that lie elsewhere."""
    old.replace_all_uses_with(new, delete_user_cb=lambda u: u is not but)
    moved(new, old.meta["val"])


def moved(n: fx.Node, was: torch.Tensor) -> None:
    """Tell the views of what lay like `was`. Those that it cannot have, and the results of the graph, are views of a
    copy that lies so."""
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
