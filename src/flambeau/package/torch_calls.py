"""Calls the operators that a package leaves to torch. The runtime passes the operator and its tensors' addresses.

A call is JSON: {"operator": "aten.linalg_qr.default", "args": [...], "kwargs": {...}, "results": [0, 1]}. In it
a tensor is {"tensor": k}, a number computed at run time {"number": k}, a double {"float": its digits in hexadecimal}
and a named object of torch {"torch": "torch.float32"}. `results`: the positions to keep, or null for a single result.
"""

from __future__ import annotations

import ctypes
import json
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from .client import DTYPES, Failure, Tensor

_CALLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(Tensor), ctypes.c_int, ctypes.c_int,
                           ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(Failure))
FAILED = 5  # FLAM_DATA


@cache
def caller() -> Any:
    """The callback for the runtime, or None if torch is not installed."""
    try:
        import torch
    except ImportError:
        return None

    def call(text: bytes, tensors: Any, count: int, results: int, numbers: Any, error: Any) -> int:
        try:
            with torch.no_grad():
                given = [tensor_of(torch, tensors[k]) for k in range(count)]
                made = prepared(text)(given, numbers)
                for to, one in zip(given[count - results:], made, strict=True):
                    to.copy_(one)
            return 0
        except Exception as e:
            name = json.loads(text)["operator"]
            error[0].code, error[0].message = FAILED, f"{name}: {e}".encode()[:1019]
            return FAILED

    return _CALLER(call)


def tensor_of(torch: Any, t: Tensor) -> Any:
    """A torch tensor that shares the runtime's memory."""
    sizes, strides, dtype = tuple(t.sizes[:t.rank]), tuple(t.strides[:t.rank]), getattr(torch, DTYPES[t.dtype])
    if 0 in sizes:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    count = 1 + sum((n - 1) * s for n, s in zip(sizes, strides))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(t.data)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided(sizes, strides)


@cache
def prepared(text: bytes) -> Callable[[list[Any], Any], list[Any]]:
    import torch

    call = json.loads(text)
    try:
        function = operator.attrgetter(call["operator"])(torch.ops)
    except AttributeError:
        raise LookupError("torch has no such operator here: import the library that has it") from None

    def value(x: Any, tensors: list[Any], numbers: Any) -> Any:
        if isinstance(x, list):
            return [value(y, tensors, numbers) for y in x]
        if not isinstance(x, dict):
            return x
        (kind, inside), = x.items()
        if kind == "torch":
            named = inside.startswith("torch.")
            return getattr(torch, inside.removeprefix("torch.")) if named else torch.device(inside)
        return tensors[inside] if kind == "tensor" else numbers[inside] if kind == "number" else float.fromhex(inside)

    def run(tensors: list[Any], numbers: Any) -> list[Any]:
        named = {k: value(x, tensors, numbers) for k, x in call["kwargs"].items()}
        made = function(*value(call["args"], tensors, numbers), **named)
        return [made] if call["results"] is None else [made[k] for k in call["results"]]

    return run
