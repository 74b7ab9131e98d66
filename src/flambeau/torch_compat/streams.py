"""Streams and events in a graph: how Dynamo and AOTAutograd represent them.

A stream or an event is no input of a graph. Dynamo gives each a number, its place in one table of the process, which
the code around a graph fills before each call; the current stream of the caller has number 0 (from 2.13 on; before, it
has none, and most methods of streams vanish on the way). A node's stream is a mark in its meta. What orders streams
are operators of the namespace `streams`, most of them inside of `control_deps`, whose only use is to say what must
stand before them: it calls a graph of one node and passes its other arguments on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx

from .ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["CURRENT", "bodies", "carries_streams", "is_ordered_call", "method_of_stream", "object_at", "ordering",
           "orders_streams", "remembered_by_thread", "stream_of", "uses_streams"]

SPACE = "streams"  # of the operators
CURRENT = 0


def carries_streams() -> bool:
    """Whether this torch hands over all that a function does with streams."""
    from torch._dynamo import graph_bytecode_inputs

    return getattr(graph_bytecode_inputs, "CURRENT_STREAM_INDEX", None) == CURRENT


_given = threading.local()


def remembered_by_thread() -> tuple[Any, str, Callable[..., None]]:
    """The change of patches.OBJECTS. What a call is given goes into one table of the process, and another thread's call
    may come between: so each thread remembers its own."""
    from torch._dynamo import graph_bytecode_inputs

    store = graph_bytecode_inputs.store_user_object_weakrefs

    def stored(*args: Any) -> None:
        store(*args)
        _given.objects = [weakref.ref(x) for x in args]

    return graph_bytecode_inputs, "store_user_object_weakrefs", stored


def object_at(place: int) -> Any:
    """The stream or the event that this thread's call was given under this number."""
    found = _given.objects[place]()
    assert found is not None, f"object {place} of a call is gone"
    return found


def stream_of(n: fx.Node) -> int | None:
    """The number of the stream that a node was traced on; None: of the one that the caller was on."""
    found: int | None = (n.meta.get("custom") or {}).get("stream")
    return found


def ordering(target: Any) -> str | None:
    """The name of an operator that orders streams; None if it is another."""
    if isinstance(target, OpOverload):
        target = target.overloadpacket
    if not isinstance(target, OpOverloadPacket):
        return None
    space, _, name = target._qualified_op_name.partition("::")
    return name if space == SPACE else None


def is_ordered_call(n: fx.Node) -> bool:
    """Whether a node is `control_deps`: (what stands before, a graph, the graph's arguments ...)."""
    target: Any = n.target
    return isinstance(target, HigherOrderOperator) and bool(target.name() == "control_deps")  # type: ignore[no-untyped-call]


def orders_streams(n: fx.Node) -> bool:
    return ordering(n.target) is not None or is_ordered_call(n)


def method_of_stream(n: fx.Node) -> str | None:
    """The method of a stream or an event that a node of Dynamo's graph calls; None if it is another node.

    AOTAutograd drops it: it makes no tensor, and nobody says that it has an effect.
    """
    if n.op != "call_method" or not n.args or not isinstance(n.args[0], fx.Node):
        return None
    given = n.args[0].meta.get("example_value")
    return f"{type(given).__name__}.{n.target}" if isinstance(given, (torch.Stream, torch.Event)) else None


def uses_streams(graph: fx.Graph) -> bool:
    """Whether one of a graph's nodes is marked with a stream, or orders streams."""
    return any(n.op != "placeholder" and stream_of(n) not in (None, CURRENT) for n in graph.nodes) or any(
        n.op == "call_function" and orders_streams(n) or method_of_stream(n) is not None for n in graph.nodes)


def bodies(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graphs that its nodes call, but for those of `control_deps`."""
    own = {gm.get_submodule(str(n.args[1].target)) for n in gm.graph.nodes
           if n.op == "call_function" and is_ordered_call(n)}
    yield from (m for m in gm.modules() if isinstance(m, fx.GraphModule) and m is not gm and m not in own)

