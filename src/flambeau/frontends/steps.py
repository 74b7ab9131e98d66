"""torch.compile of an optimizer's step, or of the clipping of gradients: Dynamo traces none of it.

To trace a step over two thousand parameters takes Dynamo and AOTAutograd minutes, and most of it is bookkeeping of
tensors one by one. So where this backend compiles, the frames of torch's optimizers run as they are, and the functions
over lists of tensors that they end in (`torch.optim.adam.adam`) are ours (multi_tensor.py). For all other callers,
other backends among them, those functions are torch's own.

Some steps compute with numbers that they read out of their states. Traced, they read tensors in float32 where eager has
Python's numbers: who wants eager's bits gets torch's function as it is.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import TorchPatcher, skip_code
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

from flambeau.config import config
from flambeau.ir.numerics import wants_bits

from . import groups, intact

READS = "reads"  # a step that torch runs where eager's bits are wanted, and Dynamo traces elsewhere
# The functions: module, name, and who runs it; nobody: it only leads to others. A step updates the tensors of its lists
# row by row, and returns nothing.
FUNCTIONS = (
    *((f"torch.optim.{name}", name, "step") for name in
      ("adam", "sgd", "rmsprop", "adagrad", "adadelta", "adamax", "radam")),
    *((f"torch.optim.{name}", name, READS) for name in ("nadam", "asgd")),
    ("torch.nn.utils.clip_grad", "_get_total_norm", "total_norm"),
    ("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "clip_with_norm"),
    ("torch.nn.utils.clip_grad", "clip_grad_norm_", ""),
)
ASIDES = ("_optimizer_step_code", "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
EAGER: Counter[str] = Counter()  # types of devices, and how many wish that uncompiled steps there are ours
_AROUND = wrap_inline(len).__code__
_SKIP = ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False)


@cache
def install(backend: Callable[..., Any]) -> None:
    """Once for a process: from now on, steps that `backend` compiles are ours."""
    TorchPatcher.patch()  # what Dynamo does to optimizers at its first compilation, lies below what we do
    ours = functools.partial(options_of, backend)
    wanted = functools.partial(options_for, ours)
    intact.install(lambda callback: (given := ours(callback)) is not None and exact(given))
    files = {__file__, groups.__file__, inspect.getfile(torch.optim.Optimizer)}
    reading: set[str] = set()
    for module, name, kind in FUNCTIONS:
        loaded = importlib.import_module(module)
        (reading if kind == READS else files).add(inspect.getfile(loaded))
        original = getattr(loaded, name)
        function = routed(original, module, kind, ours, wanted)
        for place in (loaded, importlib.import_module(module.rpartition(".")[0])):
            if getattr(place, name, None) is original:
                setattr(place, name, function)
    modules = {module for module, _, kind in FUNCTIONS if kind == "step"}
    for kept in vars(torch.optim).values():
        if isinstance(kept, type) and "_init_group" in vars(kept) and modules & {c.__module__ for c in kept.__mro__}:
            kept._init_group = groups.remembering(kept._init_group, wanted)  # type: ignore[attr-defined]
    # Frames about which Dynamo need not ask us, at 20 us each: ours, and those that do nothing with tensors.
    asides = (getattr(torch.optim.Optimizer, name, None) for name in ASIDES)
    for inside in (options_of, options_for, is_accelerated, function, torch.optim.Adam._init_group, *asides):
        if inside is not None:
            skip_code(inside.__code__)
    convert_frame.CatchErrorsWrapper.__call__ = passing(  # type: ignore[method-assign]
        convert_frame.CatchErrorsWrapper.__call__, frozenset(files), frozenset(files | reading), ours)


def options_of(backend: Callable[..., Any], callback: Any) -> dict[str, Any] | None:
    """The options of a compilation by this backend; None if the callback of frames is of another."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    if getattr(callback, "compiler_fn", callback) is not backend:
        return None
    return getattr(callback, "kwargs", {})


def exact(given: dict[str, Any]) -> bool:
    return wants_bits((given.get("options") or given).get("numerics", config.numerics))


def passing(convert: Callable[..., Any], ours_always: frozenset[str], ours_exact: frozenset[str],
            ours: Callable[..., Any]) -> Callable[..., Any]:
    """The files whose frames run as they are, always and where eager's bits are wanted."""

    def __call__(self: Any, frame: Any, *rest: Any) -> Any:
        given = ours(self)
        if given is None:
            return convert(self, frame, *rest)
        files = ours_exact if exact(given) else ours_always
        whole = getattr(self._torchdynamo_orig_backend, "_one_graph", False)  # fullgraph=True
        if not whole and (frame.f_code.co_filename in files or leads_to(frame, files)):
            return _SKIP
        with collecting_later():
            return convert(self, frame, *rest)

    # Dynamo looks up the stack for who called a frame (`torch.compiler.disable(recursive=False)`), past its own file.
    __call__.__code__ = __call__.__code__.replace(co_filename=convert.__code__.co_filename)
    return __call__


@contextmanager
def collecting_later() -> Iterator[None]:
    """What Dynamo makes of a deep model stays until it is compiled: to look through it for garbage takes a tenth of
    the time, and finds none."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leads_to(frame: Any, files: frozenset[str]) -> bool:
    """Whether this is the frame that torch.compile puts around a function that Dynamo would not trace by itself."""
    if frame.f_code is not _AROUND:
        return False
    inside = (getattr(cell.cell_contents, "__code__", None) for cell in frame.closure)
    return any(code is not None and code.co_filename in files for code in inside)


def options_for(ours: Callable[..., Any], tensors: Any) -> dict[str, Any] | None:
    """The options for a call that is being run with these tensors; None if it is not ours."""
    callback = get_eval_frame_callback()
    given: dict[str, Any] | None = ours(callback) if callable(callback) else None
    # What nobody asked to be compiled is near eager, not necessarily its bits (see ir/numerics.py).
    return {"numerics": "near"} if given is None and is_accelerated(tensors) else given


def routed(original: Callable[..., Any], module: str, kind: str, ours: Callable[..., Any],
           wanted: Callable[..., Any]) -> Callable[..., Any]:
    @torch._dynamo.assume_constant_result
    def traced_for_us() -> bool:
        """While Dynamo traces: whether for us, and whether it may leave what it traces for a call."""
        tx = InstructionTranslator.current_tx()
        given = ours(tx.output.compiler_fn)
        return given is not None and (kind != READS or exact(given)) and not (
            tx.one_graph or getattr(tx, "error_on_graph_break", False))

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if traced_for_us():
                torch._dynamo.graph_break()
        elif kind:
            given = wanted(args[0] if args else ())
            if given is not None and (kind != READS or exact(given)):
                return run(original, module, kind, args, kwargs, given)
        return original(*args, **kwargs)

    return function


def is_accelerated(tensors: Any) -> bool:
    """Whether the first tensor of a list is on a device whose steps are ours."""
    if not any(EAGER.values()) or not isinstance(tensors, list) or not tensors:
        return False
    return isinstance(tensors[0], torch.Tensor) and EAGER[tensors[0].device.type] > 0


@torch._dynamo.disable
def run(original: Callable[..., Any], module: str, kind: str, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    if kind == READS:
        return original(*args, **kwargs)
    # Imported here: a process that compiles no optimizer needs none of this.
    from . import clipping
    from .dynamo import check_options
    from .multi_tensor import list_function

    settings = check_options(given.get("options"), given.get("mode"))
    options = settings["target"], given.get("numerics", settings["numerics"])
    if kind == "step":
        return list_function(original, module)(args, kwargs, options)
    with torch.no_grad():
        return getattr(clipping, kind)(original, options, *args, **kwargs)
