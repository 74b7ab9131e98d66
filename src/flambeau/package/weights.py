"""The weights of a package: a section in safetensors format, each tensor once, aligned to 64 bytes."""

from __future__ import annotations

import json
import struct

import torch

from flambeau.errors import UnsupportedError

from .container import ALIGN, text_words
from .index import ALSO, ORDER
from .plan import DTYPES, MOST_RANK, STATE, WEIGHT

# The dtypes' names in safetensors.
KINDS = {torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
         torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float16: "F16",
         torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
CONSTANT = "constant."  # before the number of a constant that a graph contains
PAD = "__pad__."  # padding tensors: safetensors allows no gaps, and the next tensor must be aligned


class Weights:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.mutable: list[bool] = []
        self.known: dict[tuple[object, ...], int] = {}
        self.called: dict[str, str] = {}  # every name of a weight to its first; tied weights have several

    def add(self, name: str, t: torch.Tensor, mutable: bool) -> int:
        """Adds a weight and returns its position. A tensor that is already stored, under any name, is not stored again.
        `mutable`: a method writes to it, and methods that read it see the new value."""
        if t.dtype not in DTYPES or t.dim() > MOST_RANK or t.layout is not torch.strided or t.device.type != "cpu":
            raise UnsupportedError(f"the weight {name} is {t.dtype} {list(t.shape)} on {t.device}: packages hold dense "
                                   "tensors of the CPU")
        key = (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) if t.numel() else (name,)
        found = self.known.get(key)
        own = name if found is None else self.names[found]
        if self.called.setdefault(name, own) != own:
            raise UnsupportedError(f"two weights are called {name}")
        if found is not None:
            self.mutable[found] |= mutable
            return found
        self.known[key] = len(self.names)
        self.names.append(name)
        self.tensors.append(t)  # kept alive: its address is a key
        self.mutable.append(mutable)
        return self.known[key]

    def place(self, which: int) -> int:
        return STATE if self.mutable[which] else WEIGHT

    def add_constant(self, t: torch.Tensor) -> int:
        return self.add(f"{CONSTANT}{len(self.names)}", t, False)

    def other_names(self) -> dict[str, str]:
        return {f"{ALSO}{name}": own for name, own in self.called.items()
                if name != own and not name.startswith(CONSTANT)}

    def encoded(self) -> tuple[bytes, list[list[int]]]:
        """The section's content, and one row of the index for each weight."""
        parts: list[bytes] = []
        about = {"format": "flambeau"}
        header: dict[str, object] = {"__metadata__": about}
        places, at = [], 0
        for name, t in zip(self.names, self.tensors):
            order, shape, data = in_memory_order(t)
            if order != sorted(order):
                about[f"{ORDER}{name}"] = json.dumps(order)
            header[name] = {"dtype": KINDS[t.dtype], "shape": shape, "data_offsets": [at, at + len(data)]}
            places.append((at, len(data)))
            parts.append(data)
            at += len(data)
            if pad := -at % ALIGN:
                header[f"{PAD}{len(places)}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [at, at + pad]}
                parts.append(bytes(pad))
                at += pad
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        first = 8 + len(text)
        rows = [[*text_words(name), DTYPES[t.dtype], int(mutable), first + begin, size, t.dim(), *t.shape, *t.stride()]
                for name, t, mutable, (begin, size) in zip(self.names, self.tensors, self.mutable, places)]
        return b"".join((struct.pack("<Q", len(text)), text, *parts)), rows


def in_memory_order(t: torch.Tensor) -> tuple[list[int], list[int], bytes]:
    """The dimensions from outermost to innermost in memory, their sizes, and the bytes in that order. A tensor that is
    expanded or has gaps is stored flat, with everything between its first and last element."""
    if t.numel() == 0:
        return [], list(t.shape), b""
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    flat = t.as_strided((reach,), (1,)).contiguous()
    data = flat.view(torch.uint8).numpy().tobytes() if t.dtype is not torch.bool else flat.numpy().tobytes()
    if reach != t.numel():
        return [], [reach], data
    order = list(range(t.dim())) if t.is_contiguous() else sorted(range(t.dim()), key=t.stride, reverse=True)
    return order, [t.shape[d] for d in order], data
