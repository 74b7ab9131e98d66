"""Python binding (ctypes) of the C runtime: the shared library in a package, and its structures."""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import tempfile
import threading
from typing import Any

from flambeau.errors import Error
from flambeau.targets.opencl.pocl import name_all_cpus

MOST_RANK = 16
DTYPES = ("", "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
          "float32", "float64")
CODES = {name: k for k, name in enumerate(DTYPES) if name}


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("rank", ctypes.c_int32),
                ("sizes", ctypes.c_int64 * MOST_RANK), ("strides", ctypes.c_int64 * MOST_RANK)]


class Failure(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("message", ctypes.c_char * 1020)]


class Call(ctypes.Structure):
    """All parameters of a call in one structure, the argument of flam_run_call."""

    _fields_ = [("model", ctypes.c_void_p), ("inputs", ctypes.c_void_p), ("outputs", ctypes.c_void_p),
                ("error", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("method", ctypes.c_int32),
                ("input_count", ctypes.c_int32), ("output_count", ctypes.c_int32), ("on_device", ctypes.c_int32)]


_TENSORS = ctypes.POINTER(Tensor)
_ERROR = ctypes.POINTER(Failure)
_P, _I, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "flam_load": (_P, (_S, _S, _ERROR)),
    "flam_load_on": (_P, (_S, _S, _I, _ERROR)),
    "flam_unload": (None, (_P,)),
    "flam_shapes": (_I, (_P, _I, _TENSORS, _I, _TENSORS, _I, _ERROR)),
    "flam_retain": (None, (_P,)),
    "flam_run": (_I, (_P, _I, _P, _I, _P, _I, _P)),
    "flam_run_on": (_I, (_P, _I, _P, _I, _P, _I, _P, _P)),
    "flam_run_call": (_I, (_P,)),  # the address of a Call as a plain pointer, which ctypes converts in half the time
    "flam_add_device": (_I, (_P,)),
    "flam_device_name": (_S, (_P,)),
    "flam_update_weights": (_I, (_P, ctypes.POINTER(_S), _TENSORS, _I, _ERROR)),
    "flam_set_threads": (None, (_I,)),
    "flam_threads": (_I, ()),
    "flam_set_caller": (None, (_P,)),
    "flam_seed": (None, (_P, ctypes.c_uint64)),
    "flam_hash": (ctypes.c_uint64, (_P, ctypes.c_size_t)),
}
_LIBRARIES: dict[bytes, ctypes.CDLL] = {}
_LOCK = threading.RLock()


def runtime_library(data: bytes | memoryview) -> ctypes.CDLL:
    """The runtime with this content, loaded once per process and never unloaded."""
    library = _once(data)
    if not hasattr(library, "declared"):
        for name, (result, arguments) in FUNCTIONS.items():
            if hasattr(library, name):  # runtimes of older packages lack the functions for devices
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        # Before format 1.3 models had no reference count: the one owner had to know when all other users were done.
        shared = hasattr(library, "flam_retain")
        library.retain = library.flam_retain if shared else lambda model: None  # type: ignore[attr-defined]
        library.release = library.flam_unload if shared else lambda model: None  # type: ignore[attr-defined]
        library.declared = True  # type: ignore[attr-defined]
    return library


def add_device(runtime: ctypes.CDLL, kind: str, data: bytes | memoryview) -> None:
    """Registers a kind of device with a runtime. `data`: the shared library with the functions of that kind."""
    library = _once(data)
    if kind == "opencl":
        if path := opencl_library():
            library.flam_opencl_library(path.encode())
        name_all_cpus()
    table = getattr(library, f"flam_{kind}")
    table.restype = _P
    runtime.flam_add_device(table())


def opencl_library() -> str:
    """The path of the OpenCL library that PyOpenCL ships, if the system has none; empty: use the system's."""
    try:
        ctypes.CDLL("libOpenCL.so.1")
        return ""
    except OSError:
        pass
    try:
        import pyopencl
    except ImportError:
        return ""
    found = glob.glob(os.path.join(os.path.dirname(pyopencl.__file__), ".libs", "libOpenCL*")) + glob.glob(
        os.path.join(os.path.dirname(os.path.dirname(pyopencl.__file__)), "pyopencl.libs", "libOpenCL*"))
    return found[0] if found else ""


def _once(data: bytes | memoryview) -> ctypes.CDLL:
    digest = hashlib.sha256(data).digest()
    with _LOCK:
        if digest not in _LIBRARIES:
            _LIBRARIES[digest] = _loaded(data)
        return _LIBRARIES[digest]


def _loaded(data: bytes | memoryview) -> ctypes.CDLL:
    if hasattr(os, "memfd_create"):
        # The file stays open: a closed descriptor's number would be reused, and the loader takes two files of one name
        # for the same library.
        file = os.memfd_create("flambeau", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(file), "wb") as out:
            out.write(data)
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    with tempfile.NamedTemporaryFile(suffix=".so") as out:
        out.write(data)
        out.flush()
        return ctypes.CDLL(out.name)


class PackageError(Error):
    """A package cannot do what it was asked for; the message says what was expected, and what was given."""


def failed(error: Failure) -> PackageError:
    return PackageError(error.message.decode(errors="replace"))
