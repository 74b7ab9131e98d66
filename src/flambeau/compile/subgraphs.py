"""Inlines subgraphs that Dynamo calls several times.

If the user marks layers (`torch.compiler.nested_compile_region`, or `flambeau.mark_layers`), Dynamo traces a layer once
and then calls its subgraph. Inlining gives the graph that Dynamo would have made of the unmarked model, so the search
for repeated regions is free to cut at a better place than between two layers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from .regions.nodes import INSTANCE, MEMORY, held_by, memory, storage, value

INVOKE = torch.ops.higher_order.invoke_subgraph


def calls_subgraphs(gm: fx.GraphModule) -> bool:
    return any(n.target is INVOKE for n in gm.graph.nodes)


def written_out(gm: fx.GraphModule) -> fx.GraphModule:
    """Inline all subgraph calls. The instances of a subgraph share fake tensors, and each gets its own number."""
    graph, root = fx.Graph(), torch.nn.Module()
    _Copy(graph, root).copy(gm, {}, (), "")
    return fx.GraphModule(root, graph)


class _Copy:
    def __init__(self, graph: fx.Graph, root: torch.nn.Module) -> None:
        self.graph, self.root = graph, root
        self.instances = 0

    def copy(self, gm: fx.GraphModule, made: dict[fx.Node, Any], instance: tuple[int, ...], prefix: str) -> Any:
        """Append all nodes of a graph; returns its results. `made` maps the graph's placeholders to their arguments."""
        # The arguments' fake tensors, and so their storages, differ inside the subgraph.
        outside = {s: memory(made[n]) for n in gm.graph.nodes if n in made and isinstance(made[n], fx.Node)
                   and (s := storage(value(n))) is not None}
        for n in gm.graph.nodes:
            if n in made:
                continue
            if n.target is INVOKE:
                made[n] = self.call(gm, n, made)
            elif n.op == "output":
                if not instance:
                    self.graph.output(fx.node.map_arg(n.args[0], made.__getitem__))
                return fx.node.map_arg(n.args[0], made.__getitem__)
            elif n.target is operator.getitem and isinstance(several := made.get(n.args[0]), (tuple, list)):
                made[n] = several[n.args[1]]  # one result of a subgraph call
            elif n.op != "get_attr" or any(u.target is not INVOKE for u in n.users):
                made[n] = self.one(gm, n, made, instance, outside, prefix)
        raise AssertionError("a graph without an output")

    def one(self, gm: fx.GraphModule, n: fx.Node, made: dict[fx.Node, Any], instance: tuple[int, ...],
            outside: dict[int, Any], prefix: str) -> fx.Node:
        if n.op == "get_attr":
            name = prefix + str(n.target).replace(".", "_")
            setattr(self.root, name, held_by(gm, n))
            new = self.graph.get_attr(name)
            new.meta = dict(n.meta)
            return new
        new = self.graph.node_copy(n, made.__getitem__)
        if instance:
            new.meta[INSTANCE] = instance
            at = storage(value(n))
            new.meta[MEMORY] = outside.get(at, (instance, at)) if at is not None else None
        return new

    def call(self, gm: fx.GraphModule, n: fx.Node, made: dict[fx.Node, Any]) -> Any:
        self.instances += 1
        attribute: Any = n.args[0]
        body = held_by(gm, attribute)
        parameters = [m for m in body.graph.nodes if m.op == "placeholder"]
        arguments = [made[x] if isinstance(x, fx.Node) else x for x in n.args[2:]]
        return self.copy(body, dict(zip(parameters, arguments, strict=True)), (self.instances,),
                         f"{attribute.target}_")
