"""The native core of the device (device_core.cpp), and the driver passed to it as C functions.

    core = load_core()
    core.start(driver)      # from here on PyTorch's allocator, guard and hooks of the device are the core's
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from flambeau.native.build import load_native
from flambeau.targets.background import at_exit

log = logging.getLogger(__name__)

_FINE, _FAILED, _FULL, _INDEX = range(4)

_int, _long, _word = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_answer = ctypes.POINTER(ctypes.c_int)
# The functions of `struct Driver`, in order, with the C types of their parameters; all return a status. The results of
# the driver's Python functions are stored through the pointer parameters.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "alloc": (_int, _word, _word),
    "free": (_int, _word),
    "copy": (_int, _long, _word, _word, _word),
    "synchronise": (_int, _long),
    "idle": (_int, _long, _answer),
    "record": (_int, _long, _long),
    "query": (_long, _answer),
    "wait": (_long, _int, _long),
    "elapsed": (_long, _long, ctypes.POINTER(ctypes.c_double)),
    "forget": (_long,),
    "memory": (_int, ctypes.POINTER(_word), ctypes.POINTER(_word)),
    "complaint": (ctypes.POINTER(ctypes.c_char), _word),
}
_TYPES = {name: ctypes.CFUNCTYPE(_int, *types) for name, types in _FUNCTIONS.items()}


class _Table(ctypes.Structure):
    _fields_ = [("devices", _int), *_TYPES.items()]


class Driver(Protocol):
    """The functions that a kind of device provides to the core. Stream -1 is all streams of a device, or the host."""

    devices: int
    accelerates: bool  # whether any of them is not this machine's CPU

    def alloc(self, device: int, address: int, nbytes: int) -> None:
        """Allocate memory, known by that address from now on. Raises MemoryError if the device has no more."""

    def free(self, device: int, address: int) -> None:
        """Free memory. Work enqueued from now on does not use it."""

    def copy(self, device: int, stream: int, to: int, source: int, nbytes: int) -> None:
        """Copy from device memory to device memory."""

    def synchronise(self, device: int, stream: int) -> None: ...

    def idle(self, device: int, stream: int) -> bool: ...

    def record(self, device: int, stream: int, event: int) -> None: ...

    def query(self, event: int) -> bool: ...

    def wait(self, event: int, device: int, stream: int) -> None: ...

    def elapsed(self, start: int, end: int) -> float:
        """The time between two events in milliseconds."""
        ...

    def forget(self, event: int) -> None: ...

    def memory(self, device: int) -> tuple[int, int]:
        """(free bytes, total bytes)."""
        ...

    def read(self, device: int, stream: int, address: int, host: int, nbytes: int, wait: bool = True) -> Any:
        """Copy to host memory. Returns a handle of the copy for `is_complete`, for use with `wait=False`."""

    def write(self, device: int, stream: int, address: int, host: int, nbytes: int, wait: bool = True) -> Any: ...

    def is_complete(self, copy: Any) -> bool: ...


class Core:
    """The loaded native library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._start = library.flambeau_start
        self._stop = library.flambeau_stop
        self.stream: Callable[[int], int] = library.flambeau_stream  # the current stream of a device
        library.flambeau_stream.argtypes, library.flambeau_stream.restype = (_int,), _long
        self.stream_function = ctypes.cast(library.flambeau_stream, ctypes.c_void_p).value or 0  # for native callers
        self.know: Callable[[int, int, int], None] = library.flambeau_know  # (_cdata of a tensor, minimum, maximum)
        library.flambeau_know.argtypes, library.flambeau_know.restype = (ctypes.c_void_p, _long, _long), None
        locked = ctypes.PyDLL(None, handle=library._handle)
        self._generator = locked.flambeau_generator
        self._generator.argtypes, self._generator.restype = (_int,), ctypes.py_object
        self._complaint = ""

    def start(self, driver: Driver) -> None:
        """Start the core, once per process: PyTorch keeps the allocator and hooks that it is given."""
        functions = [*(self._guarded(getattr(driver, name), types) for name, types in _FUNCTIONS.items()
                       if name != "complaint"), self._complain]
        self._table = _Table(driver.devices, *(f(g) for f, g in zip(_TYPES.values(), functions, strict=True)))
        self._driver = driver
        self._start(ctypes.byref(self._table))
        at_exit(self._stop, in_children=True)

    def generator(self, device: int) -> torch.Generator:
        """The default generator of a device."""
        return self._generator(device)

    def _guarded(self, function: Callable[..., Any], types: tuple[Any, ...]) -> Callable[..., int]:
        """Wrap a driver function so that no exception passes through C: the core raises its own, with that text."""
        count = sum(not issubclass(kind, ctypes._Pointer) for kind in types)

        def call(*arguments: Any) -> int:
            try:
                found = function(*arguments[:count])
                places = arguments[count:]
                for place, value in zip(places, found if len(places) > 1 else (found,)):
                    place[0] = value
                return _FINE
            except MemoryError as error:
                self._complaint = str(error)
                return _FULL
            except Exception as error:
                log.debug("the driver failed", exc_info=True)
                said = str(error) or type(error).__name__
                self._complaint = "\n".join((said, *getattr(error, "__notes__", ())))
                return _INDEX if isinstance(error, IndexError) else _FAILED

        return call

    def _complain(self, text: Any, size: int) -> int:
        said = self._complaint.encode()[:size]
        ctypes.memmove(text, said, len(said))
        return _FINE


@cache
def load_core() -> Core:
    """The core, from the cache or compiled now. Raises CompileError if there is no compiler."""
    return load_native("device_core", "the core of the device", load=Core)
