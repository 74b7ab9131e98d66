"""Models eager's memory: which storage a value is in, with which strides, and which values share it.

Lowerings are lazy: a repeat, a flip or a copy is just another index into an existing buffer, and costs nothing for
operators that read its elements. Some operators look at memory instead: `as_strided`, a view as another dtype, or a
caller that gets a result and a view of it. For these, `Storage.of` returns a value whose buffer is laid out as eager's
memory, with a copy where the lazy value is not. The captured graph tells who shares memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from flambeau.ir import build
from flambeau.ir.index import ONE, ZERO, Index, as_index, offset_of
from flambeau.ir.lines import overlapping
from flambeau.ir.nodes import Buffer, Value, as_indices, contiguous_strides, dim_vars
from flambeau.ops import LOWERINGS
from flambeau.ops.facts import facts
from flambeau.schedule.plan import strided
from flambeau.torch_compat.ops import OpOverload

if TYPE_CHECKING:
    from .graph import Lowering

aten = torch.ops.aten


# ---- in the captured graph -------------------------------------------------------------------------------


def is_view(op: Any) -> bool:
    return isinstance(op, OpOverload) and facts(op).view


def viewed(n: fx.Node) -> fx.Node | None:
    """The node that n is a direct view of; None if n has its own memory."""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], fx.Node):
        return None
    up = n.args[0]
    if n.target is operator.getitem:
        return up if viewed(up) is not None else None
    return up if is_view(n.target) else None


def view_root(n: fx.Node) -> fx.Node:
    """The node whose memory n is in: itself, unless it is a view."""
    up = viewed(n)
    while up is not None:
        n, up = up, viewed(up)
    return n


def copies_input(n: fx.Node) -> bool:
    """Whether its storage is a copy of an input's storage, whose size is only known at run time."""
    if not facts(n.target).copies_storage:
        return False
    base = view_root(n.args[0])  # type: ignore[arg-type]
    return base.op == "placeholder" or copies_input(base)


def is_behind(n: fx.Node) -> bool:
    """Whether its offset in such a copied storage may be nonzero, as that of its argument. Torch's metadata for a copy
    of a copy says zero."""
    if not facts(n.target).copies_storage:
        return False
    x: fx.Node = n.args[0]  # type: ignore[assignment]
    return not is_zero(x.meta["val"].storage_offset()) or is_behind(view_root(x))


def writes_twice(n: fx.Node) -> bool:
    """Whether it writes into a copied storage in which elements overlap, so that others change too. For expanded inputs
    eager makes a copy without overlaps."""
    if not facts(n.target).copies_storage:
        return False
    x = n.args[0].meta["val"]  # type: ignore[union-attr]
    shape, strides = ([hint(s) for s in y] for y in (x.shape, x.stride()))
    expanded = any(m > 1 and s == 0 for m, s in zip(shape, strides, strict=True))
    return not expanded and overlapping(shape, strides)


def hint(x: Any) -> int:
    """A size, or for a symbol its value at capture; 1 if only data determines it."""
    return int(x.node.hint or 1) if isinstance(x, torch.SymInt) else int(x)


def is_zero(x: Any) -> bool:
    return not isinstance(x, torch.SymInt) and x == 0


# ---- in our graph ----------------------------------------------------------------------------------------


class Storage:
    """The memory of the nodes that have been lowered so far."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.g = lowering, lowering.g
        self._of: dict[fx.Node, Value] = {}  # for nodes with memory of their own
        self._views: dict[tuple[fx.Node, Value], Any] = {}  # views, by node and value of their base
        self._called: set[fx.Node] = set()  # those nodes in `_of` that ATen computes
        self._owners: dict[str, fx.Node] = {}  # buffer -> the node that owns it from the caller's view
        self.borrowed: set[str] = set()  # results of calls that lie in other values' memory

    def strides(self, n: fx.Node) -> tuple[Index, ...]:
        return tuple(self.lowering.c.symbols.index(s) for s in n.meta["val"].stride())

    def of(self, n: fx.Node) -> Any:
        """The value of n as laid out in eager's memory; a list for a view with several results."""
        up = viewed(n)
        if up is None:
            if n not in self._of:
                self._of[n] = self.made(n)
            return self._of[n]
        above = self.of(up)
        if n.target is operator.getitem:
            return above[n.args[1]]
        lazy = self.lowering.env[n]
        called = isinstance(lazy, Value) and lazy.buffer in self.borrowed
        if isinstance(lazy, Value) and lazy.numel is ZERO and lazy.dtype is above.dtype and not called:
            # It has no elements, so no index is ever used, whatever the lowering made of it. ATen's view could fail.
            return Value(above.buffer, lazy.shape, lazy.dtype, (ZERO,) * len(self.g.buffers[above.buffer].shape))
        if (n, above) not in self._views:
            self._views[n, above] = self.view(n, up, above)
        return self._views[n, above]

    def view(self, n: fx.Node, up: fx.Node, above: Value) -> Any:
        """The view n, applied to its base in eager's layout."""
        lazy = self.lowering.env[n]
        if above == self.lowering.env[up] and inside(lazy, above):
            return lazy
        args, named = self.lowering.arguments(n)
        before = len(self.g.nodes)
        with build.building(self.g, n.name):
            out = self.lowering.lowered(n.target, (above, *args[1:]), named)
            if out is not NotImplemented and inside(out, above):
                return self.lowering.settle(n, out)
            del self.g.nodes[before:]  # the lowering computes new values, but a view is needed
            return self.lowering.extern(n, (self.strided(up), *args[1:]), named, counted=n.target not in LOWERINGS)

    def made(self, n: fx.Node) -> Value:
        """The value of a node with its own memory, in a buffer that is laid out as in eager."""
        v: Value = self.lowering.env[n]
        b = self.g.buffers[v.buffer]
        if n.op == "placeholder" or v in self.lowering.elsewhere:
            return v
        want = self.strides(n)
        if v.is_whole(b) and b.strides == want:
            return v
        if dense(v.shape, want):
            if b.strides is None:
                b.strides = as_laid(v, b, want) or contiguous_strides(b.shape)
            return v if v.numel is b.numel and lies_as(v, b, want) else self.copied(v, want)
        # There are gaps that keep their old content (a scatter into every other column): only ATen knows it.
        return self.called(n) if facts(n.target).copies_storage else self.copied(v, want)

    def called(self, n: fx.Node) -> Value:
        args, named = fx.node.map_aggregate((n.args, n.kwargs), self.argument)
        if isinstance(args[0], Value):
            self.g.buffers[args[0].buffer].alone = True
        with build.building(self.g, n.name):
            made: Value = self.lowering.extern(n, args, named)
        return made

    def argument(self, x: Any) -> Any:
        if isinstance(x, fx.Node) and isinstance(self.lowering.env[x], Value):
            return self.from_start(x)
        return self.lowering.lookup(x)

    def passed(self, x: Any) -> Any:
        """An argument of a call, with the strides that eager's kernel would see."""
        v = self.lowering.lookup(x)
        return self.strided(x) if isinstance(v, Value) and v not in self.lowering.elsewhere else v

    def from_start(self, n: fx.Node) -> Value:
        """`strided` for operators that count from the start of the storage: a copy of an input's storage is as long."""
        root = view_root(n)
        if copies_input(root):
            self.call_copy(root)
        return self.strided(n)

    def call_copy(self, root: fx.Node) -> None:
        """Let ATen make the copy of the storage."""
        if root not in self._called:
            self._called.add(root)
            self._of[root] = self.called(root)

    def copied(self, v: Value, strides: tuple[Index, ...]) -> Value:
        """Copy into a new buffer, with gaps and overlaps too: nodes were captured for exactly these strides."""
        with build.building(self.g, "copy"):
            if v in self.lowering.elsewhere:
                return self.lowering.elsewhere.copied(v, strides)
            copy = build.pointwise(v.shape, lambda i: v.load(i))
        self.g.buffers[copy.buffer].strides = strides
        return copy

    def lay_out(self, n: fx.Node) -> None:
        """Prepare n before it or a view of its memory is returned: if n is not strided in the dimensions of its root,
        lay out the root in a one-dimensional buffer."""
        root = view_root(n)
        if root is n or root.op == "placeholder":
            return
        v, base, want = self.of(n), self.of(root), self.strides(root)
        if v.buffer == base.buffer and dense(base.shape, want) and not lies_as(
                v, self.g.buffers[v.buffer], self.strides(n)):
            with build.building(self.g, "copy"):
                line = build.pointwise((base.numel,), lambda i: base.load(
                    [i[0] // s % m for s, m in zip(want, base.shape, strict=True)]))
            self.g.buffers[line.buffer].strides = (ONE,)
            at = offset_of(as_indices(dim_vars(base.shape)), want)
            self._of[root] = Value(line.buffer, base.shape, base.dtype, (at,))

    def result(self, n: fx.Node) -> Value:
        """The value that the caller gets for n. It shares memory with another node only if torch's metadata says so."""
        if n.op == "placeholder":
            return self.lowering.env[n]
        root = view_root(n)
        if is_behind(root):
            self.call_copy(root)
        if root.op != "placeholder":
            self.own(root)
        elif str(root.target).startswith("primals") and any(isinstance(s, torch.SymInt) for s in n.meta["val"].shape):
            return self.replayed(n)
        return self.strided(n)

    def replayed(self, n: fx.Node) -> Any:
        """A view of an input, made by ATen. With gradients, AOTAutograd recreates it outside of the graph, and for
        symbolic sizes it only can if ATen made the view."""
        up = viewed(n)
        if up is None:
            return self.lowering.env[n]
        above = self.replayed(up)
        if n.target is operator.getitem:
            return above[n.args[1]]
        args, named = self.lowering.arguments(n)
        with build.building(self.g, n.name):
            return self.lowering.extern(n, (above, *args[1:]), named, counted=False)

    def strided(self, n: fx.Node) -> Value:
        """The value of n in eager's memory, with eager's strides, also in dimensions of size one."""
        v: Value = self.of(n)
        want = self.strides(n)
        b = self.g.buffers[v.buffer]
        if not lies_as(v, b, want):
            return self.on_line(n, v) or self.copied(v, want)
        start = self.offset(n, v)
        whole = v.is_whole(b) or (v.shape == b.shape and v.numel is ZERO)
        if start is ZERO and whole:  # a canonical form, so that comparisons find it equal to the buffer
            v, start = self.g.whole(v.buffer), None
        return replace(v, strides=want, offset=start)

    def on_line(self, n: fx.Node, v: Value) -> Value | None:
        """A view of a root that has eager's layout in a one-dimensional buffer (`lay_out`), by its strides: index
        algebra may be unable to express it in the root's dimensions."""
        root = view_root(n)
        base, b = self.of(root), self.g.buffers[v.buffer]
        whole = root is not n and base.buffer == v.buffer and b.shape == (base.numel,) and b.strides == (ONE,)
        if not whole or v.dtype is not base.dtype or not lies_as(base, b, self.strides(root)):
            return None
        first, start = (self.lowering.c.symbols.index(x.meta["val"].storage_offset()) for x in (n, root))
        want = self.strides(n)
        at = offset_of(as_indices(dim_vars(v.shape)), want) + first - start
        return Value(v.buffer, v.shape, v.dtype, (at,), strides=want)

    def offset(self, n: fx.Node, v: Value) -> Index | None:
        """The offset of a view that may be empty, counted from the node that owns its buffer; else None."""
        if (v.numel.bounds()[0] or 0) > 0:
            return None
        base, up = n, viewed(n)
        while up is not None:
            above = self.of(up)
            if isinstance(above, Value):  # not a list
                if above.buffer != v.buffer:
                    break
                base = up
            up = viewed(up)
        if base is n:
            return None
        first, start = (self.lowering.c.symbols.index(x.meta["val"].storage_offset()) for x in (n, base))
        return first - start

    def own(self, root: fx.Node) -> None:
        v: Value = self.of(root)
        others = v.buffer in self.g.inputs or v.buffer in self.borrowed or self.lowering.elsewhere.is_constant(v)
        if others or self._owners.setdefault(v.buffer, root) is not root:
            self._of[root] = self.copied(v, self.strides(root))
            self._owners[self._of[root].buffer] = root


def inside(x: Any, above: Value) -> bool:
    """Whether a lowering's result is a view of `above`."""
    values = x if isinstance(x, (list, tuple)) else [x]
    return all(v is None or (v.buffer == above.buffer and v.dtype is above.dtype) for v in values)  # None: unused


def lies_as(v: Value, b: Buffer, want: Sequence[Index]) -> bool:
    """Whether a value has these strides in its buffer; strides of dimensions with one element do not matter."""
    have = strided(v, b)
    return have is not None and (v.numel is ZERO or all(
        h is w or n.at_most_one() for h, w, n in zip(have[0], want, v.shape, strict=True)))


def as_laid(v: Value, b: Buffer, want: Sequence[Index]) -> tuple[Index, ...] | None:
    """The strides of a buffer such that a value covering all of it (dimensions reordered, or of size one) has the
    wanted strides; None if it does not cover it."""
    places = {as_index(var): k for k, var in enumerate(dim_vars(v.shape)) if v.shape[k] is not ONE}
    out = []
    for i, n in zip(v.index, b.shape, strict=True):
        k = None if n is ONE else places.pop(i, None)
        if n is not ONE and (k is None or v.shape[k] is not n):
            return None
        out.append(ONE if k is None else want[k])
    return None if places else tuple(out)


def dense(shape: Sequence[Index], strides: Sequence[Index]) -> bool:
    """Whether strides have no overlaps and no gaps, so that a new buffer can have them."""
    left = [(n, s) for n, s in zip(shape, strides, strict=True) if n is not ONE]
    step = ONE
    while left:
        found = next((d for d in left if d[1] is step), None)
        if found is None:
            return any(n is ZERO for n in shape)
        left.remove(found)
        step = step * found[0]
    return True
