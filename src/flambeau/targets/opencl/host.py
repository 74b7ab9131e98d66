"""OpenCL kernels on memory of the process: launches through PyOpenCL, which wait for their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy
import pyopencl

from flambeau.codegen.source import items_function
from flambeau.errors import Error

from ..base import Step
from .compile import Kernel, functions_of
from .device import NAME, ClDevice
from .memory import HostMemory, Span, addresses

RECORD, WRITTEN = 6, 2  # words of a report, and the value of the first word when the others are written


class ClLaunch:
    """A kernel of one device: its functions, in launch order."""

    def __init__(self, device: ClDevice, kernel: Kernel, program: pyopencl.Program) -> None:
        self.name = kernel.shown
        self.device = device
        self.source = kernel.source
        self._items = items_function(kernel.source)
        self._functions = [pyopencl.Kernel(program, name) for name in functions_of(kernel)]
        long = numpy.int64
        kinds = [*(None, long) * len(self.source.itemsizes), *(long,) * self.source.sizes, None, long]
        for function in self._functions:
            function.set_scalar_arg_dtypes(kinds)

    def enqueue(self, places: Sequence[tuple[pyopencl.Buffer | None, int]], sizes: Sequence[int],
                faults: pyopencl.Buffer, at: int) -> None:
        arguments: list[Any] = []
        for (buffer, offset), itemsize in zip(places, self.source.itemsizes, strict=True):
            if offset % itemsize:
                raise Error(f"a tensor of {itemsize}-byte elements lies {offset % itemsize} bytes off its alignment",
                            target=f"{NAME}, {self.device.name}")
            arguments += (buffer, offset // itemsize)
        arguments += (*sizes, faults, at)
        for function, part, items in zip(self._functions, self.source.ranges, self._items(self.device.units, *sizes),
                                         strict=True):
            if items > 0:
                function.set_args(*arguments)
                whole = -(-items // part.group) * part.group
                pyopencl.enqueue_nd_range_kernel(self.device.queue, function, (whole,), (part.group,))

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int:
        bad = ClPlan([(self, [(k, 0) for k in range(len(pointers))], range(len(sizes)))])(pointers, sizes)
        return 0 if bad is None else bad[1]

    def __repr__(self) -> str:
        return f"<Launch {self.name}>"


class ClPlan:
    """A sequence of launches on one device's queue."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps: list[tuple[ClLaunch, tuple[tuple[int, int], ...], tuple[int, ...]]] = []
        for launch, where, which in steps:
            assert isinstance(launch, ClLaunch)
            self._steps.append((launch, tuple(where), tuple(which)))
        self._device = self._steps[0][0].device
        self._memory = HostMemory(self._device)

    @cached_property
    def _faults(self) -> pyopencl.Buffer:
        """A fault record for each of the steps."""
        flags = pyopencl.mem_flags
        return pyopencl.Buffer(self._device.context, flags.READ_WRITE | flags.COPY_HOST_PTR,
                               hostbuf=numpy.zeros((len(self._steps), RECORD), numpy.int32))

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> tuple[int, int] | None:
        self._device.check_process()
        placed = [addresses(pointers, where) for _, where, _ in self._steps]
        spans = [Span(address, nbytes, written) for (launch, _, _), there in zip(self._steps, placed, strict=True)
                 for address, nbytes, written in zip(there, launch.source.reach, launch.source.written, strict=True)]
        try:
            with self._device.lock, self._memory.window(spans) as find:
                for at, ((launch, _, which), there) in enumerate(zip(self._steps, placed, strict=True)):
                    launch.enqueue([find(a) for a in there], [sizes[slot] for slot in which], self._faults, at)
                    # No later step may run: it may update what the caller will still use.
                    if launch.source.checks and (code := self._reported(at)):
                        return at, code
                return None
        except pyopencl.Error as error:
            raise Error(f"a launch failed: {error}", target=f"{NAME}, {self._device.name}") from error

    def _reported(self, at: int) -> int:
        """Returns the fault code of a step; waits for it."""
        record = numpy.zeros(RECORD, numpy.int32)
        place = at * record.nbytes
        pyopencl.enqueue_copy(self._device.queue, record, self._faults, src_offset=place)
        if not record[0]:
            return 0
        pyopencl.enqueue_copy(self._device.queue, self._faults, numpy.zeros_like(record), dst_offset=place)
        return found(record)[1]


def found(record: numpy.ndarray[Any, Any]) -> tuple[int, int, int]:
    """Decodes a record written by `fl_report`: the number of the kernel, the fault, the size that was exceeded."""
    return int(record[1]), *(int(x) for x in record[2:RECORD].view(numpy.int64))  # type: ignore[return-value]
