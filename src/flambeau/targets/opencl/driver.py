"""The driver of OpenCL devices for PyTorch: memory by address, queues as streams, markers as events.

A stream is an in-order queue. Its commands run asynchronously. `read` and `write` wait, unless they are told that the
host's memory stays unchanged until the event they return. Kernels are enqueued by the native launcher
(opencl_launcher.cpp); faults that they find in their data are raised where the host waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import pyopencl
from numpy import zeros

from flambeau.codegen.source import RangeSource
from flambeau.config import config
from flambeau.errors import CompileError, Error
from flambeau.ir.faults import error_of

from ..cache import shared_cache
from ..launch import extension
from ..toolchain import find_toolchain
from .device import NAME, ClDevice, devices
from .host import RECORD, WRITTEN, found
from .memory import memory_at

ALL = -1  # all streams of a device; or, where a stream should wait, the host
# CPUs tell a load from an earlier store by the last bits of their addresses: buffers that all begin at a page would
# wait for one another. So each begins further into its page than the one before.
PAGE, STAGGER = 4096, 1152


class ClStream:
    """A queue, and the last command that was enqueued on it."""

    def __init__(self, device: ClDevice) -> None:
        self.device = device
        timed = pyopencl.command_queue_properties.PROFILING_ENABLE
        self.queue = pyopencl.CommandQueue(device.context, properties=timed)
        self.last: pyopencl.Event | None = None


class ClDriver:
    """The driver interface of device/core.py, and copies to and from host memory."""

    def __init__(self, found: Sequence[ClDevice] | None = None) -> None:
        self.found = tuple(devices() if found is None else found)
        self.devices = len(self.found)
        self.accelerates = not all(device.is_cpu for device in self.found)
        self._lock = threading.Lock()
        self._buffers: dict[int, tuple[pyopencl.Buffer, int]] = {}  # by address; with the first byte used
        self._begin = 0
        self._used = [0] * self.devices
        self._streams: dict[tuple[int, int], ClStream] = {}
        self._events: dict[int, tuple[int, int, pyopencl.Event]] = {}  # device, stream
        self._faults: dict[int, pyopencl.Buffer] = {}  # a record for each device
        self._reporting: list[RangeSource] = []  # kernels that check their data, by the numbers they report

    @cached_property
    def launcher(self) -> ModuleType:
        """The extension that launches kernels, and knows where device memory is."""
        module = _extension()
        module.open(pyopencl._cl.__file__, self.stream)
        return module

    def follow(self, current_stream: int) -> None:
        """Makes kernels go to the stream that this C function names for a device."""
        self.launcher.follow(current_stream)

    # ---- memory ----------------------------------------------------------------------------------------

    def alloc(self, device: int, address: int, nbytes: int) -> None:
        stream, on = self.stream(device, 0), self.found[device]
        most, total = int(on.device.max_mem_alloc_size), int(on.device.global_mem_size)
        if nbytes > most:
            raise MemoryError(f"The device takes at most {most} bytes at once")
        # Drivers reserve memory at its first use, when it is too late to handle an error: so it is counted, and
        # requested now.
        if self._used[device] + nbytes > total:
            raise MemoryError(f"The device has {total} bytes")
        begin, flags = 0, int(pyopencl.mem_flags.READ_WRITE)
        if on.is_cpu:
            flags |= int(pyopencl.mem_flags.ALLOC_HOST_PTR)  # PoCL crashes if there is none at the first use
            if PAGE <= nbytes <= most - PAGE:
                begin = self._begin = (self._begin + STAGGER) % PAGE
        try:
            buffer = pyopencl.Buffer(on.context, flags, begin + nbytes)
            stream.last = pyopencl.enqueue_migrate_mem_objects(
                stream.queue, [buffer], pyopencl.mem_migration_flags.CONTENT_UNDEFINED)
        except (pyopencl.MemoryError, pyopencl.RuntimeError) as error:  # of the device, and of the host
            raise MemoryError(str(error)) from error
        with self._lock:
            self._buffers[address] = buffer, begin
            self._used[device] += buffer.size
        self.launcher.add_block(address, nbytes, buffer.int_ptr, begin)

    def free(self, device: int, address: int) -> None:
        self.launcher.remove_block(address)
        with self._lock:
            buffer, _ = self._buffers.pop(address)
            self._used[device] -= buffer.size
        buffer.release()  # the driver keeps it while commands use it

    def memory(self, device: int) -> tuple[int, int]:
        total = int(self.found[device].device.global_mem_size)
        return total - self._used[device], total

    def find(self, address: int) -> tuple[pyopencl.Buffer, int]:
        """Returns the buffer that contains an address, and the offset in bytes from its start."""
        if (start := self.launcher.start_of(address)) is None:
            raise Error(f"{address:#x} is not in memory of a device", target=NAME)
        buffer, begin = self._buffers[start]
        return buffer, begin + address - start

    def copy(self, device: int, stream: int, to: int, source: int, nbytes: int) -> None:
        there, (target, at), (origin, begin) = self.stream(device, stream), self.find(to), self.find(source)
        there.last = pyopencl.enqueue_copy(there.queue, target, origin, byte_count=nbytes, src_offset=begin,
                                           dst_offset=at)

    def read(self, device: int, stream: int, address: int, host: int, nbytes: int, wait: bool = True) -> Any:
        there, (buffer, at) = self.stream(device, stream), self.find(address)
        there.last = pyopencl.enqueue_copy(there.queue, memory_at(host, nbytes), buffer, src_offset=at,
                                           is_blocking=wait)
        self._settle(device, stream) if wait else there.queue.flush()
        return there.last

    def write(self, device: int, stream: int, address: int, host: int, nbytes: int, wait: bool = True) -> Any:
        there, (buffer, at) = self.stream(device, stream), self.find(address)
        there.last = pyopencl.enqueue_copy(there.queue, buffer, memory_at(host, nbytes), dst_offset=at,
                                           is_blocking=wait)
        if not wait:
            there.queue.flush()
        return there.last

    # ---- streams and events ----------------------------------------------------------------------------

    def stream(self, device: int, stream: int) -> ClStream:
        on = self.found[device]
        on.check_process()
        there = self._streams.get((device, stream))
        if there is None:
            with self._lock:
                there = self._streams.get((device, stream)) or self._open(device, stream)
        return there

    def _open(self, device: int, stream: int) -> ClStream:
        on = self.found[device]
        if device not in self._faults:
            flags = pyopencl.mem_flags.READ_WRITE | pyopencl.mem_flags.COPY_HOST_PTR
            self._faults[device] = pyopencl.Buffer(on.context, flags, hostbuf=zeros(RECORD, "int32"))
        there = self._streams[device, stream] = ClStream(on)
        self.launcher.add_queue(device, stream, there.queue.int_ptr, self._faults[device].int_ptr)
        return there

    def _settle(self, device: int, stream: int, done: bool = True) -> None:
        """Raises, once, the faults that kernels of the device have found, after the host has waited for a queue, to its
        end if `done`. Kernels of other queues count as well: the queue may have waited for them."""
        if not self.launcher.take_checked(device, stream if done else ALL):
            return
        # A queue that is at its end answers fastest; otherwise one on which nothing has to be waited for.
        queue = self._streams[device, stream].queue if done else self.found[device].queue
        record = zeros(RECORD, "int32")
        with self._lock:
            pyopencl.enqueue_copy(queue, record, self._faults[device])
            if record[0] != WRITTEN:  # nothing, or the report of another queue, which is not at its end
                return
            pyopencl.enqueue_copy(queue, self._faults[device], zeros(RECORD, "int32"))
        number, code, size = found(record)
        error = error_of(code, size)
        error.add_note(f"reported by the kernel of {', '.join(self._reporting[number].origins) or 'a graph'}, "
                       "which was launched before")
        raise error

    def number_of(self, source: RangeSource) -> int:
        """Returns the number under which it reports faults in its data."""
        with self._lock:
            self._reporting.append(source)
            return len(self._reporting) - 1

    def synchronise(self, device: int, stream: int) -> None:
        self.found[device].check_process()
        for (on, number), there in list(self._streams.items()):
            if on == device and stream in (number, ALL):
                there.queue.finish()
                there.last = None
                self.launcher.take_used(on, number)
        for on, number in list(self._streams):
            if on == device and stream in (number, ALL):
                self._settle(on, number)

    def idle(self, device: int, stream: int) -> bool:
        there = self.stream(device, stream)
        if self.launcher.take_used(device, stream):  # its kernels have no events
            there.last = pyopencl.enqueue_marker(there.queue)
            there.queue.flush()
        return there.last is None or self.is_complete(there.last)

    def record(self, device: int, stream: int, event: int) -> None:
        there = self.stream(device, stream)
        there.last = pyopencl.enqueue_marker(there.queue)
        there.queue.flush()  # flushed, because nobody else may wait for an event that is not submitted
        self._events[event] = device, stream, there.last

    def query(self, event: int) -> bool:
        return self.is_complete(self._events[event][2])

    def wait(self, event: int, device: int, stream: int) -> None:
        origin, queue, marker = self._events[event]
        if stream == ALL or origin != device:  # contexts do not know each other's events
            marker.wait()
            self._settle(origin, queue, done=False)
            return
        there = self.stream(device, stream)
        there.last = pyopencl.enqueue_barrier(there.queue, wait_for=[marker])

    def elapsed(self, start: int, end: int) -> float:
        first, last = self._events[start][2], self._events[end][2]
        if not (self.is_complete(first) and self.is_complete(last)):
            raise Error("both events must have happened before time is measured", target=NAME,
                        hint="synchronize the second one first")
        return float(last.profile.end - first.profile.end) * 1e-6

    def forget(self, event: int) -> None:
        self._events.pop(event, None)

    def is_complete(self, event: pyopencl.Event) -> bool:
        status = event.command_execution_status
        if status < 0:
            raise Error(f"a command on the device failed with code {status}", target=NAME)
        return bool(status == pyopencl.command_execution_status.COMPLETE)


@cache
def _extension() -> ModuleType:
    disk = shared_cache(config.cache_dir, config.cache_limit_mb)
    try:
        return extension("opencl_launcher", find_toolchain(config.compiler, disk), disk)
    except (ImportError, OSError) as error:
        raise CompileError(f"the launcher of OpenCL kernels does not work: {error}", target=NAME) from error
