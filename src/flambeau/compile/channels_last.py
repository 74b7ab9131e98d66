"""Converts images to channels-last layout if the target's convolutions are fastest with it.

Every convolution of a captured graph gets its image and its weight in channels-last order. Later operators inherit the
order: most keep the order of their inputs, the backward pass does too, and tensors already in that order are not
copied. Operators that could observe the difference, and the caller of the graph, get the original order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx

from flambeau.ops.facts import named
from flambeau.runtime.placement import flat
from flambeau.targets.base import Convolution, Target
from flambeau.torch_compat.fake import FakeTensor

from .regions.nodes import ENTER, EXIT, GRADIENTS, INPLACE, is_heavy, name_of, value

ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(gm: fx.GraphModule, target: Target) -> fx.GraphModule:
    """The graph with the convolutions chosen by the target in channels-last order, unless that could be wrong."""
    convolutions = [n for n in gm.graph.nodes if n.op == "call_function" and named(name_of(n)).contracts]
    if not convolutions or not all(
            isinstance(s, int) for n in gm.graph.nodes for t in tensors(value(n)) for s in t.shape):
        return gm
    found = {n: c for n in convolutions if (c := convolution(n)) is not None}
    saved = target.channels_last([*found.values()], sum(n.op.startswith("call") for n in gm.graph.nodes))
    if not any(saved.values()):
        return gm
    wanted = {n: saved[c] for n, c in found.items() if c in saved}
    made = Reordered(gm, wanted)
    try:
        reordered = made.run()
    except Kept:
        return gm
    return reordered if sum(wanted.values()) > made.copied else gm


class Kept(Exception):
    """The reason why a graph keeps its original order."""


def convolution(n: fx.Node) -> Convolution | None:
    """A description of the node's convolution; None unless it convolves a batch of images or volumes."""
    name = name_of(n)
    if not name.startswith("conv"):
        return None
    image, weight = (value(x) if isinstance(x, fx.Node) else None for x in operands(n))
    if not isinstance(image, FakeTensor) or not isinstance(weight, FakeTensor) or image.dim() != weight.dim():
        return None
    first, second, *window = weight.shape
    moved = sum(t.numel() * t.itemsize for t in (image, weight, *tensors(value(n))))
    return Convolution(name, weight.dtype, (first, second), tuple(window), argument(n, 6, "groups") or 1, moved,
                       value(n).shape[2:] == image.shape[2:] and set(window) == {1})


def operands(n: fx.Node) -> tuple[Any, Any]:
    return argument(n, 0, "input"), argument(n, 1, "weight")


class Reordered:
    """Copies a graph node by node, and evaluates each copy on fake tensors to learn its strides."""

    def __init__(self, gm: fx.GraphModule, wanted: Collection[fx.Node]) -> None:
        self.gm, self.graph, self.wanted = gm, fx.Graph(), wanted
        self.copied = 0  # bytes
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
        convolved = operands(n) if n in self.wanted else ()

        def given(x: fx.Node) -> fx.Node:
            return self.ordered(self.new[x], ORDERS[value(x).dim()]) if x in convolved else (
                self.new[x] if named(name).any_order else self.restored(x))

        made = self.graph.node_copy(n, given)
        self.evaluate(made)
        return made

    def may_write(self, n: fx.Node) -> bool:
        """Whether the memory that an operator writes to would be fresh in any layout, and is not possibly a view."""
        at = argument(n, 0, "input")
        return isinstance(at, fx.Node) and (at.op == "placeholder" or named(name_of(at)).fresh or (
            writes(at, name_of(at)) and self.may_write(at)))

    def restored(self, n: fx.Node) -> fx.Node:
        """Converts a value back to its original memory order."""
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
        given = x
        if value(x).requires_grad and value(x).is_contiguous():  # a view of a view makes the gradient contiguous too
            for shape in ((-1,), tuple(value(x).shape)):
                given = self.graph.call_method("view", (given, *shape))
                self.evaluate(given)
        made = self.graph.call_method("contiguous", (given,), {"memory_format": order})
        self.evaluate(made)
        if not is_computed(x):
            self.copied += value(x).numel() * value(x).itemsize
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
    """Whether one of our kernels makes the value, and so can write it in any order (not an input or a library call)."""
    while n.op.startswith("call") and not named(name_of(n)).fresh and not writes(n, name_of(n)) and isinstance(
            n.args[0], fx.Node):
        n = n.args[0]
    return n.op.startswith("call") and not is_heavy(n)


def argument(n: fx.Node, place: int, name: str) -> Any:
    return n.args[place] if len(n.args) > place else n.kwargs.get(name)


def writes(n: fx.Node, name: str) -> bool:
    return name in INPLACE or (name.endswith("_") and not name.endswith("__")) or n.kwargs.get("inplace") is True


def tensors(x: Any) -> list[FakeTensor]:
    return [t for t in flat(x) if isinstance(t, FakeTensor)]
