"""Records the operators that a function calls as an FX graph.

While torch's `make_fx` traces, its flags and patches apply to the whole process, and a compiled function that another
thread calls then refuses to run. Programs for frequent shapes are made in the background, so their calls are recorded
by a dispatch mode, which is local to its thread.

    recorder = CallRecorder(graph, decompositions)
    recorder.add(tensor, node)
    with recorder:
        result = function(tensor)
    recorder.node(result)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx

from flambeau.errors import UnsupportedError
from flambeau.torch_compat.dispatch import TorchDispatchMode
from flambeau.torch_compat.ops import OpOverload, is_composite
from flambeau.torch_compat.pytree import tree_map_only


class CallRecorder(TorchDispatchMode):
    """While active, records each call as a node, or the calls that its decomposition makes."""

    def __init__(self, graph: fx.Graph, decompositions: Mapping[OpOverload, Callable[..., Any]]) -> None:
        super().__init__()
        self.graph, self.decompositions = graph, decompositions
        self.known: dict[int, tuple[torch.Tensor, fx.Node]] = {}  # by id; holding the tensor prevents reuse of its id

    def add(self, x: torch.Tensor, node: fx.Node) -> None:
        self.known[id(x)] = x, node

    def node(self, x: torch.Tensor) -> fx.Node:
        if id(x) not in self.known:
            raise UnsupportedError("it is made with tensors of its own")
        return self.known[id(x)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if func.namespace == "prim":  # a query for a device or layout
            return func(*args, **named)
        parts = self.decompositions.get(func) or (func.decompose if is_composite(func) else None)
        if parts is not None:
            with self:
                made = parts(*args, **named)
            if made is not NotImplemented:
                return made
        given = tree_map_only(torch.Tensor, self.node, (args, named))
        made = func(*args, **named)
        call = self.graph.call_function(func)
        call.args, call.kwargs = given  # set afterwards, as torch 2.13 warns of new nodes with symbolic sizes
        call.meta["val"] = made
        if isinstance(made, torch.Tensor):
            self.add(made, call)
        elif isinstance(made, (list, tuple)):
            for k, x in enumerate(made):
                if isinstance(x, torch.Tensor):
                    part = self.graph.call_function(operator.getitem, (call, k))
                    part.meta["val"] = x
                    self.add(x, part)
        return made
