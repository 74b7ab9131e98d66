"""What a function does with streams and cannot be carried through compilation is an error with a name, and never
another order: a wait that is lost is a wrong number now and then."""

from __future__ import annotations

import torch.fx as fx

from flambeau.errors import UnsupportedError
from flambeau.torch_compat.streams import bodies, carries_streams, method_of_stream, uses_streams

OUTSIDE = "call it outside of the compiled function, or put torch._dynamo.graph_break() before it"


def check_streams(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's uses streams; UnsupportedError if it does so in a way that would be lost."""
    for n in gm.graph.nodes:
        if (method := method_of_stream(n)) is not None:
            # Its answer was asked for once, while the function was traced; a call without one is dropped.
            raise UnsupportedError(f"{method}() inside a compiled function would not run with it", operator=method,
                                   hint=OUTSIDE)
    if any(uses_streams(body.graph) for body in bodies(gm)):
        raise UnsupportedError("streams inside a checkpoint, a branch, a loop or an autograd.Function of a compiled "
                               "function", hint="use the streams around it, or leave the function uncompiled")
    if not uses_streams(gm.graph):
        return False
    if not carries_streams():
        raise UnsupportedError("this torch drops some of what a compiled function does with streams",
                               hint="torch 2.13 or newer hands all of it over")
    raise UnsupportedError("streams inside a compiled function", hint="compile what runs on each stream by itself")
