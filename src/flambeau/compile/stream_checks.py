"""Raises an error for uses of streams that cannot be compiled, because a lost wait would give wrong results."""

from __future__ import annotations

import torch.fx as fx

from flambeau.config import config
from flambeau.errors import Error, UnsupportedError
from flambeau.torch_compat.fake import TracingContext
from flambeau.torch_compat.patches import OBJECTS
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
    if not config.patches:
        raise UnsupportedError("streams inside a compiled function, where torch is not to be changed "
                               "(FLAMBEAU_PATCHES=0)", hint=OUTSIDE)
    if not OBJECTS.is_applied:
        OBJECTS.apply()
    return True


def refuse_gradients(graph: fx.Graph) -> None:
    """Which stream a gradient is computed and added up on is eager's choice; what AOTAutograd makes of it differs."""
    if uses_streams(graph):
        raise UnsupportedError("streams inside a compiled function whose gradient is asked for",
                               hint="call it under torch.no_grad(), or compile what runs on each stream by itself")


def not_carried(error: Exception) -> Exception:
    """Whatever stands in the way of a function that uses streams, torch's own errors included: it has no other form."""
    if isinstance(error, Error):
        return error
    reason = (str(error).splitlines() or [""])[0]
    return UnsupportedError(f"streams inside this compiled function: {type(error).__name__}: {reason[:200]}",
                            hint=f"{OUTSIDE}; above all what writes to its inputs")


def refuse_writes_behind() -> None:
    """What AOTAutograd writes to inputs behind a graph is on the caller's stream, wherever the function did it."""
    context = TracingContext.try_get()
    made = context.fw_metadata if context is not None else None
    if made is None or made.mutated_inp_runtime_indices:
        raise UnsupportedError("an input that a compiled function with streams writes to, and that needs a gradient or "
                               "shares memory", hint=OUTSIDE)
