"""Arrays as the runtime takes and gives them: what arguments are, results with their nesting, weights out of files."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .client import CODES, PackageError, Tensor

_WORDS = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
          "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def bfloat16() -> Any:
    """NumPy's dtype of bfloat16, where a library has brought one; else its bits."""
    found = sys.modules.get("ml_dtypes")
    return np.dtype(found.bfloat16) if found else np.dtype("uint16")


def array_dtype(name: str) -> Any:
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def is_torch(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "torch" and hasattr(x, "data_ptr")


def fill(t: Tensor, x: Any, name: str, device: str = "cpu") -> Any:
    """Describe an argument to the runtime; what must stay alive meanwhile. `device`: where tensors must be."""
    if is_torch(x):
        x = x.detach()
        if str(x.device) != device or x.is_neg() or x.is_conj():
            raise PackageError(f"input {name!r} is a tensor on {x.device}, and should be one on {device}")
        dtype, shape, strides = str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride()
        t.data = x.data_ptr()
    else:
        if not isinstance(x, np.ndarray) or device != "cpu":
            wanted = "an array" if device == "cpu" else f"a tensor on {device}"
            raise PackageError(f"input {name!r}: expected {wanted}, got {type(x).__name__}")
        dtype, shape = x.dtype.name, x.shape
        if not x.dtype.isnative:
            raise PackageError(f"input {name!r}: its bytes are in the order of another machine")
        item = x.itemsize
        if any(s % item for s in x.strides):
            raise PackageError(f"input {name!r}: its elements do not lie at multiples of their size")
        strides = tuple(s // item for s in x.strides)
        t.data = x.__array_interface__["data"][0]
    if len(shape) > len(t.sizes):
        raise PackageError(f"input {name!r} has {len(shape)} dimensions, and packages take up to {len(t.sizes)}")
    t.dtype, t.rank = CODES.get(dtype, 0), len(shape)
    for k, (n, s) in enumerate(zip(shape, strides)):
        t.sizes[k], t.strides[k] = n, s
    return x


def maker(t: Tensor, name: str) -> Callable[[], tuple[Any, int]]:
    """Makes an array for a result, and says where it is."""
    dtype, shape = array_dtype(name), tuple(t.sizes[: t.rank])
    strides = tuple(s * dtype.itemsize for s in t.strides[: t.rank])
    # A buffer says its address in half the time, but not those without elements or of dtypes that Python has not.
    buffers = dtype.isbuiltin == 1 and 0 not in shape
    if buffers and strides == contiguous(shape, dtype.itemsize):
        def plain() -> tuple[Any, int]:
            array = np.empty(shape, dtype)
            return array, ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]

        return plain
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    back = [order.index(d) for d in range(len(shape))]
    inner = tuple(shape[d] for d in order)

    def ordered() -> tuple[Any, int]:
        array = np.empty(inner, dtype).transpose(back)
        return array, array.__array_interface__["data"][0]

    return ordered


def contiguous(shape: Sequence[int], step: int) -> tuple[int, ...]:
    out: list[int] = []
    for n in reversed(shape):
        out.insert(0, step)
        step *= n
    return tuple(out)


def torch_of(x: Any, dtype: str) -> Any:
    torch = sys.modules["torch"]
    return torch.from_numpy(x.view("uint16")).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)


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


def nested(structure: Any, results: Sequence[Any]) -> Any:
    (kind, inside), = structure.items()
    if kind == "output":
        return results[inside]
    if kind == "dict":
        return {k: nested(v, results) for k, v in inside.items()}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(nested(x, results) for x in inside)
    return inside


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
                if one["dtype"] == "BF16" and "ml_dtypes" not in sys.modules:
                    raise PackageError("weights of bfloat16 need ml_dtypes, or torch tensors")
                found[name] = part.view(array_dtype(_WORDS[one["dtype"]])).reshape(one["shape"])
        return found
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise PackageError(f"{os.fspath(path)} is no safetensors file: {e}") from e
