"""torch.compile of an optimizer's step: Dynamo traces none of it.

To trace a step over two thousand parameters takes Dynamo and AOTAutograd minutes, and most of it is bookkeeping of
tensors one by one. So where this backend compiles, the frames of torch's optimizers run as they are, and the functions
over lists of tensors that they end in (`torch.optim.adam.adam`) are ours (multi_tensor.py). For all other callers,
other backends among them, those functions are torch's own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import convert_frame
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

# The functions, by module. Each updates the tensors of its lists row by row, and returns nothing.
FUNCTIONS = {
    "torch.optim.adam": "adam", "torch.optim.sgd": "sgd", "torch.optim.rmsprop": "rmsprop",
    "torch.optim.adagrad": "adagrad", "torch.optim.adadelta": "adadelta", "torch.optim.adamax": "adamax",
    "torch.optim.radam": "radam",
}
_SKIP = ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False)


@cache
def install(backend: Callable[..., Any]) -> None:
    """Once for a process: from now on, steps that `backend` compiles are ours."""
    ours = functools.partial(options_of, backend)
    files = {__file__, inspect.getfile(torch.optim.Optimizer)}
    for module, name in FUNCTIONS.items():
        loaded = importlib.import_module(module)
        files.add(inspect.getfile(loaded))
        setattr(loaded, name, routed(getattr(loaded, name), module, ours))
    convert_frame.CatchErrorsWrapper.__call__ = passing(  # type: ignore[method-assign]
        convert_frame.CatchErrorsWrapper.__call__, frozenset(files), ours)


def options_of(backend: Callable[..., Any], callback: Any) -> dict[str, Any] | None:
    """The options of a compilation by this backend; None if the callback of frames is of another."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    if getattr(callback, "compiler_fn", callback) is not backend:
        return None
    given: dict[str, Any] = getattr(callback, "kwargs", {})
    return given


def passing(convert: Callable[..., Any], files: frozenset[str], ours: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, frame: Any, *rest: Any) -> Any:
        if frame.f_code.co_filename in files and ours(self) is not None:
            return _SKIP
        return convert(self, frame, *rest)

    return __call__


def routed(original: Callable[..., None], module: str, ours: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            callback = get_eval_frame_callback()
            given = ours(callback) if callable(callback) else None
            if given is not None:
                return run(original, module, args, kwargs, given)
        return original(*args, **kwargs)

    return function


@torch._dynamo.disable
def run(original: Callable[..., None], module: str, args: Any, kwargs: Any, given: dict[str, Any]) -> None:
    # Imported here: a process that compiles no optimizer needs none of this.
    from .dynamo import check_options
    from .multi_tensor import list_function

    settings = check_options(given.get("options"), given.get("mode"))
    list_function(original, module)(args, kwargs, (settings["target"], settings["numerics"]))
