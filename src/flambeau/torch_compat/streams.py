"""Streams and events in a graph of Dynamo: which stream a node was traced on, and what orders the streams.

A stream or an event is no input of a graph. Dynamo gives each a number, its place in one table of the process, which
the code around a graph fills before each call. A node's stream is a mark in its meta. What orders streams are operators
of the namespace `streams` or, up to 2.12, methods of the objects: AOTAutograd drops the methods, and moves the
operators about. So both are read here, before AOTAutograd sees the graph, into plain tuples:

    ("wait_stream", waiting, waited), ("record_event", event, stream), ("wait_event", event, stream),
    ("synchronize_event", event), ("synchronize_stream", stream), ("synchronize_device", device or None),
    ("record_stream", node, stream)

A stream is the number of its place, CALLER the one that the caller is on; an event is the number of its place, or below
zero if the function made it and nobody else has it.
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

SPACE = "streams"  # of the operators
CALLER = -1  # in the place of a stream's number: the stream that the caller is on
NUMBERS = "stream_numbers"  # in the meta of a backward's placeholder: it has the numbers of the streams at these places
METHODS = ("wait_stream", "wait_event", "record_event", "synchronize")
SYNCHRONIZE = (torch.accelerator.synchronize, torch.cuda.synchronize)
# Calls of a body that AOTAutograd writes out where they stand, each once.
WRITTEN_OUT = ("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap")


# ---- objects of a call -------------------------------------------------------------------------------------

def object_at(place: int) -> Any:
    """The stream or the event that this thread's call was given under this number."""
    found = given.objects[place]()
    assert found is not None, f"object {place} of a call is gone"
    return found


def caller_places() -> set[int]:
    """The numbers under which the caller's stream stands: the first one from 2.13 on; before, the source says so."""
    from torch._dynamo import graph_bytecode_inputs as table
    from torch._dynamo.source import CurrentStreamSource

    first = getattr(table, "CURRENT_STREAM_INDEX", None)
    if first is not None:
        return {first}
    made = table.index_to_bytecode_constructor
    return {k for k, make in made.items() for cell in make.__closure__ or ()
            if isinstance(cell.cell_contents, CurrentStreamSource)}


def traced_objects(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that are streams and events."""
    return (n for n in graph.nodes if n.op in ("placeholder", "call_function", "call_method")
            and isinstance(n.meta.get("example_value"), (torch.Stream, torch.Event)))


def place_of(n: fx.Node) -> int | None:
    """The number of an object that a call is given; None if the function makes it."""
    is_given = getattr(n.target, "__name__", "") == "get_external_object_by_index"
    return n.args[0] if is_given else None  # type: ignore[return-value]


# ---- what a graph does with them -----------------------------------------------------------------------------


class Orders:
    """Reads the nodes of Dynamo's graphs, one after the other."""

    def __init__(self) -> None:
        self.callers = caller_places()
        self.made: dict[fx.Node, int] = {}  # events that methods return, which have no place
        self.given: dict[fx.Node, fx.Node] = {}  # arguments of a body that is called: what they are outside

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
        """The stream that a node was traced on."""
        found = stream_of(n)
        return CALLER if found is None else self.stream(found)

    def read(self, n: fx.Node) -> tuple[Any, ...] | None:
        """How a node orders streams; None if it does not."""
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
        return (name, *args)  # which nobody here knows


def stream_of(n: fx.Node) -> int | None:
    """The number of the stream that a node was traced on; None: of the one that the caller was on."""
    found: int | None = (n.meta.get("custom") or {}).get("stream")
    return found


def clear_stream(n: fx.Node, **marks: Any) -> None:
    """Other marks in the place of the stream's, which AOTAutograd hands on to what it makes of a node, and to that of
    its gradient: it has no part in streams any more."""
    custom = {k: v for k, v in (n.meta.get("custom") or {}).items() if k != "stream"}
    n.meta["custom"] = {**custom, **marks}


def operator_of_streams(target: Any) -> str | None:
    """The name of an operator that orders streams; None if it is another."""
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
    """The graphs that a node calls, and whether AOTAutograd writes them out there."""
    if n.op != "call_function" or not isinstance(n.target, HigherOrderOperator):
        return [], True
    held = [gm.get_submodule(str(a.target)) for a in n.all_input_nodes if a.op == "get_attr"
            and isinstance(getattr(gm, str(a.target), None), fx.GraphModule) and len(a.users) == 1]
    inside = [m for m in held if isinstance(m, fx.GraphModule)]
    return inside, n.target.name() in WRITTEN_OUT  # type: ignore[no-untyped-call]


def has_streams(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's, or one that it calls, has to do with streams."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(n.op != "placeholder" and stream_of(n) is not None or operator_of_streams(n.target) is not None
               or n.target in SYNCHRONIZE or n.target == "record_stream" for g in graphs for n in g.nodes) or any(
        True for g in graphs for n in traced_objects(g) if n.users)


def is_gradient_sum(n: fx.Node) -> bool:
    """Whether a node adds up gradients of one tensor."""
    return bool(n.meta.get("is_gradient_acc"))
