"""Shorter paths from a call of a compiled function to Dynamo's check of its frame, and from there to a graph.

torch.compile wraps the user's function. At each call, the wrapper checks for tracing and exporting, applies the
settings of `dynamic=` to Dynamo's configuration and saves state for errors: 12 us when a kernel has just run, and 40
with `dynamic=True`. The wrapper of `short_call` checks a few attributes for unusual cases, and leaves those to torch's
wrapper; settings of a compilation only apply while something is compiled.

Dynamo's code calls a graph through torch.compiler.disable, which turns Dynamo off, and looks for a stance, a name and
an export at each call. The wrapper of `unwatched` only turns it off. The same layers are around the functions that read
each size and stride of symbolic shapes (4 us together if a tensor has two); `short_reading` leaves them out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _is_tracing, _len_torch_function_stack
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth
from torch._dynamo import config, eval_frame
from torch._dynamo.exc import ShortenTraceback, UncapturedHigherOrderOpError, Unsupported, UserError
from torch._guards import _TLS
from torch.fx import _symbolic_trace

from .dynamo import skip_code

__all__ = ["READINGS", "disabled", "short_call", "short_reading", "unwatched", "watch"]

watch = set_eval_frame  # sets the function that Dynamo asks about frames, and returns the one before; None: no function

# The places of fx's flag for tracing (for all threads before torch 2.15, per thread from then on), and of torch 2.15's
# flag that compiled functions inside of others run uncompiled.
_FX = (_symbolic_trace, "_is_fx_tracing_flag") if hasattr(_symbolic_trace, "_is_fx_tracing_flag") else (
    getattr(_symbolic_trace, "_is_fx_tracing_tls", None), "flag")
# How Dynamo's code reads the shape of an argument: functions of torch._dynamo.utils, and the methods that they call.
READINGS: dict[str, Callable[..., Any]] = {"call_size": torch.Tensor.size, "call_stride": torch.Tensor.stride,
            "call_storage_offset": torch.Tensor.storage_offset}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_NESTED = getattr(eval_frame, "_force_eager_nested_compile", None)


def short_call(context: Any, full: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for `full`, the function that torch.compile returns; `full` itself if unusual options are set."""
    fx, tracing = _FX
    stance, callback, function = eval_frame._stance, context.callback, getattr(full, "_torchdynamo_orig_callable", None)
    more = (getattr(context, "fullgraph", True), context.export, config.compiled_autograd,
            getattr(context, "error_on_graph_break", None) is not None,
            getattr(context, "_isolate_recompiles_id", -1) != -1, stance != eval_frame.DynamoStance(),
            not hasattr(torch.compiler, "_is_exporting_flag"), fx is None,
            context._backend_ctx_ctor is not eval_frame.null_context, function is None,
            isinstance(full, torch.nn.Module))  # its `forward` is wrapped by a call of its own
    if any(more):
        return full

    def compiling(*args: Any) -> Any:
        """Dynamo's frame callback."""
        leave = [enter() for enter in context.enter_exit_hooks]
        try:
            return callback(*args)
        finally:
            for cleanup in leave:
                cleanup()

    compiling._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]  # how Dynamo finds the backend

    def call(*args: Any, **named: Any) -> Any:
        if (eval_frame._stance is not stance or getattr(fx, tracing, False) or _is_tracing()
                or (_NESTED is not None and getattr(_NESTED, "depth", 0))
                or torch.compiler._is_exporting_flag or get_dynamic_layer_stack_depth()
                or getattr(_TLS, "tracing_context", None) is not None):
            return full(*args, **named)
        before = set_eval_frame(compiling)  # type: ignore[arg-type]
        try:
            return function(*args, **named)  # type: ignore[misc]
        except BaseException as error:
            set_eval_frame(None)
            pop_dynamic_layer_stack_and_undo_to_depth(0)  # graphs push onto it without a `finally`
            if isinstance(error, ShortenTraceback):
                raise error.remove_dynamo_frames() from None
            if isinstance(error, (Unsupported, UncapturedHigherOrderOpError, UserError)) and not config.verbose:
                raise error.with_traceback(None) from error.__cause__
            raise
        finally:
            set_eval_frame(before)

    skip_code(call.__code__)
    functools.update_wrapper(call, full)
    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
    return call


def unwatched(run: Callable[[list[Any]], Any], first: Sequence[Any] = ()) -> Callable[..., Any]:
    """A function that calls `run` with `first` and its arguments in one list, with Dynamo turned off."""
    def call(*args: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return run([*first, *args])
        finally:
            set_eval_frame(before)

    skip_code(call.__code__)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call.unwatched = call  # type: ignore[attr-defined]
    return call


def disabled(full: Callable[..., Any], self: Any, fn: Any) -> Any:
    """`DisableContext.__call__`, but functions of `unwatched` are returned as they are."""
    return fn if getattr(fn, "unwatched", None) is fn else full(self, fn)  # wrappers copy attributes


def short_reading(full: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for `full` that calls the method of a tensor, unless Python code may define what it does."""
    def read(x: Any, *dim: int) -> Any:
        return method(x, *dim) if type(x) in _PLAIN and not _len_torch_function_stack() else full(x, *dim)

    skip_code(read.__code__)
    return read
