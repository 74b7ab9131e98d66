"""`torch.mps.compile_shader` for tensors on the CPU: compiles any Metal source with g++ and runs it in the emulator.

    library = compile_shader(text)
    library.add(x, y, out, threads=[256], group_size=[64])
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from flambeau.codegen.source import LIBRARY, KernelSource
from flambeau.config import config
from flambeau.targets.base import KeyedSource
from flambeau.targets.cache import shared_cache
from flambeau.targets.cpu.target import unit_text
from flambeau.targets.metal.emulator.binding import Function, functions_of, with_arrays
from flambeau.targets.metal.emulator.target import instrumented, raised


class Library:
    """A compiled source, with its kernels as attributes."""

    def __init__(self, text: str) -> None:
        lines = [with_arrays(text)]
        self._functions = {f.name: f for f in functions_of(text)}
        for f in self._functions.values():
            lines.append(f"""FLM_PLAIN static void {f.name}_thread(void** a, const flm::Ids* i) {{ {f.call()}; }}
extern "C" FLM_PLAIN int64_t call_{f.name}(const flm::Buffer* buffers, int count, int64_t threads, int group) {{
  const flm::Part part = {{{f.name}_thread, "{f.name}", threads, group, {f.limit}}};
  return flm_launch(buffers, count, &part, 1, 0);
}}""")
        source = KernelSource("shader", "\n".join(lines), ("metal.h", "flm.h"))
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        name = hashlib.sha256(source.text.encode()).hexdigest()
        whole = unit_text([KeyedSource(source, name)])
        toolchain = instrumented(disk)
        self._loaded, _ = toolchain.compile(whole, name, disk, lambda path: ctypes.CDLL(str(path)), LIBRARY)

    def __getattr__(self, name: str) -> Any:
        if name not in self._functions:
            raise AttributeError(f"no kernel is called {name}")
        function = self._functions[name]

        def run(*args: Any, threads: Sequence[int], group_size: Sequence[int]) -> None:
            launch(getattr(self._loaded, f"call_{name}"), function, args, threads[0], group_size[0])

        return run


class Buffer(ctypes.Structure):
    _fields_ = [("pointer", ctypes.c_void_p), ("first", ctypes.c_int64), ("end", ctypes.c_int64),
                ("itemsize", ctypes.c_int32), ("written", ctypes.c_int32)]


def launch(call: Any, function: Function, args: Sequence[Any], threads: int, group: int) -> None:
    kinds = [kind for kind, what, _ in function.arguments if what == "buffer"]
    tensors, reads = [], []
    for a, kind in zip(args, kinds, strict=True):
        many = isinstance(a, list) and isinstance(a[0], torch.Tensor)  # several tensors as addresses in one buffer
        tensors += a if many else [a if isinstance(a, torch.Tensor) else torch.tensor(a)]
        reads += [not many and kind.startswith(("constant", "device const", "const"))] * (len(a) if many else 1)
    buffers = (Buffer * (len(tensors) + 1))()
    record = torch.zeros(6, dtype=torch.int32)
    for k, t in enumerate((*tensors, record)):
        start, size = t.storage_offset() * t.element_size(), t.untyped_storage().nbytes()
        written = k == len(tensors) or not reads[k]
        buffers[k] = Buffer(t.data_ptr(), -start, size - start, t.element_size(), written)
    call.restype = ctypes.c_int64
    raised(call(buffers, len(buffers), ctypes.c_int64(threads), group), function.name)


def compile_shader(text: str) -> Library:
    return Library(text)

