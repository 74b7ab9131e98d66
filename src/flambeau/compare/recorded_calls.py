"""Records the inputs and outputs of compiled graphs, and runs the same graphs again with ATen.

    with recorded() as calls:
        torch.compile(function, backend="flambeau")(x)
    calls[0].outputs                       # of our kernels
    calls[0].values()                      # of ATen, operator by operator, from the same inputs
    calls[0].probe([node, ...])            # the graph compiled with more outputs: what our kernels have there

Inputs and the state of the random generators are copied before each call, so that it can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from flambeau import pipeline
from flambeau.config import config
from flambeau.pipeline import Compiled
from flambeau.runtime.memory_layout import copied


@dataclass
class Call:
    compiled: Compiled
    inputs: list[Any]  # copies made before the call
    random: list[Any]
    outputs: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)  # the inputs after the call: some are changed in place

    @property
    def graph(self) -> fx.Graph:
        return self.compiled.gm.graph

    @property
    def backward(self) -> bool:
        return any(n.op == "placeholder" and n.name.startswith("tangents") for n in self.graph.nodes)

    def results(self) -> list[Any]:
        """The nodes that the graph returns."""
        *_, output = self.graph.nodes
        returned: Any = output.args[0]
        return list(returned)

    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def values(self) -> dict[fx.Node, Any]:
        """ATen's value of every node; inputs have their values after the run."""
        keeper = Keeper(self.compiled.gm)
        with torch.no_grad(), random_state(self.random):
            keeper.run(*self.fresh())
        return keeper.kept

    def probe(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, Any]:
        """Our kernels' values of these nodes, from a graph that is compiled to return them as well."""
        given = self.results()
        extra = [n for n in dict.fromkeys(nodes) if n not in given]
        gm = self.compiled.gm if not extra else fx.GraphModule(self.compiled.gm, longer(self.graph, extra))
        # Not compile_graph, which runs graphs with ATen if they do not compile: those would be equal and tell nothing.
        run = pipeline.boxed(pipeline.compiled(gm, self.compiled.options, self.compiled.exclude))
        with torch.no_grad(), random_state(self.random):
            outputs = run(self.fresh())
        found = dict(zip([*given, *extra], outputs, strict=True))
        return {n: found[n] for n in nodes}

    def fresh(self) -> list[Any]:
        return [kept(x) for x in self.inputs]


class Keeper(fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.kept: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.kept[n] = value = super().run_node(n)
        return value


def longer(graph: fx.Graph, extra: Sequence[fx.Node]) -> fx.Graph:
    """A copy of the graph with more results."""
    made = fx.Graph()
    to: dict[fx.Node, fx.Node] = {}
    results: Any = made.graph_copy(graph, to)
    *_, before = graph.nodes
    output = made.output((*results, *(to[n] for n in extra)))
    output.meta = dict(before.meta)
    return made


@contextmanager
def observed(observe: Callable[[Compiled], None]) -> Iterator[None]:
    """While active, call `observe` for every compiled graph. The disk cache is off: its graphs are not compiled."""
    pipeline.OBSERVERS.append(observe)
    try:
        with config.override(graph_cache=False):
            yield
    finally:
        pipeline.OBSERVERS.remove(observe)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls, in order, of all graphs that are compiled inside the block."""
    calls: list[Call] = []

    def observe(made: Compiled) -> None:
        finish = made.finish

        def finish_and_record() -> Any:
            run = finish()
            made.run = lambda args: record(made, run, args, calls)
            return made.run

        made.finish = finish_and_record  # type: ignore[method-assign]

    with observed(observe):
        yield calls


def record(made: Compiled, run: Any, args: list[Any], calls: list[Call]) -> Any:
    held = list(args)  # the run empties the list
    calls.append(call := Call(made, [kept(x) for x in held], states()))
    outputs = run(args)
    call.outputs = [kept(x) for x in outputs]
    writes = any(n.target is torch.ops.aten.copy_.default for n in call.graph.nodes)
    call.after = [kept(x) for x in held] if writes else call.inputs
    return outputs


def kept(x: Any) -> Any:
    """A copy of a tensor; other values unchanged."""
    return copied(x) if isinstance(x, torch.Tensor) else x


def states() -> list[Any]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


@contextmanager
def random_state(state: Sequence[Any]) -> Iterator[None]:
    """While active, random numbers are drawn from this state; afterwards they continue as if nothing had been drawn."""
    before = states()
    try:
        restore(state)
        yield
    finally:
        restore(before)


def restore(state: Sequence[Any]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])
