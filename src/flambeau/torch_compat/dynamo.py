"""Dynamo: frames, tracing, and its settings.

What is public is used by its public name: torch.compiler.reset, disable, assume_constant_result.
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

# An answer to Dynamo's question about a frame: run it as it is, and ask again about what it calls.
SKIP_FRAME = ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False)
# The code that torch.compile puts around a function which Dynamo would not trace by itself.
WRAPPER: CodeType = wrap_inline(len).__code__

# What Dynamo does to optimizers once, at its first compilation: changes of ours lie above it.
prepare_optimizers = TorchPatcher.patch
current_translator = InstructionTranslator.current_tx


def unskip_code(code: CodeType) -> None:
    """Undo `skip_code`."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def backend_of(callback: Any) -> Any:
    """The backend for which a callback of frames compiles, without the wrappers that torch.compile puts around it."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def is_fullgraph(wrapper: Any) -> bool:
    """Whether a callback of frames was made with fullgraph=True."""
    return bool(getattr(wrapper._torchdynamo_orig_backend, "_one_graph", False))


def may_break(translator: Any) -> bool:
    """Whether what is being traced may be cut into several graphs. `error_on_graph_break` is there from 2.9 on."""
    return not (translator.one_graph or getattr(translator, "error_on_graph_break", False))


def handed_on(error: Exception, frame: FrameType | None) -> Exception:
    """The error as one that Dynamo does not wrap: still of its class, and shown from this frame on."""
    kind = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
    made: Exception = kind.__new__(kind, *error.args)
    vars(made).update(vars(error), first_useful_frame=frame)
    return made


def allow_recompiles(count: int) -> None:
    """How often Dynamo compiles one function before it leaves it to eager; for benchmarks over many shapes."""
    config.recompile_limit = count


# ---- marks for profilers ----------------------------------------------------------------------------------

_silenced: list[bool] = []  # by us, not by the user


def without_runtime_marks() -> None:
    """Until the compilation ends, Dynamo does not mark what it writes for profilers, at 2 us for every call."""
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


# A backward that is compiled late ends within code that Dynamo watches, and it must not compile what it calls then.
skip_code(restore_runtime_marks.__code__)
