"""Finds the buffer and offset of an address: kernels take buffers, programs have addresses.

`HostMemory`, for tensors on the CPU, opens a window on the memory that a plan is about to access, and makes buffers of
the tensors' own memory while it is open. (The native launcher, opencl_launcher.cpp, knows device memory.)
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyopencl
from numpy import dtype

from .device import ClDevice

ALIGNMENT = 128  # bytes: the largest element of OpenCL C, a long16


@dataclass(frozen=True)
class Span:
    """The memory that a kernel accesses from an address on, as far as its size is known."""

    address: int
    nbytes: int
    written: bool


Find: TypeAlias = Callable[[int], tuple[pyopencl.Buffer | None, int]]  # the buffer, and the offset in bytes


class HostMemory:
    """The memory of the process, on a device that works in it in place: nothing is copied.

    Spans may therefore be shorter than the accessed memory, where only the run decides how much that is.
    """

    def __init__(self, device: ClDevice) -> None:
        self._device = device

    @contextmanager
    def window(self, spans: Iterable[Span]) -> Iterator[Find]:
        """Makes addresses of the spans findable within this block; afterwards, the process sees what was written."""
        device = self._device
        most = int(device.device.max_mem_alloc_size)
        flags = pyopencl.mem_flags.USE_HOST_PTR | pyopencl.mem_flags.READ_WRITE
        regions = merged(spans, most)
        starts = [r.address for r in regions]
        buffers = [pyopencl.Buffer(device.context, flags, hostbuf=memory_at(r.address, r.nbytes)) for r in regions]

        def find(address: int) -> tuple[pyopencl.Buffer | None, int]:
            if not address:  # of a tensor without elements
                return None, 0
            k = bisect_right(starts, address) - 1
            return buffers[k], address - starts[k]

        try:
            yield find
            # Mapping a buffer makes the kernels' results visible in its memory. There is only one wait, for all
            # commands.
            mapped = [pyopencl.enqueue_map_buffer(device.queue, buffer, pyopencl.map_flags.READ, 0, (r.nbytes,),
                                                  dtype("uint8"), is_blocking=False)[0]
                      for r, buffer in zip(regions, buffers, strict=True) if r.written]
            device.queue.finish()
            for array in mapped:
                array.base.release(device.queue)
        except BaseException:
            device.queue.finish()
            raise
        finally:
            for buffer in buffers:
                buffer.release()


def merged(spans: Iterable[Span], most: int) -> list[Span]:
    """Returns regions that do not overlap, in order, aligned, none longer than `most`."""
    out: list[Span] = []
    for s in sorted((s for s in spans if s.address), key=lambda s: s.address):
        start, end, written = s.address // ALIGNMENT * ALIGNMENT, s.address + max(s.nbytes, 1), s.written
        if out and start < out[-1].address + out[-1].nbytes:
            last = out.pop()
            start, end, written = last.address, max(end, last.address + last.nbytes), written or last.written
        out.append(Span(start, min(end - start, most), written))
    return out


def memory_at(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)


def addresses(pointers: Sequence[int], where: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a kernel's pointers from the table; an offset from a null pointer stays null."""
    return [pointers[slot] + offset if pointers[slot] else 0 for slot, offset in where]
