"""A complete target for an accelerator that does not exist.

Its kernel language is C++, its compiler is the C++ compiler, and its memory is process memory at other addresses.
docs/guides/new-target.md explains this file.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from bisect import bisect_right, insort
from types import SimpleNamespace

import flambeau
from flambeau.codegen.c.kernel import render
from flambeau.codegen.source import LIBRARY
from flambeau.config import config
from flambeau.errors import CompileError, Error
from flambeau.ir.capabilities import Capabilities
from flambeau.targets.base import Build, Target
from flambeau.targets.cache import shared_cache
from flambeau.targets.launch import PythonPlan
from flambeau.targets.toolchain import find_toolchain

MEMORY = 4 << 30  # bytes that the accelerator pretends to have
KERNEL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)


class EchoTarget(Target):
    """Writes kernels, compiles them, launches them, and has memory."""

    name = "echo"
    opaque = True  # other code cannot read its memory at the addresses that PyTorch knows

    def __init__(self):
        self._driver = EchoDriver()

    def capabilities(self):
        return Capabilities(self.name, ordered_scatter=True)

    def render(self, kernel, name):
        return render(kernel, name)

    def build(self, sources):
        return EchoBuild(sources, self._driver)

    def plan(self, steps):
        return PythonPlan(steps)

    def driver(self):
        return self._driver

    def on_its_memory(self):
        return self


class EchoBuild(Build):
    """Compiles kernels immediately. Other targets may start a compiler here, and wait for it in `wait`."""

    def __init__(self, sources, driver):
        self._kernels = {source.name: self._compiled(source, driver) for source in sources}

    def done(self):
        return True

    def wait(self):
        return self._kernels

    def _compiled(self, source, driver):
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        toolchain = find_toolchain(config.compiler, disk)
        headers = "".join(f'#include "{header}"\n' for header in source.headers)
        text = f"#include <stdint.h>\n{headers}" + source.text.replace("KERNEL_NAME", "kernel")
        key = hashlib.sha256(f"{text}\0{toolchain.identity()}\0{flambeau.__version__}".encode()).hexdigest()
        try:
            if path := disk.get(key, ".so"):
                library = ctypes.CDLL(str(path))
            else:
                library, data = toolchain.compile(text, key, disk, lambda path: ctypes.CDLL(str(path)), LIBRARY)
                disk.put(key, data, ".so")
        except CompileError as error:
            return CompileError(f"the kernel {source.name} did not compile: {error}", target="echo")
        return EchoLaunch(source.name, KERNEL(("kernel", library)), driver)


class EchoLaunch:
    """A loaded kernel: takes addresses and sizes, and returns 0 or an error in the data."""

    def __init__(self, name, kernel, driver):
        self.name, self._kernel, self._driver = name, kernel, driver

    def __call__(self, pointers, sizes, /):
        places = [self._driver.place(address) for address in pointers]
        return self._kernel((ctypes.c_void_p * len(places))(*places), (ctypes.c_int64 * len(sizes))(*sizes))


class EchoDriver:
    """The accelerator as a PyTorch device: memory by address, and streams that are always idle."""

    devices = 1
    accelerates = False  # do not recommend it to programs that pick any accelerator

    def __init__(self):
        self.found = (SimpleNamespace(name="an accelerator that does not exist"),)
        self._blocks, self._starts, self._events = {}, [], {}

    def follow(self, current_stream):
        """A real device would ask this C function for the current stream."""

    # ---- memory ----------------------------------------------------------------------------------------

    def alloc(self, device, address, nbytes):
        if nbytes > self.memory(device)[0]:
            raise MemoryError(f"The device has {MEMORY} bytes")
        self._blocks[address] = ctypes.create_string_buffer(nbytes)
        insort(self._starts, address)

    def free(self, device, address):
        del self._blocks[address]
        self._starts.remove(address)

    def memory(self, device):
        return MEMORY - sum(map(len, self._blocks.values())), MEMORY

    def place(self, address):
        """The address in the process of an address of the device. Addresses of the process stay as they are."""
        at = bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else 0
        block = self._blocks.get(start, b"")
        return ctypes.addressof(block) + address - start if address - start < len(block) else address

    def copy(self, device, stream, to, source, nbytes):
        ctypes.memmove(self.place(to), self.place(source), nbytes)

    def read(self, device, stream, address, host, nbytes, wait=True):
        self.copy(device, stream, host, address, nbytes)

    def write(self, device, stream, address, host, nbytes, wait=True):
        self.copy(device, stream, address, host, nbytes)

    def is_complete(self, copy):
        return True

    # ---- streams and events ----------------------------------------------------------------------------

    def synchronise(self, device, stream):
        pass

    def idle(self, device, stream):
        return True

    def record(self, device, stream, event):
        self._events[event] = time.perf_counter()

    def query(self, event):
        return True

    def wait(self, event, device, stream):
        pass

    def elapsed(self, start, end):
        if start not in self._events or end not in self._events:
            raise Error("both events must be recorded before time is measured")
        return 1e3 * (self._events[end] - self._events[start])

    def forget(self, event):
        self._events.pop(event, None)
