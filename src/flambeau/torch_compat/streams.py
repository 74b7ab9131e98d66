"""Streams and events in Dynamo's graphs: the stream that a node was traced on, and the operations that order streams.

Streams and events are not inputs of a graph. Dynamo gives each a number, its index in one table of the process, which
the code around a graph fills before each call. A node's stream is a mark in its meta. Streams are ordered by operators
of the namespace `streams` or, up to 2.12, by methods of the objects. AOTAutograd drops the methods, and moves the
operators. So both are read here, before AOTAutograd sees the graph, and turned into plain tuples:

    ("wait_stream", waiting, waited), ("record_event", event, stream), ("wait_event", event, stream),
    ("synchronize_event", event), ("synchronize_stream", stream), ("synchronize_device", device or None),
    ("record_stream", node, stream)

A stream is given by its number, or by CALLER for the caller's current stream. An event is given by its number, or by a
negative one if the function made it and no other code can access it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from .ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from .stream_patches import given

__all__ = ["CALLER", "NUMBERS", "Orders", "bodies_called", "clear_stream", "has_streams", "is_gradient_sum",
           "object_at", "place_of", "stream_of", "traced_objects"]

SPACE = "streams"  # the namespace of the operators
CALLER = -1  # stands for the caller's current stream
NUMBERS = "stream_numbers"  # in the meta of a backward's placeholder: the numbers of the streams at these places
METHODS = ("wait_stream", "wait_event", "record_event", "synchronize")
SYNCHRONIZE = (torch.accelerator.synchronize, torch.cuda.synchronize)
# Calls of a body that AOTAutograd inlines, each once.
WRITTEN_OUT = ("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap")


# ---- objects of a call -------------------------------------------------------------------------------------

def object_at(place: int) -> Any:
    """The stream or event that this thread's call has under this number."""
    found = given.objects[place]()
    assert found is not None, f"object {place} of a call is gone"
    return found


def caller_places() -> set[int]:
    """The numbers of the caller's stream: the first one from 2.13 on; before, those made from the current stream."""
    from torch._dynamo import graph_bytecode_inputs as table
    from torch._dynamo.source import CurrentStreamSource

    first = getattr(table, "CURRENT_STREAM_INDEX", None)
    if first is not None:
        return {first}
    made = table.index_to_bytecode_constructor
    return {k for k, make in made.items() for cell in make.__closure__ or ()
            if isinstance(cell.cell_contents, CurrentStreamSource)}


def traced_objects(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes whose values are streams or events."""
    return (n for n in graph.nodes if n.op in ("placeholder", "call_function", "call_method")
            and isinstance(n.meta.get("example_value"), (torch.Stream, torch.Event)))


def place_of(n: fx.Node) -> int | None:
    """The number of an object that is passed to a call; None if the function makes it."""
    is_given = getattr(n.target, "__name__", "") == "get_external_object_by_index"
    return n.args[0] if is_given else None  # type: ignore[return-value]


# ---- how a graph uses them -----------------------------------------------------------------------------------


class Orders:
    """Reads the stream operations in the nodes of Dynamo's graphs, one after the other."""

    def __init__(self) -> None:
        self.callers = caller_places()
        self.made: dict[fx.Node, int] = {}  # events returned by methods, which have no number
        self.given: dict[fx.Node, fx.Node] = {}  # parameters of a called body, and their arguments outside

    def stream(self, place: Any) -> int:
        found = place_of(self.outside(place)) if isinstance(place, fx.Node) else place
        assert isinstance(found, int), f"{place} has no place among the objects of a call"
        return CALLER if found in self.callers else found

    def event(self, place: Any) -> int:
        if not isinstance(place, fx.Node):
            return int(place)
        place = self.outside(place)
        found = place_of(place)
        return found if found is not None else self.made.setdefault(place, -1 - len(self.made))

    def outside(self, n: fx.Node) -> fx.Node:
        while n in self.given:
            n = self.given[n]
        return n

    def stream_of(self, n: fx.Node) -> int:
        """The number of the stream that a node was traced on."""
        found = stream_of(n)
        return CALLER if found is None else self.stream(found)

    def read(self, n: fx.Node) -> tuple[Any, ...] | None:
        """The stream operation that a node performs; None if it performs none."""
        name, args = operator_of_streams(n.target), n.args
        if name is not None:
            return self.by_operator(name, args)
        if n.op == "call_function" and n.target in SYNCHRONIZE:
            return "synchronize_device", device_of(args[0] if args else n.kwargs.get("device"))
        if n.op != "call_method" or not args:
            return None
        if n.target == "record_stream":
            return "record_stream", args[0], self.stream(args[1])
        of = args[0].meta.get("example_value") if isinstance(args[0], fx.Node) else None
        if not isinstance(of, (torch.Stream, torch.Event)) or n.target not in METHODS:
            return None
        if n.target == "wait_stream":
            return n.target, self.stream(args[0]), self.stream(args[1])
        if n.target == "synchronize":
            of_event = isinstance(of, torch.Event)
            return ("synchronize_event", self.event(args[0])) if of_event else (
                "synchronize_stream", self.stream(args[0]))
        given = args[1] if len(args) > 1 else n.kwargs.get("event", n)
        return str(n.target), self.event(given), self.stream(args[0])

    def by_operator(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "record_stream":
            return name, args[0], self.stream(args[1])
        if name in ("wait_stream", "synchronize_stream"):
            return name, *map(self.stream, args)
        if name in ("record_event", "wait_event"):
            return name, self.event(args[0]), self.stream(args[1])
        if name == "synchronize_event":
            return name, self.event(args[0])
        if name == "synchronize_device":
            return name, torch.device(*args)
        return (name, *args)  # an operator unknown to this code


def stream_of(n: fx.Node) -> int | None:
    """The number of the stream that a node was traced on; None for the caller's current stream."""
    found: int | None = (n.meta.get("custom") or {}).get("stream")
    return found


def clear_stream(n: fx.Node, **marks: Any) -> None:
    """Replace a node's stream mark by other marks, which AOTAutograd copies to the nodes it makes from this one, and to
    those of its gradient. AOTAutograd then no longer handles streams."""
    custom = {k: v for k, v in (n.meta.get("custom") or {}).items() if k != "stream"}
    n.meta["custom"] = {**custom, **marks}


def operator_of_streams(target: Any) -> str | None:
    """The name of an operator that orders streams; None for any other operator."""
    if isinstance(target, OpOverload):
        target = target.overloadpacket
    if not isinstance(target, OpOverloadPacket):
        return None
    space, _, name = target._qualified_op_name.partition("::")
    return name if space == SPACE else None


def device_of(given: Any) -> torch.device | None:
    if isinstance(given, int):
        here = torch.accelerator.current_accelerator()
        return torch.device("cpu" if here is None else here.type, given)
    return torch.device(given) if given is not None else None


def bodies_called(gm: fx.GraphModule, n: fx.Node) -> tuple[list[fx.GraphModule], bool]:
    """The graphs that a node calls, and whether AOTAutograd inlines them."""
    if n.op != "call_function" or not isinstance(n.target, HigherOrderOperator):
        return [], True
    held = [gm.get_submodule(str(a.target)) for a in n.all_input_nodes if a.op == "get_attr"
            and isinstance(getattr(gm, str(a.target), None), fx.GraphModule) and len(a.users) == 1]
    inside = [m for m in held if isinstance(m, fx.GraphModule)]
    return inside, n.target.name() in WRITTEN_OUT  # type: ignore[no-untyped-call]


def has_streams(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph, or one that it calls, uses streams."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(n.op != "placeholder" and stream_of(n) is not None or operator_of_streams(n.target) is not None
               or n.target in SYNCHRONIZE or n.target == "record_stream" for g in graphs for n in g.nodes) or any(
        True for g in graphs for n in traced_objects(g) if n.users)


def is_gradient_sum(n: fx.Node) -> bool:
    """Whether a node adds gradients of one tensor."""
    return bool(n.meta.get("is_gradient_acc"))
