"""Passes NumPy arrays and torch tensors to the runtime and allocates its results; reads weights from files.

A library of arrays (`NumPy`, `Torch`) defines which properties of an argument must equal those of the previous call
(`key`), and the Python source lines that compare them (`differs`), pass an address to the runtime (`told`) and allocate
a result (`result`). `calling` generates a function from these lines, so a call has no loop and no lookup.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from functools import cache
from math import prod
from typing import Any

import numpy as np

from .client import CODES, Call, Failure, PackageError, Tensor, failed
from .index import ORDER, Port, Weight

_WORDS = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
          "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}

STRIDED = "torch.strided"


def array_dtype(name: str) -> Any:
    """The NumPy dtype of that name. bfloat16 is that of ml_dtypes if it is imported, otherwise uint16 (its bits)."""
    if name != "bfloat16":
        return np.dtype(name)
    found = sys.modules.get("ml_dtypes")
    return np.dtype(found.bfloat16) if found else np.dtype("uint16")


def is_torch(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "torch" and hasattr(x, "data_ptr")


class NumPy:
    device = "cpu"
    before: tuple[str, ...] = ()
    differs = ("type(x{k}) is not ndarray or x{k}.dtype is not dtype{k} or x{k}.shape != shape{k} "
               "or x{k}.strides != strides{k}")
    # The buffer protocol gives the address in a third of the time. It refuses arrays that are read-only, have gaps, or
    # have a dtype that Python does not know; those are asked through __array_interface__.
    told = """try: given{k}.data = addressof(from_buffer(x{k}))
        except (TypeError, ValueError): given{k}.data = x{k}.__array_interface__["data"][0]"""
    plain = "y{k} = empty(size{k}, kind{k}); result{k}.data = addressof(from_buffer(y{k}))"
    ordered = ("y{k} = empty(size{k}, kind{k}).transpose(order{k}); "
               'result{k}.data = y{k}.__array_interface__["data"][0]')
    names: dict[str, Any] = {"ndarray": np.ndarray, "empty": np.empty, "addressof": addressof,
                             "from_buffer": c_char.from_buffer}

    @staticmethod
    def key(x: Any) -> dict[str, Any] | None:
        return {"shape": x.shape, "strides": x.strides, "dtype": x.dtype} if type(x) is np.ndarray else None

    @staticmethod
    def result(t: Tensor, name: str) -> tuple[str, dict[str, Any]]:
        dtype, shape, strides = array_dtype(name), tuple(t.sizes[: t.rank]), tuple(t.strides[: t.rank])
        rows = tuple(prod(shape[k + 1:]) for k in range(t.rank))
        if dtype.isbuiltin == 1 and 0 not in shape and strides == rows:
            return NumPy.plain, {"size": shape, "kind": dtype}
        order = sorted(range(t.rank), key=lambda d: -strides[d])
        back = [order.index(d) for d in range(t.rank)]
        return NumPy.ordered, {"size": tuple(shape[d] for d in order), "kind": dtype, "order": back}


class Torch:
    """torch tensors on one device."""

    differs = ("type(x{k}) is not type{k} or x{k}.dtype is not dtype{k} or x{k}.shape != shape{k} "
               "or x{k}.stride() != strides{k} or x{k}.device != device{k} or x{k}.is_neg()")
    told = "given{k}.data = x{k}.data_ptr()"
    # A tensor without elements has the address 0, and needs none: 64 stands in for it.
    made = "y{k} = empty(size{k}, strides{k}, dtype=kind{k}, device=device); result{k}.data = y{k}.data_ptr() or 64"

    def __init__(self, device: str) -> None:
        self.device, torch = device, sys.modules["torch"]
        self.names: dict[str, Any] = {"empty": torch.empty_strided, "device": torch.device(device),
                                      "current_stream": torch.cuda.current_stream}
        # On a GPU the call is enqueued on torch's current stream. The host does not wait, unless kernels check indices.
        self.before = ("call.stream = current_stream(device).cuda_stream",) * (device != "cpu")

    @staticmethod
    def key(x: Any) -> dict[str, Any] | None:
        return {"type": type(x), "shape": x.shape, "strides": x.stride(), "dtype": x.dtype,
                "device": x.device} if is_torch(x) else None

    def result(self, t: Tensor, name: str) -> tuple[str, dict[str, Any]]:
        return self.made, {"size": tuple(t.sizes[: t.rank]), "strides": tuple(t.strides[: t.rank]),
                           "kind": getattr(sys.modules["torch"], name)}


def calling(arrays: NumPy | Torch, keys: Sequence[dict[str, Any]], given: Sequence[Tensor], results: Sequence[Tensor],
            dtypes: Sequence[str], run: Callable[[], int], call: Call,
            error: Failure) -> Callable[..., tuple[Any, ...] | None]:
    """Generates a function with one parameter per key that runs a method: it passes the arguments' addresses to the
    runtime, allocates the results and calls `run`. It returns None if an argument does not match its key."""
    values: dict[str, Any] = {**arrays.names, "run": run, "call": call, "error": error, "failed": failed}
    lines = []
    for k, (key, t) in enumerate(zip(keys, given)):
        lines.append(f"if {arrays.differs.format(k=k)}: return None")
        values |= {f"{name}{k}": x for name, x in key.items()} | {f"given{k}": t}
    lines += [arrays.told.format(k=k) for k in range(len(keys))]
    for k, (t, dtype) in enumerate(zip(results, dtypes), len(keys)):
        line, own = arrays.result(t, dtype)
        lines.append(line.format(k=k))
        values |= {f"{name}{k}": x for name, x in own.items()} | {f"result{k}": t}
    made = "".join(f"y{k}, " for k in range(len(keys), len(keys) + len(results)))
    lines += [*arrays.before, "if run(): raise failed(error)", f"return ({made})"]
    function: Callable[..., tuple[Any, ...] | None] = function_maker(
        ", ".join(f"x{k}" for k in range(len(keys))), "\n        ".join(lines), tuple(values))(*values.values())
    return function


@cache
def function_maker(arguments: str, body: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """A factory for functions with this source text. The text is the same for all shapes, so it is compiled once."""
    scope: dict[str, Any] = {}
    exec(f"def maker({', '.join(names)}):\n    def method({arguments}):\n        {body}\n    return method", scope)
    found: Callable[..., Any] = scope["maker"]
    return found


def library_of(flat: Sequence[Any], device: str, number: int) -> NumPy | Torch:
    """The library that allocates the results: torch if an argument is a tensor, otherwise NumPy. torch's results are
    on `device` if one of the tensors is there, otherwise on the CPU."""
    tensors = [x for x in flat if is_torch(x)]
    there = device != "cpu" and any(x.device.type == device for x in tensors)
    return Torch(f"{device}:{number}" if there else "cpu") if tensors else NumPy()


def shown(x: Any) -> str:
    """Describes a rejected argument for an error message: its dtype, shape, layout and device, or its type."""
    if is_torch(x):
        where = "" if x.device.type == "cpu" else f" on {x.device}"
        kind = "" if str(x.layout) == STRIDED else f" of layout {x.layout}"
        lazy = ", a view that is negated or conjugated" if not kind and (x.is_neg() or x.is_conj()) else ""
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{kind}{where}{lazy}"
    if isinstance(x, np.ndarray):
        apart = any(s % max(x.itemsize, 1) for s in x.strides)
        return f"{x.dtype} {list(x.shape)}" + f" with strides of {list(x.strides)} bytes" * apart
    return f"{type(x).__name__} {x!r:.40}" if isinstance(x, bool | int | float | str) else type(x).__name__


def unlike(port: Port | Weight, x: Any, device: str = "cpu", what: str = "input") -> PackageError:
    there = "" if device == "cpu" else f" on {device}"
    return PackageError(f"{what} {port.name!r}: expected {port.type}{there}, got {shown(x)}")


def fill(t: Tensor, x: Any, port: Port | Weight, device: str = "cpu", what: str = "input") -> None:
    """Describes an argument to the runtime, which checks it; raises an error for what `Tensor` cannot express. A uint16
    array is accepted as the bits of bfloat16. `device`: where tensors must be."""
    if is_torch(x):
        if str(x.layout) != STRIDED or str(x.device) != device or x.is_neg() or x.is_conj():
            raise unlike(port, x, device, what)
        dtype, strides = str(x.dtype).removeprefix("torch."), x.stride()
        t.data = x.data_ptr()
    else:
        dtype = x.dtype.name if isinstance(x, np.ndarray) and x.dtype.isnative and device == "cpu" else ""
        if dtype not in CODES or any(s % x.itemsize for s in x.strides):
            raise unlike(port, x, device, what)
        strides = tuple(s // x.itemsize for s in x.strides)
        dtype = port.dtype if (dtype, port.dtype) == ("uint16", "bfloat16") else dtype
        t.data = x.__array_interface__["data"][0]
    if dtype not in CODES or x.ndim > len(t.sizes):
        raise unlike(port, x, device, what)
    t.dtype, t.rank = CODES[dtype], x.ndim
    for k, (n, s) in enumerate(zip(x.shape, strides)):
        t.sizes[k], t.strides[k] = n, s


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_torch(x)


def safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tensors of a safetensors file by name, as views of the mapped file."""
    data = np.memmap(path, mode="r")
    try:
        length, = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        found, about = {}, header.get("__metadata__", {})
        for name, one in header.items():
            if name != "__metadata__" and not name.startswith("__pad__."):
                begin, end = one["data_offsets"]
                part = data[8 + length + begin : 8 + length + end]
                lies = part.view(array_dtype(_WORDS[one["dtype"]])).reshape(one["shape"])
                order = json.loads(about.get(f"{ORDER}{name}", "null")) or range(lies.ndim)
                found[name] = lies.transpose([order.index(d) for d in range(lies.ndim)])
        return found
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise PackageError(f"{os.fspath(path)} is no safetensors file: {e}") from e
