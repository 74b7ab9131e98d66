"""Sizes and modelled times of a graph's nodes before they are scheduled: what kernels store, read and multiply."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from flambeau.ir.tuning import Tuning
from flambeau.ops.facts import facts
from flambeau.runtime.placement import flat
from flambeau.torch_compat.ops import OpOverload


class Machine:
    """Estimates the time of a node from the bytes it moves and the operations of its products."""

    def __init__(self, tuning: Tuning, rate: float) -> None:
        self.tuning, self.rate = tuning, rate  # bytes per nanosecond to the host

    def time(self, n: fx.Node) -> float:
        if n.op != "call_function" or not isinstance(n.target, OpOverload) or facts(n.target).view:
            return 0.0
        made = sum(map(size_of, flat(n.meta.get("val")))) if is_stored(n) else 0
        read = sum(size_of(t) for a in n.all_input_nodes if is_stored(a) for t in flat(a.meta.get("val")))
        if not is_product(n):
            return (made + read) / self.tuning.memory_rate
        wide = max((t.itemsize for t in flat(n.meta.get("val")) if isinstance(t, torch.Tensor)), default=2) > 2
        rate = self.tuning.product_rate / (8 if wide else 1)
        return self.tuning.launch_recorded + max((made + read) / self.tuning.memory_rate, operations(n) / rate)


def is_product(n: fx.Node) -> bool:
    return isinstance(n.target, OpOverload) and n.target.overloadpacket in flop_registry


def is_stored(n: fx.Node) -> bool:
    """Whether a kernel stores the node's value: results of products, and what products or callers read. Others fuse."""
    if n.op == "placeholder" or is_product(n):
        return True
    if n.target is operator.getitem or is_view(n):
        return is_stored(n.all_input_nodes[0])
    return any(u.op == "output" or is_product(u) or ((is_view(u) or u.target is operator.getitem) and read_whole(u))
               for u in n.users)


def read_whole(n: fx.Node) -> bool:
    """Whether a product or the caller reads a view."""
    return any(u.op == "output" or is_product(u) or (is_view(u) and read_whole(u)) for u in n.users)


def size_of(t: Any) -> int:
    known = isinstance(t, torch.Tensor) and all(isinstance(s, int) for s in t.shape)
    return t.numel() * t.itemsize if known else 0


def operations(n: fx.Node) -> float:
    def value(x: Any) -> Any:
        return x.meta.get("val") if isinstance(x, fx.Node) else x

    try:
        args, kwargs = fx.node.map_aggregate(n.args, value), fx.node.map_aggregate(n.kwargs, value)
        return float(flop_registry[n.target.overloadpacket](*args, **kwargs, out_val=n.meta["val"]))  # type: ignore[union-attr]
    except Exception:  # the formula does not handle these shapes
        return 0.0


def base_of(n: fx.Node) -> fx.Node:
    """The node that owns the memory of a view."""
    while is_view(n) or (n.target is operator.getitem and is_view(n.args[0])):  # e.g. one result of `split`
        n = n.all_input_nodes[0]
    return n


def views_of(n: fx.Node) -> Iterator[fx.Node]:
    """The node and the views between it and its memory."""
    base = base_of(n)
    while n is not base:
        yield n
        n = n.all_input_nodes[0]


def is_view(n: Any) -> bool:
    return (isinstance(n, fx.Node) and isinstance(n.target, OpOverload) and facts(n.target).view
            and bool(n.all_input_nodes))
