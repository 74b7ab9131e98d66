"""The streams of a captured graph: the stream of each group of nodes, and the operations that order streams.

Nodes carry the stream and the turn of the node in the user's function that they come from (compile/user_streams.py).
The nodes of a gradient have the stream of the forward node, as in eager. In each turn, the operations that order
streams come first, then the nodes. Streams and events are identified by their index in a table that each call fills
(torch_compat/streams.py), so a call may use other streams than the traced one. When a backward runs, that table holds
the objects of another call; so the numbers of its streams are saved for it like a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from flambeau.errors import UnsupportedError
from flambeau.ir.nodes import Graph, Turn, Value
from flambeau.ir.program import Record, StreamNumbers, Synchronize, Wait
from flambeau.ir.program import Step as ProgramStep
from flambeau.torch_compat.streams import CALLER, is_gradient_sum

MARK = "flambeau"  # key in a node's meta["custom"]: its turn and its stream
ORDERS = "flambeau_orders"  # key in a graph's meta: for each turn, the operations that order streams before its nodes


def mark_of(n: fx.Node) -> tuple[int, int] | None:
    found: tuple[int, int] | None = (n.meta.get("custom") or {}).get(MARK)
    return found


def is_streamed(gm: fx.GraphModule) -> bool:
    """Whether a captured graph uses streams."""
    return any(gm.meta.get(ORDERS, ())) or bool(places_of(gm.graph))


def places_of(graph: fx.Graph) -> tuple[int, ...]:
    """The streams that the graph's nodes are on, other than the caller's."""
    found = {mark[1] for n in graph.nodes if n.op == "call_function" and (mark := mark_of(n)) is not None}
    return tuple(sorted(found - {CALLER}))


def saved_streams(places: tuple[int, ...]) -> torch.Tensor:
    """A placeholder in a forward graph: the numbers of the streams at these places, saved for its backward."""
    raise NotImplementedError("this is written out where a graph is lowered")


class StreamTurns:
    """Tracks streams while the nodes of a graph are lowered in turn order."""

    def __init__(self, gm: fx.GraphModule, graph: Graph) -> None:
        self.g = graph
        self.orders = gm.meta.get(ORDERS, ())
        self.marks = dict(marks(gm.graph, bool(self.orders)))
        self.done = 0  # number of turns whose orders have become steps
        self.streams = {CALLER: 0}  # numbers of streams, by place in the table
        self.events: dict[int, int] = {}  # by place: the number of the latest record
        self.count = 0
        self.now = 0
        self.waiting: list[ProgramStep] = []  # steps that are not yet attached to a turn
        graph.turns.append(Turn(0, 0))

    def nodes(self, graph: fx.Graph) -> list[fx.Node]:
        """The graph's nodes by turn. This order is valid, as no node has an earlier turn than its arguments."""
        return sorted(graph.nodes, key=lambda n: self.marks[n][0])

    def take_saved(self, places: tuple[int, ...], argument: str) -> None:
        """Register the streams of a backward, whose numbers are passed in this argument."""
        self.g.ticket = argument
        for place in places:
            self.stream(place)

    def saved(self, places: Any) -> StreamNumbers:
        return StreamNumbers(tuple(map(self.stream, places)))

    def stream(self, place: int) -> int:
        return self.streams.setdefault(place, len(self.streams))

    def enter(self, n: fx.Node) -> None:
        """Switch to the stream of a node for everything made from here on."""
        turn, place = self.marks[n]
        self.pass_orders(turn)
        self.turn(self.stream(place))

    def pass_orders(self, turn: int) -> None:
        while self.done <= turn and self.done < len(self.orders):
            for order in self.orders[self.done]:
                self.order(*order)
            self.done += 1

    def turn(self, stream: int) -> None:
        if stream != self.now or self.waiting:
            self.now = stream
            self.g.turns.append(Turn(len(self.g.nodes), stream, tuple(self.waiting)))
            self.waiting = []

    def order(self, name: str, *args: Any) -> None:
        if name == "wait_stream":
            waiting, waited = map(self.stream, args)
            self.waiting += [Record(self.count, waited), Wait(self.count, waiting)]
            self.count += 1
        elif name == "record_event":
            event, stream = args
            self.events[event] = self.count
            self.waiting.append(Record(self.count, self.stream(stream), outside(event)))
            self.count += 1
        elif name == "wait_event":
            event, stream = args
            self.waiting.append(Wait(self.recorded(event), self.stream(stream), outside(event)))
        elif name == "synchronize_event":
            self.waiting.append(Synchronize(self.recorded(args[0]), None, outside(args[0])))
        elif name == "synchronize_stream":
            self.waiting.append(Synchronize(stream=self.stream(args[0])))
        elif name == "synchronize_device":
            if args[0] is not None and args[0].type != self.g.device:
                raise UnsupportedError(f"waiting for {args[0]} in a function on {self.g.device}")
            self.waiting.append(Synchronize())
        else:
            raise UnsupportedError(f"streams.{name} in a compiled function")

    def recorded(self, event: int) -> int | None:
        """The latest record of an event in this function; None if it was recorded before the call."""
        if event < 0:
            return self.events[event]
        return self.events.get(event)

    def end(self) -> None:
        """Return to the caller's stream, where all results must be ready, whoever copies or reads them next."""
        self.pass_orders(len(self.orders))
        self.turn(0)
        self.g.streams = list(range(len(self.streams) - 1)) if self.g.ticket else list(self.streams)[1:]
        self.g.arriving = list(self.g.inputs)
        self.g.leaving = list(dict.fromkeys(
            [*(o.buffer for o in self.g.outputs if isinstance(o, Value)), *(name for name, _ in self.g.mutations)]))


def outside(event: int) -> int | None:
    """The place of an event that the caller may know; None for the function's own event."""
    return event if event >= 0 else None


def marks(graph: fx.Graph, turns: bool) -> Iterator[tuple[fx.Node, tuple[int, int]]]:
    """The turn and stream of each node. Nodes inserted by AOTAutograd or our passes follow their arguments; a sum of
    gradients follows its user, as in eager. `turns`: keep a forward's turns; a backward has only one."""
    found: dict[fx.Node, tuple[int, int]] = {}
    for n in graph.nodes:
        mark = mark_of(n)
        given = [found[a] for a in n.all_input_nodes if a in found and a.op == "call_function"]
        if mark is None or n.op != "call_function":
            users = [m for u in n.users if (m := mark_of(u)) is not None] if is_gradient_sum(n) else []
            mark = max((m[0] for m in given), default=0), next((m[1] for m in (*users, *given)), CALLER)
        turn = mark[0] if turns else 0
        if n.op == "output":
            turn = 1 << 30
        found[n] = turn, mark[1]
        yield n, found[n]
