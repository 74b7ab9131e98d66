"""Takes a function's use of streams out of its graph before AOTAutograd sees it.

AOTAutograd moves the operations that order streams, adds waits of its own and drops others, and each release does so
differently. So it is given a graph without them: each node is marked with the stream that it was traced on and with its
turn, the number of ordering operations before it. AOTAutograd copies both marks to the nodes that it makes from a node,
and to those of its gradient. The ordering operations are kept beside the graph, by turn, and are put back when the
graph is lowered (capture/stream_turns.py).

A function for which this is impossible (streams inside of a loop, say) still runs correctly: all of it on the caller's
stream, which first waits for the other streams; afterwards they wait for it. One warning gives the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from flambeau.capture.stream_turns import MARK, ORDERS, is_streamed, places_of, saved_streams
from flambeau.config import config
from flambeau.errors import OptionError, UnsupportedError
from flambeau.ir.program import Fence
from flambeau.runtime.streams.lookup import fenced as fence_around
from flambeau.torch_compat.aot import saved_output
from flambeau.torch_compat.fake import TracingContext, detect_fake_mode
from flambeau.torch_compat.stream_patches import OBJECTS
from flambeau.torch_compat.streams import (
    CALLER,
    NUMBERS,
    Orders,
    bodies_called,
    clear_stream,
    has_streams,
    object_at,
    stream_of,
    traced_objects,
)

Order = tuple[Any, ...]
OUTSIDE = "call it outside of the compiled function, or put torch._dynamo.graph_break() before it"


@dataclass
class StreamUse:
    """A function's operations on streams and events, which are identified by their index in a call's objects."""

    orders: list[list[Order]] = field(default_factory=lambda: [[]])  # the operations before the nodes of each turn
    streams: set[int] = field(default_factory=set)
    keeps: list[tuple[fx.Node, int]] = field(default_factory=list)  # calls of record_stream: tensor and stream
    refusal: str = ""  # the reason if some use cannot be preserved

    def all_orders(self) -> list[Order]:
        return [o for some in self.orders for o in some]


def take_streams(gm: fx.GraphModule) -> StreamUse | None:
    """Remove stream operations from the graph and return them; None if there are none. Raises UnsupportedError for uses
    that cannot run at all."""
    if not has_streams(gm):
        return None
    if not config.patches:
        raise UnsupportedError("streams inside a compiled function, where torch is not to be changed "
                               "(FLAMBEAU_PATCHES=0)", hint=OUTSIDE)
    if not OBJECTS.is_applied:
        OBJECTS.apply()
    taking = Taking()
    taking.graph(gm)
    use = taking.use
    for graph, n in reversed(taking.erased):
        graph.erase_node(n)
    for n, turn, stream in taking.marked:
        clear_stream(n, **({} if use.refusal else {MARK: (turn, stream)}))
    for m in gm.modules():
        if isinstance(m, fx.GraphModule):
            m.recompile()
    if not use.refusal:
        gm.meta[ORDERS] = tuple(map(tuple, use.orders))
    return use


class Taking:
    def __init__(self) -> None:
        self.use, self.read = StreamUse(), Orders()
        self.marked: list[tuple[fx.Node, int, int]] = []
        self.erased: list[tuple[fx.Graph, fx.Node]] = []
        self.is_new = True  # the turn has no nodes yet

    def graph(self, gm: fx.GraphModule) -> None:
        objects = set(traced_objects(gm.graph))
        for n in gm.graph.nodes:
            order = self.read.read(n) if n.op in ("call_function", "call_method") else None
            if order is not None:
                self.order(n, order)
            elif n in objects:
                self.erased.append((gm.graph, n))
                continue
            else:
                if any(a in objects for a in n.all_input_nodes):
                    self.pass_in(gm, n, objects)
                self.plain(gm, n)
                continue
            self.erased.append((gm.graph, n))

    def pass_in(self, gm: fx.GraphModule, n: fx.Node, objects: set[fx.Node]) -> None:
        """Pass streams into a called body: up to torch 2.12 they are its arguments."""
        bodies, written_out = bodies_called(gm, n)
        if len(bodies) == 1 and written_out and isinstance(n.args[0], fx.Node):
            for inside, a in zip(bodies[0].graph.find_nodes(op="placeholder"), n.args[1:], strict=True):
                if a in objects:
                    self.read.given[inside] = a  # type: ignore[assignment]
            n.args = tuple(a for a in n.args if a not in objects)
            return
        of = next(a.meta["example_value"] for a in n.all_input_nodes if "example_value" in a.meta)
        raise UnsupportedError(f"{type(of).__name__}.{getattr(n.target, '__name__', n.target)}() inside a compiled "
                               "function would not run with it", hint=OUTSIDE)

    def order(self, n: fx.Node, order: Order) -> None:
        name, *args = order
        if name == "record_stream":
            self.use.keeps.append((args[0], args[1]))
            self.use.streams.add(args[1])
            return
        if not self.is_new:
            self.use.orders.append([])
            self.is_new = True
        self.use.orders[-1].append(order)
        self.use.streams.update(streams_of(order))

    def plain(self, gm: fx.GraphModule, n: fx.Node) -> None:
        bodies, written_out = bodies_called(gm, n)
        for body in bodies:
            if has_streams(body):
                if not written_out:
                    self.use.refusal = f"streams inside of {n.target}"
                self.graph(body)
            else:  # the body runs on the stream that it is called on
                for m in body.graph.nodes:
                    self.mark(m, self.read.stream_of(n))
        if n.op not in ("placeholder", "get_attr", "output"):
            self.mark(n, self.read.stream_of(n))
        elif stream_of(n) is not None:
            clear_stream(n)

    def mark(self, n: fx.Node, stream: int) -> None:
        self.marked.append((n, len(self.use.orders) - 1, stream))
        self.use.streams.add(stream)
        self.is_new = False


def streams_of(order: Order) -> list[int]:
    """The streams that an ordering operation names."""
    name, *args = order
    return {"wait_stream": args, "record_event": args[1:], "wait_event": args[1:],
            "synchronize_stream": args}.get(name, [])


# ---- around a compiled function ------------------------------------------------------------------------------


def compiled_with_streams(compile_graph: Callable[[], Callable[..., Any]], gm: fx.GraphModule, use: StreamUse
                          ) -> Callable[..., Any]:
    """Compile gm, whose stream operations were removed, with `compile_graph`, so that streams are handled."""
    keeps = list(kept_tensors(gm, use))
    if not use.refusal:
        try:
            return telling(compile_graph(), keeps)
        except OptionError:
            raise
        except Exception as error:
            if config.verify and not isinstance(error, UnsupportedError):
                raise
            use.refusal = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        del gm.meta[ORDERS]
        for m in gm.modules():
            for n in m.graph.nodes if isinstance(m, fx.GraphModule) else ():
                (n.meta.get("custom") or {}).pop(MARK, None)
    warnings.warn(f"flambeau: this function uses streams, and all of it runs on the caller's, which the others wait "
                  f"for: {use.refusal}", RuntimeWarning, stacklevel=2)
    return telling(fenced(compile_graph(), use), keeps)


def kept_tensors(gm: fx.GraphModule, use: StreamUse) -> list[tuple[bool, int, int]]:
    """The arguments (or results) that `record_stream` is called on at run time, and the streams that use them. For
    memory allocated inside the graph, the scheduler knows which streams use it."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node().args[0]
    assert isinstance(output, (tuple, list))
    out = []
    for t, stream in use.keeps:
        for is_result, nodes in ((False, placeholders), (True, output)):
            out += [(is_result, k, stream) for k, n in enumerate(nodes)
                    if isinstance(n, fx.Node) and storage(n) is not None and storage(n) == storage(t)]
    return out


def storage(n: fx.Node) -> int | None:
    t = n.meta.get("example_value")
    return t.untyped_storage()._cdata if isinstance(t, torch.Tensor) and t.layout is torch.strided else None


def telling(run: Callable[..., Any], keeps: Sequence[tuple[bool, int, int]]) -> Callable[..., Any]:
    if not keeps:
        return run

    def tell(*args: Any) -> Any:
        streams = {s: torch.accelerator.current_stream() if s == CALLER else object_at(s) for _, _, s in keeps}
        results = run(*args)
        for is_result, k, s in keeps:
            (results if is_result else args)[k].record_stream(streams[s])
        return results

    return torch.compiler.disable(tell, reason="calls compiled graphs")


def fenced(run: Callable[..., Any], use: StreamUse) -> Callable[..., Any]:
    """Run everything on the caller's stream: after the other streams' work so far, and before their later work."""
    orders = use.all_orders()
    waited, happens = ({o[1] for o in orders if o[0] in names and o[1] >= 0}
                       for names in (("wait_event", "synchronize_event"), ("record_event",)))
    waits_on_host = any(o[0].startswith("synchronize") for o in orders)
    fence = Fence(tuple(use.streams - {CALLER}), tuple(waited), tuple(happens))

    def called(*args: Any) -> Any:
        between = fence_around(lambda args: run(*args), fence, torch.accelerator.current_stream().device)
        results = between(list(args))
        if waits_on_host:
            torch.accelerator.synchronize()
        return results

    return torch.compiler.disable(called, reason="calls compiled graphs")


# ---- between forward and backward ----------------------------------------------------------------------------


def refuse_writes_behind() -> None:
    """Raise UnsupportedError if AOTAutograd writes to inputs after the graph, which it does on the caller's stream."""
    context = TracingContext.try_get()
    made = context.fw_metadata if context is not None else None
    if made is None or made.mutated_inp_runtime_indices:
        raise UnsupportedError("it writes to an input that needs a gradient, or shares memory with another")


def save_streams(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Save the numbers of the streams that a backward needs beside its tensors, since they are those of its forward's
    call. `results`: how many results the forward has before its saved values."""
    places = places_of(backward.graph)
    if not places:
        return
    with detect_fake_mode([n.meta.get("val") for n in forward.graph.nodes]) or nullcontext():
        val = torch.empty(len(places), dtype=torch.int64)
    output = forward.graph.output_node()
    with forward.graph.inserting_before(output):
        saved = forward.graph.call_function(saved_streams, (places,))
    outs = list(output.args[0])  # type: ignore[arg-type]
    outs.insert(results, saved)
    output.args = (tuple(outs),)
    saved_output(output, results)
    first = next(n for n in backward.graph.nodes
                 if n.op != "placeholder" or isinstance(n.meta.get("val"), torch.Tensor))
    with backward.graph.inserting_before(first):
        given = backward.graph.placeholder(saved.name)
    given.meta["val"] = saved.meta["val"] = val
    given.meta[NUMBERS] = saved.meta[NUMBERS] = places
    forward.recompile()
    backward.recompile()


__all__ = ["MARK", "ORDERS", "StreamUse", "compiled_with_streams", "is_streamed", "refuse_writes_behind",
           "save_streams", "take_streams"]
