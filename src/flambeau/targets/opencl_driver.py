"""OpenCL devices as an eager device sees them: memory by address, queues as streams, markers as events.

A stream is an in-order queue. What is enqueued on one runs behind the host; `read` and `write` wait unless they are
told that the host's memory stays as it is until the event they return.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flambeau.errors import Error
from flambeau.targets.opencl_device import NAME, ClDevice, devices

if TYPE_CHECKING:
    import pyopencl

ALL = -1  # streams of a device; or, where a stream shall wait, the host


class ClStream:
    """A queue, and the last command that was put into it."""

    def __init__(self, device: ClDevice) -> None:
        import pyopencl

        self.device = device
        timed = pyopencl.command_queue_properties.PROFILING_ENABLE
        self.queue = pyopencl.CommandQueue(device.context, properties=timed)
        self.last: pyopencl.Event | None = None


class ClDriver:
    """What frontends/device_native.py asks of a driver, and copies to and from memory of the host."""

    def __init__(self, found: Sequence[ClDevice] | None = None) -> None:
        self.found = tuple(devices() if found is None else found)
        self.devices = len(self.found)
        self.accelerates = not all(device.is_cpu for device in self.found)
        self._lock = threading.Lock()
        self._buffers: dict[int, pyopencl.Buffer] = {}
        self._starts: list[int] = []
        self._used = [0] * self.devices
        self._streams: dict[tuple[int, int], ClStream] = {}
        self._events: dict[int, tuple[ClDevice, pyopencl.Event]] = {}

    # ---- memory ----------------------------------------------------------------------------------------

    def alloc(self, device: int, address: int, nbytes: int) -> None:
        import pyopencl

        stream, on = self.stream(device, 0), self.found[device]
        most, total = int(on.device.max_mem_alloc_size), int(on.device.global_mem_size)
        if nbytes > most:
            raise MemoryError(f"The device takes at most {most} bytes at once")
        # Drivers take memory at its first use, when nothing can be done any more if there is none: so it is counted,
        # and asked for now.
        if self._used[device] + nbytes > total:
            raise MemoryError(f"The device has {total} bytes")
        try:
            buffer = pyopencl.Buffer(on.context, pyopencl.mem_flags.READ_WRITE, nbytes)
            stream.last = pyopencl.enqueue_migrate_mem_objects(
                stream.queue, [buffer], pyopencl.mem_migration_flags.CONTENT_UNDEFINED)
        except pyopencl.MemoryError as error:
            raise MemoryError(str(error)) from error
        with self._lock:
            self._buffers[address] = buffer
            insort(self._starts, address)
            self._used[device] += nbytes

    def free(self, device: int, address: int) -> None:
        with self._lock:
            buffer = self._buffers.pop(address)
            del self._starts[bisect_right(self._starts, address) - 1]
            self._used[device] -= buffer.size
        buffer.release()  # the driver keeps it while commands use it

    def memory(self, device: int) -> tuple[int, int]:
        total = int(self.found[device].device.global_mem_size)
        return total - self._used[device], total

    def find(self, address: int) -> tuple[pyopencl.Buffer, int]:
        """The buffer that an address lies in, and how many bytes from its start."""
        if (buffer := self._buffers.get(address)) is not None:
            return buffer, 0
        at = bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else 0
        buffer = self._buffers.get(start)
        if buffer is None or address - start >= buffer.size:
            raise Error(f"{address:#x} is not in memory of a device", target=NAME)
        return buffer, address - start

    def copy(self, device: int, stream: int, to: int, source: int, nbytes: int) -> None:
        import pyopencl

        there, (target, at), (origin, begin) = self.stream(device, stream), self.find(to), self.find(source)
        there.last = pyopencl.enqueue_copy(there.queue, target, origin, byte_count=nbytes, src_offset=begin,
                                           dst_offset=at)

    def read(self, device: int, stream: int, address: int, host: int, nbytes: int, wait: bool = True) -> Any:
        import pyopencl

        there, (buffer, at) = self.stream(device, stream), self.find(address)
        there.last = pyopencl.enqueue_copy(there.queue, _memory_at(host, nbytes), buffer, src_offset=at,
                                           is_blocking=wait)
        if not wait:
            there.queue.flush()
        return there.last

    def write(self, device: int, stream: int, address: int, host: int, nbytes: int, wait: bool = True) -> Any:
        import pyopencl

        there, (buffer, at) = self.stream(device, stream), self.find(address)
        there.last = pyopencl.enqueue_copy(there.queue, buffer, _memory_at(host, nbytes), dst_offset=at,
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
            there = self._streams.setdefault((device, stream), ClStream(on))
        return there

    def synchronise(self, device: int, stream: int) -> None:
        for (on, number), there in list(self._streams.items()):
            if on == device and stream in (number, ALL):
                there.device.check_process()
                there.queue.finish()

    def idle(self, device: int, stream: int) -> bool:
        last = self.stream(device, stream).last
        return last is None or self.is_complete(last)

    def record(self, device: int, stream: int, event: int) -> None:
        import pyopencl

        there = self.stream(device, stream)
        there.last = pyopencl.enqueue_marker(there.queue)
        there.queue.flush()  # nobody else may wait for what is not on its way
        self._events[event] = (there.device, there.last)

    def query(self, event: int) -> bool:
        return self.is_complete(self._events[event][1])

    def wait(self, event: int, device: int, stream: int) -> None:
        import pyopencl

        origin, marker = self._events[event]
        if stream == ALL or origin is not self.found[device]:  # contexts do not know each other's events
            marker.wait()
            return
        there = self.stream(device, stream)
        there.last = pyopencl.enqueue_barrier(there.queue, wait_for=[marker])

    def elapsed(self, start: int, end: int) -> float:
        first, last = self._events[start][1], self._events[end][1]
        if not (self.is_complete(first) and self.is_complete(last)):
            raise Error("both events must have happened before time is measured", target=NAME,
                        hint="synchronize the second one first")
        return float(last.profile.end - first.profile.end) * 1e-6

    def forget(self, event: int) -> None:
        self._events.pop(event, None)

    def is_complete(self, event: pyopencl.Event) -> bool:
        import pyopencl

        status = event.command_execution_status
        if status < 0:
            raise Error(f"a command on the device failed with code {status}", target=NAME)
        return bool(status == pyopencl.command_execution_status.COMPLETE)


def _memory_at(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)
