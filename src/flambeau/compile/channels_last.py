"""Images whose channels are contiguous, where the machine's library convolves those fastest.

Every convolution of a captured graph is given its image and its weight in that order. What follows takes it over: most
operators keep the order of what they read, the backward pass does, and what is in the order already is not copied.
Operators that could tell the difference, and the caller of the graph, are given the order they would have had.

That pays where fewer bytes are copied than the library would copy, which brings images into this order for itself, and
results back, around each convolution whose window is larger than a point. What a kernel of ours computes, it writes in
any order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from flambeau.ir.tuning import Tuning
from flambeau.ops.facts import named
from flambeau.runtime.placement import flat
from flambeau.torch_compat.fake import FakeTensor

from .regions.nodes import ENTER, EXIT, GRADIENTS, INPLACE, is_heavy, name_of, value

RARE = 50  # with more calls than these for each of its convolutions, a graph is not worth the time to look at it
ORDER = torch.channels_last


def channels_last(gm: fx.GraphModule, tuning: Tuning) -> fx.GraphModule:
    """The graph with its convolutions in that order, or as it is where that may be wrong or will not pay."""
    if not can_be_reordered(gm):
        return gm
    try:
        made = Reordered(gm, tuning)
        reordered = made.run()
    except Kept:
        return gm
    return reordered if made.saved > made.copied else gm


class Kept(Exception):
    """Why a graph keeps its order."""


def can_be_reordered(gm: fx.GraphModule) -> bool:
    calls = [n for n in gm.graph.nodes if n.op.startswith("call")]
    convolutions = [n for n in calls if name_of(n) == "conv2d"]
    if not convolutions or len(calls) > RARE * len(convolutions):
        return False
    weights = [value(argument(n, 1, "weight")) for n in convolutions]
    grouped = any(argument(n, 6, "groups") not in (None, 1) for n in convolutions)
    fixed = all(isinstance(s, int) for n in gm.graph.nodes for t in tensors(value(n)) for s in t.shape)
    fast = all(isinstance(w, FakeTensor) and multiplies_fast(w.dtype) for w in weights)
    return fast and fixed and not grouped


def multiplies_fast(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16) or (dtype is torch.float32 and torch.backends.cudnn.allow_tf32)


class Reordered:
    """Copies a graph, running it on fake tensors to see what lies how."""

    def __init__(self, gm: fx.GraphModule, tuning: Tuning) -> None:
        self.gm, self.graph, self.tuning = gm, fx.Graph(), tuning
        self.copied = self.saved = 0  # bytes of copies: those that are made, and those that the library need not make
        self.new: dict[fx.Node, fx.Node] = {}
        self.mode: Any = next(t.fake_mode for n in gm.graph.nodes for t in tensors(value(n)))
        self.entered: list[Any] = []

    def run(self) -> fx.GraphModule:
        gradients = torch.is_grad_enabled()
        try:
            for n in self.gm.graph.nodes:
                self.new[n] = self.copy(n)
        finally:
            for entered in reversed(self.entered):
                EXIT(entered)
            GRADIENTS(gradients)
        made = fx.GraphModule(self.gm, self.graph)
        made.meta = self.gm.meta
        return made

    def copy(self, n: fx.Node) -> fx.Node:
        name = name_of(n)
        if n.op in ("placeholder", "get_attr"):
            return self.graph.node_copy(n, self.new.__getitem__)
        if n.op == "output":
            return self.graph.node_copy(n, self.restored)
        if n.op not in ("call_function", "call_method"):
            raise Kept(f"{n.op} {n.target}")
        if writes(n, name) and not self.may_write(n):
            raise Kept(f"{name} writes to what may be a view")
        convolved = (argument(n, 0, "input"), argument(n, 1, "weight")) if name == "conv2d" else ()

        def given(x: fx.Node) -> fx.Node:
            return self.ordered(self.new[x], ORDER) if x in convolved else (
                self.new[x] if named(name).any_order else self.restored(x))

        made = self.graph.node_copy(n, given)
        self.evaluate(made)
        if convolved:
            self.saved += self.copies_of_library(made)
        return made

    def copies_of_library(self, n: fx.Node) -> int:
        image, weight = argument(n, 0, "input"), argument(n, 1, "weight")
        shape = value(weight).shape
        is_product = max(shape[2:]) == 1 and value(n).shape[2:] == value(image).shape[2:]
        few = max(shape[:2]) <= self.tuning.convolved_channels
        return 0 if is_product or few else sum(bytes_of(x) for x in (image, weight, n))

    def may_write(self, n: fx.Node) -> bool:
        """Whether what an operator writes to is memory that the same operators would have made."""
        at = argument(n, 0, "input")
        return isinstance(at, fx.Node) and (at.op == "placeholder" or named(name_of(at)).fresh or (
            writes(at, name_of(at)) and self.may_write(at)))

    def restored(self, n: fx.Node) -> fx.Node:
        """What it was, in the order that it had."""
        made = self.new[n]
        for old, now in zip(tensors(value(n)), tensors(value(made)), strict=True):
            if old.stride() == now.stride():
                continue
            if value(n) is not old or not old.is_contiguous():
                raise Kept(f"{n.name} has an order of its own")
            return self.ordered(made, torch.contiguous_format)
        return made

    def ordered(self, x: fx.Node, order: torch.memory_format) -> fx.Node:
        if value(x).is_contiguous(memory_format=order):
            return x
        made = self.graph.call_method("contiguous", (x,), {"memory_format": order})
        self.evaluate(made)
        if not is_computed(x):
            self.copied += bytes_of(x)
        return made

    def evaluate(self, n: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value)
        with self.mode:
            try:
                got = getattr(args[0], str(n.target))(*args[1:], **kwargs) if n.op == "call_method" else (
                    n.target(*args, **kwargs))  # type: ignore[operator]
            except Exception as e:
                raise Kept(f"{n.name} fails: {e}") from e
        if n.target is ENTER:
            self.entered.append(got)
        elif n.target is EXIT:
            self.entered.remove(args[0])
        n.meta = {**n.meta, "example_value": got}


def is_computed(n: fx.Node) -> bool:
    """Whether a kernel of ours makes it: not an input, nor a library."""
    while n.op.startswith("call") and not named(name_of(n)).fresh and not writes(n, name_of(n)) and isinstance(
            n.args[0], fx.Node):
        n = n.args[0]
    return n.op.startswith("call") and not is_heavy(n)


def bytes_of(n: fx.Node) -> int:
    return int(value(n).numel() * value(n).itemsize)


def argument(n: fx.Node, place: int, name: str) -> Any:
    return n.args[place] if len(n.args) > place else n.kwargs.get(name)


def writes(n: fx.Node, name: str) -> bool:
    return name in INPLACE or (name.endswith("_") and not name.endswith("__")) or n.kwargs.get("inplace") is True


def tensors(x: Any) -> list[FakeTensor]:
    return [t for t in flat(x) if isinstance(t, FakeTensor)]
