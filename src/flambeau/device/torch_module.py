"""The module `torch.flambeau`, with the functions that PyTorch and its users expect of a device.

Streams and events are `torch.Stream` and `torch.Event`; most of the rest forwards to `torch.accelerator` for this
device. The module can be installed before the device is started (autoload.py): functions that need the device start it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flambeau.errors import UnsupportedError
from flambeau.ir.dtypes import SUPPORTED
from flambeau.torch_compat.device import set_eval_frame

if TYPE_CHECKING:
    from .core import Core
    from .enable import Found

NAME = "flambeau"

Which = torch.device | str | int | None

_core: Core | None = None
_ready = False  # set last, for threads other than the one that starts the device
_devices: tuple[Any, ...] = ()  # the driver's device objects: each has a name
_pid = os.getpid()
_seed: int | None = None  # for generators that do not exist yet


def _start(core: Core, devices: Iterable[Any]) -> None:
    global _core, _devices, _pid
    _core, _devices, _pid = core, tuple(devices), os.getpid()
    if _seed is not None:
        manual_seed_all(_seed)


def _finish() -> None:
    global _ready
    _ready = True


def _native() -> Core:
    init()
    assert _core is not None
    return _core


def __getattr__(name: str) -> Any:
    if name in ("Stream", "Event"):  # PyTorch constructs these without checking that the device is started
        init()
        return getattr(torch, name)
    if name.endswith(("Scheduling", "Codegen")) and is_initialized():
        from . import compile_interface

        if name in compile_interface.GENERATORS:
            return compile_interface.generator()
    raise AttributeError(f"module 'torch.{NAME}' has no attribute {name!r}")


def _index(device: Which) -> int:
    init()
    if device is None:
        return current_device()
    found = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    if found.type != NAME:
        raise ValueError(f"expected a {NAME} device, got {device!r}")
    if found.index is not None and found.index >= len(_devices):
        raise RuntimeError(f"{found} does not exist: there {'is' if len(_devices) == 1 else 'are'} {len(_devices)} "
                           f"{'device' if len(_devices) == 1 else 'devices'}")
    return current_device() if found.index is None else found.index


# ---- devices ---------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether there is a device. `torch.accelerator` uses `_is_recommended` instead."""
    return device_count() > 0


def _is_recommended() -> bool:
    """Whether the device is in use already, or should be used by programs that take any accelerator.

    A device that is only this machine's CPU is not recommended, unless FLAMBEAU_DEVICE selects it: it is for users who
    name it. Optimizers and data loaders ask this all the time, so the answer starts nothing.
    """
    return is_initialized() or bool(_found().recommended)


def _found() -> Found:
    with _not_compiled():
        found: Found = importlib.import_module("flambeau.device.enable").found()
        return found


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Keep Dynamo from compiling frames of an import: it would ask again before the import has finished."""
    callback = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(callback)


def is_initialized() -> bool:
    return _core is not None


def init() -> None:
    """Start the device if necessary. Contexts are created at first use. Raises an error if there is no device."""
    if _is_in_bad_fork():
        raise UnsupportedError(f"this process was forked after the device {NAME!r} was started, which does not follow",
                               hint='start processes with multiprocessing\'s "spawn" or "forkserver" method')
    if not _ready:
        importlib.import_module("flambeau.device.enable").enable_device()


_lazy_init = init  # PyTorch calls this before it makes the first tensor on the device


def _is_in_bad_fork() -> bool:
    return is_initialized() and os.getpid() != _pid


def device_count() -> int:
    return len(_devices) if is_initialized() else _found().devices


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Which) -> None:
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: Which = None) -> str:
    return str(_devices[_index(device)].name)


class _Properties(NamedTuple):
    name: str
    total_memory: int  # bytes
    multi_processor_count: int


def get_device_properties(device: Which = None) -> _Properties:
    index = _index(device)
    return _Properties(get_device_name(index), mem_get_info(index)[1], int(getattr(_devices[index], "units", 1)))


def get_device_capability(device: Which = None) -> dict[str, Any]:
    """As in `torch.accelerator`: {"supported_dtypes": ...}. Operators without a kernel for a dtype run on the CPU."""
    ask = getattr(torch.accelerator, "get_device_capability", None)  # only in newer versions of torch
    return {"supported_dtypes": {*SUPPORTED}} if ask is None else ask(_index(device))


class device:  # noqa: N801 - as torch.cuda.device
    """A context in which this device is the current one."""

    def __init__(self, device: Which) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self.index)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


def synchronize(device: Which = None) -> None:
    if device is None and torch.compiler.is_dynamo_compiling():
        torch.accelerator.synchronize()  # Dynamo supports this one
    elif is_initialized():  # profilers of other devices call it too
        torch.accelerator.synchronize(_index(device))


# ---- streams ---------------------------------------------------------------------------------------------


def current_stream(device: Which = None) -> torch.Stream:
    if device is None and torch.compiler.is_dynamo_compiling():
        return torch.accelerator.current_stream()
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Which = None) -> torch.Stream:
    current = current_stream(device)
    return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """A context in which work is enqueued on this stream."""
    if stream is None:
        yield
        return
    with stream:
        yield


# ---- random numbers --------------------------------------------------------------------------------------


def default_generator(device: Which = None) -> torch.Generator:
    return _native().generator(_index(device))


def _all_generators() -> Iterable[torch.Generator]:
    return (_native().generator(k) for k in range(device_count()))


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    global _seed
    _seed = seed
    if not is_initialized():
        return
    for generator in _all_generators():
        generator.manual_seed(seed)


def seed() -> None:
    default_generator().seed()


def seed_all() -> None:
    manual_seed_all(default_generator().seed())


def initial_seed() -> int:
    return default_generator().initial_seed()


def get_rng_state(device: Which = NAME) -> torch.Tensor:
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Which = NAME) -> None:
    default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _all_generators()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_all_generators(), new_states, strict=True):
        generator.set_state(state)


# ---- memory ----------------------------------------------------------------------------------------------


def empty_cache() -> None:
    if is_initialized():
        torch.accelerator.empty_cache()


def _asked(ask: Callable[[int], Any]) -> Callable[..., Any]:
    """A function of `torch.accelerator` that accepts a device in any form."""

    def answer(device: Which = None) -> Any:
        return ask(_index(device))

    return answer


memory_stats = _asked(torch.accelerator.memory_stats)
memory_allocated = _asked(torch.accelerator.memory_allocated)
max_memory_allocated = _asked(torch.accelerator.max_memory_allocated)
memory_reserved = _asked(torch.accelerator.memory_reserved)
max_memory_reserved = _asked(torch.accelerator.max_memory_reserved)
reset_peak_memory_stats = _asked(torch.accelerator.reset_peak_memory_stats)
mem_get_info = _asked(torch.accelerator.get_memory_info)  # (free bytes, total bytes)


# ---- mixed precision -------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
