"""The streams of a captured graph: the stream of each group of nodes, and what orders the streams.

A node goes to the stream that it was traced on, and events stay where they stood between nodes: the order of the nodes
is that of the function. Streams and events are known by their places in a table that each call fills (torch_compat/
streams.py), so that a call may bring other streams than the one that was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx

from flambeau.errors import UnsupportedError
from flambeau.ir.nodes import Graph, Turn, Value
from flambeau.ir.program import Keep, Record, Synchronize, Wait
from flambeau.ir.program import Step as ProgramStep
from flambeau.torch_compat.streams import CURRENT, is_ordered_call, ordering, stream_of


class StreamTurns:
    """Follows the nodes of a graph that uses streams. `lookup`: what an argument of a node became."""

    def __init__(self, gm: fx.GraphModule, graph: Graph, lookup: Callable[[Any], Any]) -> None:
        self.gm, self.g, self.lookup = gm, graph, lookup
        self.streams = {CURRENT: 0}  # by their places in the table
        self.events: dict[int, int] = {}  # by place: what was recorded last
        self.count = 0
        self.now = 0
        self.waiting: list[ProgramStep] = []  # that no turn has yet
        graph.turns.append(Turn(0, 0))

    def stream(self, place: int) -> int:
        return self.streams.setdefault(place, len(self.streams))

    def enter(self, n: fx.Node) -> None:
        """What is made from here on goes to the node's stream."""
        place = stream_of(n)
        self.turn(self.stream(CURRENT if place is None else place))

    def turn(self, stream: int) -> None:
        if stream != self.now or self.waiting:
            self.now = stream
            self.g.turns.append(Turn(len(self.g.nodes), stream, tuple(self.waiting)))
            self.waiting = []

    def ordered(self, n: fx.Node) -> Any:
        """What becomes of a node that orders streams."""
        if not is_ordered_call(n):
            self.order(ordering(n.target), [self.lookup(a) for a in n.args])
            return None
        _, body, *given = n.args
        values = [self.lookup(a) for a in given]
        inside: Any = self.gm.get_submodule(str(body.target)).graph  # type: ignore[union-attr]
        known = dict(zip((m for m in inside.nodes if m.op == "placeholder"), values, strict=False))
        for m in inside.nodes:
            if m.op == "call_function":
                if (name := ordering(m.target)) is None:
                    raise UnsupportedError(f"{m.target} between streams")
                self.order(name, [known[a] if isinstance(a, fx.Node) else a for a in m.args])
        return [None, *values]

    def order(self, name: str | None, args: list[Any]) -> None:
        if name == "wait_stream":
            waiting, waited = map(self.stream, args)
            self.waiting += [Record(self.count, waited), Wait(self.count, waiting)]
            self.count += 1
        elif name == "record_event":
            event, stream = args
            self.events[event] = self.count
            self.waiting.append(Record(self.count, self.stream(stream), event))
            self.count += 1
        elif name == "wait_event":
            event, stream = args
            self.waiting.append(Wait(self.events.get(event), self.stream(stream), event))
        elif name == "synchronize_event":
            self.waiting.append(Synchronize(self.events.get(args[0]), None, args[0]))
        elif name == "synchronize_stream":
            self.waiting.append(Synchronize(stream=self.stream(args[0])))
        elif name == "synchronize_device":
            if args[0] != self.g.device:
                raise UnsupportedError(f"waiting for {args[0]} in a function on {self.g.device}")
            self.waiting.append(Synchronize())
        elif name == "record_stream":
            if isinstance(args[0], Value):
                self.waiting.append(Keep(args[0].buffer, self.stream(args[1])))
        else:
            raise UnsupportedError(f"streams.{name} in a compiled function")

    def end(self) -> None:
        """The caller's stream again; results are ready there, whoever copies or reads them next. What inputs become is
        written by the end of a graph, wherever the function did it: so all streams wait for one another then."""
        if self.g.mutations:
            steps = [*(s for t in self.g.turns for s in t.steps), *self.waiting]
            if any(isinstance(s, Synchronize) for s in steps):
                raise UnsupportedError("a function that writes to its inputs, and waits for a stream on the host",
                                       hint="wait behind the function")
            sides = range(1, len(self.streams))
            for pairs in ([(k, 0) for k in sides], [(0, k) for k in sides]):
                for waited, waiting in pairs:
                    self.waiting += [Record(self.count, waited), Wait(self.count, waiting)]
                    self.count += 1
        self.turn(0)
        self.g.streams = list(self.streams)[1:]
        self.g.arriving = list(self.g.inputs)
        self.g.leaving = list(dict.fromkeys(
            [*(o.buffer for o in self.g.outputs if isinstance(o, Value)), *(name for name, _ in self.g.mutations)]))
