"""Turns pieces of a graph into separate graphs, and makes the function that calls them in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from flambeau.runtime.progress import progress
from flambeau.torch_compat.dynamo import innermost_fn
from flambeau.torch_compat.fake import FakeTensor

from .cut import Piece, Pieces
from .nodes import ENTER, EXIT, GRADIENTS, INSTANCE, held_by, value


def in_pieces(found: Pieces, compile_piece: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
              ) -> Callable[..., Any]:
    """Compile each distinct piece once, as a graph of its own; returns a function that runs the whole graph."""
    compiled: dict[Any, Callable[..., Any]] = {}
    with progress("compiling parts", len({p.key for p in found.pieces})) as step:
        for p in found.pieces:
            if p.key not in compiled:
                start = time.perf_counter()
                inputs = [example(found.gm, x) for x in p.inputs]
                # The whole function is hidden from Dynamo, so its parts need not be.
                compiled[p.key] = innermost_fn(compile_piece(outline(found.gm, p, found.ambient), inputs))
                found.seconds[p.key] = time.perf_counter() - start
                step()
    return link(found, [compiled[p.key] for p in found.pieces])


def outline(gm: fx.GraphModule, p: Piece, ambient: dict[fx.Node, Any]) -> fx.GraphModule:
    """Copy a piece into a graph of its own, under the modes in effect at each of its nodes."""
    graph, root = fx.Graph(), torch.nn.Module()
    made: dict[fx.Node, Any] = {}
    for k, x in enumerate(p.inputs):
        made[x] = graph.placeholder(f"given_{k}")
        made[x].meta["example_value"] = example(gm, x)
    modes = Modes(graph)
    for n in p.nodes:
        modes.change(*ambient[n])
        for x in n.all_input_nodes:
            bring(gm, graph, x, made, root)
        made[n] = graph.node_copy(n, made.__getitem__)
    modes.change((), None)
    graph.output(tuple(made[n] for n in p.outputs))
    return fx.GraphModule(root, graph)


def bring(gm: fx.GraphModule, graph: fx.Graph, x: fx.Node, made: dict[fx.Node, Any], root: torch.nn.Module) -> None:
    """Copy into `graph` the body of a higher-order operator, or a number that is computed from arguments."""
    if x in made:
        return
    if isinstance(value(x), int):
        made[x] = value(x)
        return
    if x.op == "get_attr":
        setattr(root, str(x.target), held_by(gm, x))
    for y in x.all_input_nodes:
        bring(gm, graph, y, made, root)
    made[x] = graph.node_copy(x, made.__getitem__)


class Modes:
    """Inserts the nodes that switch autocast and the grad mode from one state to the next, and back at the end."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.opened: list[tuple[Any, fx.Node]] = []
        self.gradients: bool | None = None

    def change(self, autocasts: tuple[Any, ...], gradients: bool | None) -> None:
        same = 0
        while same < min(len(self.opened), len(autocasts)) and self.opened[same][0] == autocasts[same]:
            same += 1
        while len(self.opened) > same:
            self.graph.call_function(EXIT, (self.opened.pop()[1],))
        for args in autocasts[same:]:
            self.opened.append((args, self.graph.call_function(ENTER, args)))
        if gradients != self.gradients:
            self.graph.call_function(GRADIENTS, (torch.is_grad_enabled() if gradients is None else gradients,))
            self.gradients = gradients


def example(gm: fx.GraphModule, n: fx.Node) -> Any:
    """The example value of a piece's input for AOTAutograd. Tensors passed between pieces do not count as views."""
    if n.op == "get_attr":
        return held_by(gm, n)
    v = value(n)
    if not isinstance(v, torch.Tensor) or n.op == "placeholder":
        return v
    if INSTANCE in n.meta and isinstance(v, FakeTensor):  # other instances share this fake tensor
        with v.fake_mode:
            return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device,
                                       requires_grad=v.requires_grad)
    return v if v.requires_grad else v.detach()


# ---- the function that calls the pieces --------------------------------------------------------------------


def link(cut: Pieces, compiled: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The function of the whole graph: straight-line Python that calls the pieces, and frees values early."""
    w = _Writer(cut.gm)
    last = {n: k for k, p in enumerate(cut.pieces) for n in (*p.outputs, *p.inputs)}  # the last piece that uses it
    last |= dict.fromkeys(w.output.all_input_nodes, len(cut.pieces))
    for k, (p, f) in enumerate(zip(cut.pieces, compiled)):
        w.call(p, f, [n for n in (*p.inputs, *p.outputs) if last[n] == k])
    return w.function()


class _Writer:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.scope: dict[str, Any] = {}
        self.lines: list[str] = []
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.names = {n: f"a{k}" for k, n in enumerate(placeholders)}
        self.parameters = ", ".join(self.names.values())
        self.output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")

    def name(self, n: fx.Node) -> str:
        """The variable that holds a value. If no piece computes it, it is a tensor held by the graph or a number."""
        if n not in self.names:
            if n.op == "get_attr":
                self.names[n] = self.constant(held_by(self.gm, n))
            else:
                text = self.number(n)
                self.names[n] = f"v{len(self.names)}"
                self.lines.append(f"{self.names[n]} = {text}")
        return self.names[n]

    def number(self, n: fx.Node) -> str:
        args = [self.text(a) for a in n.args]
        if isinstance(value(n), int):
            return repr(value(n))
        if n.op == "call_method":
            return f"{args[0]}.{n.target}({', '.join(args[1:])})"
        return f"{self.constant(n.target)}({', '.join(args)})"

    def constant(self, x: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = x
        return name

    def text(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return self.name(x)
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self.text(y)}, " for y in x)
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        return repr(x) if x is None or isinstance(x, (bool, int)) else self.constant(x)

    def call(self, p: Piece, f: Callable[..., Any], dead: Sequence[fx.Node]) -> None:
        args = ", ".join(map(self.name, p.inputs))
        self.names |= {n: f"v{len(self.names) + k}" for k, n in enumerate(p.outputs)}
        outs = "".join(f"{self.names[n]}, " for n in p.outputs)
        self.lines.append(f"{outs + '= ' if outs else ''}{self.constant(f)}({args})")
        gone = [self.name(n) for n in dict.fromkeys(dead) if n.op != "get_attr"]
        if gone:
            self.lines.append(f"del {', '.join(gone)}")

    def function(self) -> Callable[..., Any]:
        self.lines.append(f"return {self.text(self.output.args[0])}")
        source = f"def run({self.parameters}):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(compile(source, "<flambeau regions>", "exec"), self.scope)
        return self.scope["run"]
