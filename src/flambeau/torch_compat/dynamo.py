"""Dynamo: frames, tracing, and its settings.

Public functions are used by their public names: torch.compiler.reset, disable, assume_constant_result.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_code_exec_strategy
from torch._dynamo import config, graph_break, maybe_mark_dynamic
from torch._dynamo.callback import callback_handler
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._dynamo.eval_frame import TorchPatcher, innermost_fn, skip_code
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import compilation_time_metrics
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable

__all__ = ["SKIP_FRAME", "WRAPPER", "ConstantSource", "DeviceInterface", "TensorVariable",
           "TorchInGraphFunctionVariable", "allow_recompiles", "backend_of", "compilation_time_metrics", "config",
           "current_translator", "get_eval_frame_callback", "graph_break", "handed_on", "innermost_fn",
           "is_fullgraph", "may_break", "maybe_mark_dynamic", "prepare_optimizers", "register_interface_for_device",
           "restore_runtime_marks", "skip_code", "unskip_code", "without_runtime_marks"]

# Answer to Dynamo about a frame: run it uncompiled, but ask again about the functions it calls.
SKIP_FRAME = ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False)
# The code with which torch.compile wraps a function that Dynamo would not trace by itself.
WRAPPER: CodeType = wrap_inline(len).__code__

# Changes to optimizers that Dynamo makes once, at its first compilation: ours must be applied after them.
prepare_optimizers = TorchPatcher.patch
current_translator = InstructionTranslator.current_tx


def unskip_code(code: CodeType) -> None:
    """Undo `skip_code`."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def backend_of(callback: Any) -> Any:
    """The backend that a frame callback compiles with, without the wrappers that torch.compile puts around it."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def is_fullgraph(wrapper: Any) -> bool:
    """Whether a frame callback was made with fullgraph=True."""
    return bool(getattr(wrapper._torchdynamo_orig_backend, "_one_graph", False))


def may_break(translator: Any) -> bool:
    """Whether the traced code may be split into several graphs. `error_on_graph_break` exists from 2.9 on."""
    return not (translator.one_graph or getattr(translator, "error_on_graph_break", False))


def handed_on(error: Exception, frame: FrameType | None) -> Exception:
    """A copy of the error that Dynamo does not wrap: still of its class, with a traceback from this frame on."""
    kind = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
    made: Exception = kind.__new__(kind, *error.args)
    vars(made).update(vars(error), first_useful_frame=frame)
    return made


def allow_recompiles(count: int) -> None:
    """Set how often Dynamo compiles one function before leaving it to eager; for benchmarks over many shapes."""
    config.recompile_limit = count


# ---- marks for profilers ----------------------------------------------------------------------------------

_silenced: list[bool] = []  # nonempty if we turned the marks off, not the user


def without_runtime_marks() -> None:
    """Keep Dynamo from marking calls for profilers until the compilation ends; a mark costs every call 2 us."""
    if not config.record_runtime_overhead:
        return
    config.record_runtime_overhead = False
    _silenced.append(True)
    if restore_runtime_marks not in callback_handler.end_callbacks:  # torch.compiler.reset() clears them
        callback_handler.register_end_callback(restore_runtime_marks)


def restore_runtime_marks(_: Any) -> None:
    if _silenced:
        _silenced.clear()
        config.record_runtime_overhead = True


# A late compilation of a backward ends inside code that Dynamo watches, and Dynamo must not compile this function.
skip_code(restore_runtime_marks.__code__)
