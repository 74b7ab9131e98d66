"""Compiled optimizer steps and gradient clipping: Dynamo does not trace them, our kernels run instead.

Tracing a step over two thousand parameters takes Dynamo and AOTAutograd minutes, most of it for bookkeeping of single
tensors. So where this backend compiles, the Python frames of torch's optimizers run uncompiled, and the functions over
lists of tensors that they end in (`torch.optim.adam.adam`) are replaced by ours (multi_tensor.py). For all other
callers, other backends included, those functions are torch's own.

Some steps compute with numbers that they read from their states. When traced, these are float32 tensors, whereas eager
uses Python numbers. So if eager's bits are wanted, torch's function runs unchanged.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from flambeau.compile import kept_by_dynamo
from flambeau.config import config
from flambeau.ir.numerics import wants_bits
from flambeau.torch_compat.call_patches import CALLS, DISABLED, READINGS
from flambeau.torch_compat.dynamo import (
    SKIP_FRAME,
    WRAPPER,
    backend_of,
    current_translator,
    get_eval_frame_callback,
    graph_break,
    is_fullgraph,
    may_break,
    skip_code,
)
from flambeau.torch_compat.optim import READS, base_file, files
from flambeau.torch_compat.patches import FRAMES, OPTIMIZERS
from flambeau.torch_compat.stream_patches import TRACED_STREAMS

from . import parameter_groups

EAGER: Counter[str] = Counter()  # by device type: how many requests for eager steps on our kernels are active


@cache
def install(backend: Callable[..., Any]) -> Routes | None:
    """Route steps that `backend` compiles to our kernels, and shorten calls of what it compiled; once per process.

    Returns None if FLAMBEAU_PATCHES=0.
    """
    if not config.patches:
        return None
    ours = functools.partial(options_of, backend)
    routes = Routes(ours)
    always = frozenset({__file__, parameter_groups.__file__, base_file()}) | files(
        ("step", "total_norm", "clip_with_norm", ""))
    # Dynamo need not ask us about these frames, which would take 20 us each.
    for inside in (options_of, options_for, is_accelerated, backend_of):
        skip_code(inside.__code__)
    FRAMES.apply(functools.partial(passing, always, always | files((READS,)), ours, routes))
    CALLS.apply(ours)
    DISABLED.apply()
    READINGS.apply()
    return routes


class Routes:
    """Replaces torch's functions over lists of tensors while this backend traces and while anyone uses the replacement;
    permanently, once a frame compiled by this backend has called one."""

    def __init__(self, ours: Callable[..., Any]) -> None:
        self.ours, self.wanted = ours, functools.partial(options_for, ours)
        self.users, self.is_kept, self.lock = 0, False, threading.Lock()

    def begin(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                OPTIMIZERS.apply(self.routed, self.remembering)

    def end(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0 and OPTIMIZERS.is_applied:
                OPTIMIZERS.undo()

    def keep(self) -> None:
        """Keep the replacement permanently, because code compiled by Dynamo refers to it."""
        if not self.is_kept:
            self.is_kept = True
            self.begin()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def routed(self, original: Callable[..., Any], module: str, kind: str) -> Callable[..., Any]:
        function = routed(original, module, kind, self)
        skip_code(function.__code__)
        return function

    def remembering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        function = parameter_groups.remembering(original, self.wanted)
        skip_code(function.__code__)
        return function


def options_of(backend: Callable[..., Any], callback: Any) -> dict[str, Any] | None:
    """The options of a compilation by this backend; None if the frame callback belongs to another backend."""
    callback = backend_of(callback)
    if getattr(callback, "compiler_fn", callback) is not backend:
        return None
    return getattr(callback, "kwargs", {})


def exact(given: dict[str, Any]) -> bool:
    return wants_bits((given.get("options") or given).get("numerics", config.numerics))


def passing(ours_always: frozenset[str], ours_exact: frozenset[str], ours: Callable[..., Any], routes: Routes,
            convert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Dynamo's frame conversion so that some files' frames run uncompiled: always, or for eager's bits."""

    def is_exact(callback: Any) -> bool:
        return (given := ours(callback)) is not None and exact(given)

    def is_ours(callback: Any) -> bool:
        return ours(callback) is not None

    def __call__(self: Any, frame: Any, *rest: Any) -> Any:
        given = ours(self)
        if given is None:
            return convert(self, frame, *rest)
        files = ours_exact if exact(given) else ours_always
        if not is_fullgraph(self) and (frame.f_code.co_filename in files or leads_to(frame, files)):
            routes.keep()
            return SKIP_FRAME
        with (collecting_later(), routes.tracing(), kept_by_dynamo.kept_whole(is_exact),
              TRACED_STREAMS.applied(is_ours)):
            return convert(self, frame, *rest)

    # Dynamo walks up the stack for a frame's caller (`torch.compiler.disable(recursive=False)`), past its own file.
    __call__.__code__ = __call__.__code__.replace(co_filename=convert.__code__.co_filename)
    return __call__


@contextmanager
def collecting_later() -> Iterator[None]:
    """Disable garbage collection during compilation: the objects that Dynamo makes of a deep model live until it ends,
    so collections take a tenth of the time and find nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leads_to(frame: Any, files: frozenset[str]) -> bool:
    """Whether this is the frame with which torch.compile wraps a function that Dynamo would not trace by itself."""
    if frame.f_code is not WRAPPER:
        return False
    inside = (getattr(cell.cell_contents, "__code__", None) for cell in frame.closure)
    return any(code is not None and code.co_filename in files for code in inside)


def options_for(ours: Callable[..., Any], tensors: Any) -> dict[str, Any] | None:
    """The options for a list function called now with these tensors; None if torch's function should run."""
    callback = get_eval_frame_callback()
    given: dict[str, Any] | None = ours(callback) if callable(callback) else None
    # Steps that were not asked to be compiled are near eager, but need not equal its bits (see ir/numerics.py).
    return {"numerics": "near"} if given is None and is_accelerated(tensors) else given


def routed(original: Callable[..., Any], module: str, kind: str, routes: Routes) -> Callable[..., Any]:
    ours, wanted = routes.ours, routes.wanted

    @torch.compiler.assume_constant_result
    def traced_for_us() -> bool:
        """Whether Dynamo traces for this backend, and may break the graph for a call of this function."""
        routes.keep()  # guards of the traced code name this function, for all backends
        tx = current_translator()
        given = ours(tx.output.compiler_fn)
        return given is not None and (kind != READS or exact(given)) and may_break(tx)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if traced_for_us():
                graph_break()
        elif kind:
            given = wanted(args[0] if args else ())
            if given is not None and (kind != READS or exact(given)):
                return run(original, module, kind, args, kwargs, given)
        return original(*args, **kwargs)

    return function


def is_accelerated(tensors: Any) -> bool:
    """Whether the first tensor of a list is on a device whose eager steps run on our kernels."""
    if not any(EAGER.values()) or not isinstance(tensors, list) or not tensors:
        return False
    return isinstance(tensors[0], torch.Tensor) and EAGER[tensors[0].device.type] > 0


@torch.compiler.disable
def run(original: Callable[..., Any], module: str, kind: str, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    if kind == READS:
        return original(*args, **kwargs)
    # Imported here, because a process that compiles no optimizer needs none of this.
    from flambeau.compile.backend import check_options

    from . import clipping
    from .multi_tensor import list_function

    settings = check_options(given.get("options"), given.get("mode"))
    options = settings["target"], given.get("numerics", settings["numerics"])
    if kind == "step":
        return list_function(original, module)(args, kwargs, options)
    with torch.no_grad():
        return getattr(clipping, kind)(original, options, *args, **kwargs)
