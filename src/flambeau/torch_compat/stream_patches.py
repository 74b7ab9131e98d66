"""Changes to Dynamo for functions that use streams; the registry of all changes is patches.py."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .patch import Change, Patch

__all__ = ["OBJECTS", "TRACED_STREAMS", "given"]

given = threading.local()  # the streams and events of this thread's call


def _objects() -> Iterator[Change]:
    """Remember the objects of a call per thread, because the table of the process may be overwritten by another
    thread's call."""
    from torch._dynamo import graph_bytecode_inputs

    store = graph_bytecode_inputs.store_user_object_weakrefs

    def stored(*args: Any) -> None:
        store(*args)
        given.objects = [weakref.ref(x) for x in args]

    yield graph_bytecode_inputs, "store_user_object_weakrefs", stored


def _traced_streams(ours: Callable[[Any], bool]) -> Iterator[Change]:
    """The changes to Dynamo's tracing of streams. `ours`: whether a compiler function is this backend."""
    from torch._dynamo import output_graph
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables import streams
    from torch._dynamo.variables.ctx_manager import NullContextVariable

    def leave(what: str, reason: str) -> None:
        unimplemented(gb_type=f"{what} inside a compiled function", context=what, explanation=reason,
                      hints=["call it outside of the compiled function, or compile it with fullgraph=False"])

    def question(of: Any, name: str) -> Change:
        """Refuse to trace a query: Dynamo asks it once, while it traces, and compiles just one of the two branches."""
        table: dict[str, Any] = vars(of).get("tp_methods", {})  # from 2.15 on
        full = table[name].handler if name in table else of.call_method

        def asked(self: Any, tx: Any, *args: Any, **named: Any) -> Any:
            if (name in table or args[0] == name) and ours(tx.output.compiler_fn):
                leave(f"{type(self.value).__name__}.{name}()", "its answer is another at each call")
            return full(self, tx, *args, **named)

        return (table, name, type(table[name])(asked)) if name in table else (of, "call_method", asked)

    yield question(streams.StreamVariable, "query")
    yield question(streams.EventVariable, "query")

    create = streams.StreamContextVariable.create

    def entered(tx: Any, stream: Any, **named: Any) -> Any:
        if ours(tx.output.compiler_fn) and stream.is_python_constant() and stream.as_python_constant() is None:
            return NullContextVariable()
        return create(tx, stream, **named)

    yield streams.StreamContextVariable, "create", staticmethod(entered)

    check = getattr(output_graph.OutputGraph, "check_event_record_after_input_mutation", None)
    if check is not None:  # inputs are written where the function does it, before the events
        def checked(self: Any, stream: Any) -> None:
            if not ours(self.compiler_fn):
                check(self, stream)

        yield output_graph.OutputGraph, "check_event_record_after_input_mutation", checked
    if not hasattr(streams, "CURRENT_STREAM_INDEX"):  # up to 2.12 the caller would get the event of the trace
        rebuild = streams.EventVariable.reconstruct

        def rebuilt(self: Any, codegen: Any) -> None:
            if ours(codegen.tx.output.compiler_fn):
                leave("an event that a compiled function makes and returns", "this torch returns another one")
            rebuild(self, codegen)

        yield streams.EventVariable, "reconstruct", rebuilt


TRACED_STREAMS = Patch(
    "traced_streams", "`query` of streams and events in Dynamo, `StreamContextVariable.create`, "
    "`check_event_record_after_input_mutation`, up to 2.12 `EventVariable.reconstruct`",
    "Dynamo asks a stream once, while it traces, and keeps the answer; refuses `stream(None)`, and events behind "
    "writes to inputs, which this backend orders; and returns the event of the trace for one that a function makes",
    "while a frame is traced for this backend", _traced_streams)
OBJECTS = Patch(
    "objects", "`store_user_object_weakrefs` of Dynamo",
    "streams and events of a call are in one table of the process, where another thread's call may replace them before "
    "they are read. Without it, compiled functions that use streams are refused",
    "from the first compiled function that uses streams on", _objects, lasting=True)
