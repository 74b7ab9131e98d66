"""Arrays as the runtime takes and gives them, of NumPy and of torch; results with their nesting; weights out of files.

A library of arrays says what of an array must be as in the call before (`key`), tells the runtime the addresses of such
arrays (`told`), and makes results (`maker`).
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_char
from typing import Any

import numpy as np

from .client import CODES, PackageError, Tensor

_WORDS = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
          "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
Maker = Callable[[], tuple[Any, int]]  # a new array, and where it is
_from_buffer, _empty = c_char.from_buffer, np.empty


def array_dtype(name: str) -> Any:
    """NumPy's; of bfloat16 where a library has brought one, else that of its bits."""
    if name != "bfloat16":
        return np.dtype(name)
    found = sys.modules.get("ml_dtypes")
    return np.dtype(found.bfloat16) if found else np.dtype("uint16")


def is_torch(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "torch" and hasattr(x, "data_ptr")


class NumPy:
    device = "cpu"

    @staticmethod
    def key(x: Any) -> tuple[Any, ...] | None:
        return (x.shape, x.strides, x.dtype) if type(x) is np.ndarray else None

    @staticmethod
    def told(args: Sequence[Any], keys: Sequence[Any], given: Sequence[Tensor]) -> bool:
        for x, t, (shape, strides, dtype) in zip(args, given, keys):
            if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape or x.strides != strides:
                return False
            try:  # the address of a buffer is found in a third of the time
                t.data = addressof(_from_buffer(x))  # type: ignore[arg-type]
            except (TypeError, ValueError):  # it is for reading alone, has gaps, or a dtype that Python does not know
                t.data = x.__array_interface__["data"][0]
        return True

    @staticmethod
    def maker(t: Tensor, name: str) -> Maker:
        dtype, shape = array_dtype(name), tuple(t.sizes[: t.rank])
        strides = tuple(s * dtype.itemsize for s in t.strides[: t.rank])
        if dtype.isbuiltin == 1 and 0 not in shape and strides == np.empty(shape, dtype).strides:
            def plain() -> tuple[Any, int]:
                array = _empty(shape, dtype)
                return array, addressof(_from_buffer(array))  # type: ignore[arg-type]

            return plain
        order = sorted(range(len(shape)), key=lambda d: -strides[d])
        back = [order.index(d) for d in range(len(shape))]
        inner = tuple(shape[d] for d in order)

        def ordered() -> tuple[Any, int]:
            array = _empty(inner, dtype).transpose(back)
            return array, array.__array_interface__["data"][0]

        return ordered


class Torch:
    """Tensors on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    @staticmethod
    def key(x: Any) -> tuple[Any, ...] | None:
        return (type(x), x.shape, x.stride(), x.dtype, x.device) if is_torch(x) else None

    @staticmethod
    def told(args: Sequence[Any], keys: Sequence[Any], given: Sequence[Tensor]) -> bool:
        for x, t, (kind, shape, strides, dtype, device) in zip(args, given, keys):
            if (type(x) is not kind or x.dtype is not dtype or x.shape != shape or x.stride() != strides
                    or x.device != device or x.is_neg()):
                return False
            t.data = x.data_ptr()
        return True

    def maker(self, t: Tensor, name: str) -> Maker:
        torch = sys.modules["torch"]
        shape, strides, dtype = tuple(t.sizes[: t.rank]), tuple(t.strides[: t.rank]), getattr(torch, name)
        device = torch.device(self.device)

        def make() -> tuple[Any, int]:
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            return made, made.data_ptr() or 64  # without elements it has no address, and needs none

        return make


def library_of(flat: Sequence[Any], device: str, number: int) -> NumPy | Torch:
    """Of which results are: torch's where something given is a tensor, on the device where something lies there."""
    tensors = [x for x in flat if is_torch(x)]
    there = device != "cpu" and any(x.device.type == device for x in tensors)
    return Torch(f"{device}:{number}" if there else "cpu") if tensors else NumPy()


def fill(t: Tensor, x: Any, name: str, wanted: str, device: str = "cpu") -> None:
    """Describe an argument to the runtime. `wanted`: its dtype; bits of bfloat16 may be given as such. `device`: where
    tensors must be."""
    if is_torch(x):
        if str(x.device) != device or x.is_neg() or x.is_conj():
            raise PackageError(f"input {name!r} is a tensor on {x.device}, and should be one on {device}")
        dtype, shape, strides = str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride()
        t.data = x.data_ptr()
    else:
        if not isinstance(x, np.ndarray) or device != "cpu":
            expected = "an array" if device == "cpu" else f"a tensor on {device}"
            raise PackageError(f"input {name!r}: expected {expected}, got {type(x).__name__}")
        dtype, shape, item = x.dtype.name, x.shape, x.itemsize
        if not x.dtype.isnative:
            raise PackageError(f"input {name!r}: its bytes are in the order of another machine")
        if any(s % item for s in x.strides):
            raise PackageError(f"input {name!r}: its elements do not lie at multiples of their size")
        strides = tuple(s // item for s in x.strides)
        dtype = wanted if (dtype, wanted) == ("uint16", "bfloat16") else dtype
        t.data = x.__array_interface__["data"][0]
    if len(shape) > len(t.sizes):
        raise PackageError(f"input {name!r} has {len(shape)} dimensions, and packages take up to {len(t.sizes)}")
    t.dtype, t.rank = CODES.get(dtype, 0), len(shape)
    for k, (n, s) in enumerate(zip(shape, strides)):
        t.sizes[k], t.strides[k] = n, s


def paths(name: str, x: Any) -> list[tuple[str, Any]]:
    """Arrays inside lists, tuples and dictionaries, by where they are."""
    if isinstance(x, Mapping):
        return [found for k in x for found in paths(f"{name}.{k}", x[k])]
    if isinstance(x, list | tuple):
        return [found for k, y in enumerate(x) for found in paths(f"{name}.{k}", y)]
    return [] if x is None or isinstance(x, bool | int | float | str) else [(name, x)]


def flattened(args: Sequence[Any]) -> list[Any]:
    """Numbers that the model was exported with are part of it, and are left out."""
    return [x for a in args for _, x in paths("", a)]


def nesting(structure: Any) -> Callable[[Sequence[Any]], Any]:
    """What puts results, one after the other, where the function had them."""
    (kind, inside), = structure.items()
    if kind == "output":
        return lambda results: results[inside]
    if kind == "dict":
        named = {k: nesting(v) for k, v in inside.items()}
        return lambda results: {k: of(results) for k, of in named.items()}
    if kind in ("tuple", "list"):
        made, each = tuple if kind == "tuple" else list, [nesting(x) for x in inside]
        return lambda results: made(of(results) for of in each)
    return lambda results: inside


def safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tensors of a safetensors file, as views of the mapped file."""
    data = np.memmap(path, mode="r")
    try:
        length, = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        found = {}
        for name, one in header.items():
            if name != "__metadata__" and not name.startswith("__pad__."):
                begin, end = one["data_offsets"]
                part = data[8 + length + begin : 8 + length + end]
                found[name] = part.view(array_dtype(_WORDS[one["dtype"]])).reshape(one["shape"])
        return found
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise PackageError(f"{os.fspath(path)} is no safetensors file: {e}") from e
