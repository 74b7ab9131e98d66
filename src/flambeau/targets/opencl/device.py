"""The OpenCL devices of this machine, their properties and queues.

    device = devices()[0]
    device.shape            # how kernels are written for it
    device.capabilities()   # what the passes before must know
"""

from __future__ import annotations

import os
import threading
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from flambeau.codegen.simt.dialect import Shape, point_capabilities
from flambeau.codegen.simt.opencl import MISSING, MISSING_WITHOUT_DOUBLES
from flambeau.errors import UnsupportedError
from flambeau.ir.capabilities import MODES, Capabilities
from flambeau.ir.dtypes import SUPPORTED, DType
from flambeau.ir.tuning import CPU, CPU_WORK_ITEMS, POINTS
from flambeau.targets.opencl import pocl

if TYPE_CHECKING:
    import pyopencl

NAME = "opencl"
LARGE_GROUP = 1024  # work-items of a group for a long row
PIECES = 64  # pieces of a reduction with few results on CPUs: the same on all of them, so that results are the same too


class DeviceFacts:
    """The facts of a device that kernels depend on: of a present device, or of any device of a kind (packages go to
    unknown machines). `threads`: whether its work-items are threads; on a CPU they are, unless a test says otherwise.
    """

    name: str
    threads: bool
    units: int
    largest_group: int
    local_bytes: int
    extensions: frozenset[str]

    @cached_property
    def dtypes(self) -> frozenset[DType]:
        """Supported dtypes. Half precision is stored as bits and computed in float32: only doubles can be missing."""
        return SUPPORTED if "cl_khr_fp64" in self.extensions else SUPPORTED - {torch.float64}

    @cached_property
    def shape(self) -> Shape:
        most = self.largest_group
        return Shape(self.threads, min(POINTS.group, most), self.units, min(LARGE_GROUP, most), self.local_bytes // 2)

    def capabilities(self) -> Capabilities:
        doubles = torch.float64 in self.dtypes
        missing = MISSING if doubles else MISSING_WITHOUT_DOUBLES
        if self.threads:
            return Capabilities(NAME, dtypes=self.dtypes, programs=PIECES, serial_scans=doubles,
                                ordered_scatter=True, missing=missing, contracts=True, sorts=True,
                                tuning=CPU_WORK_ITEMS)
        return point_capabilities(NAME, self.shape, dtypes=self.dtypes, missing=missing, scatters=self.joins)

    @cached_property
    def joins(self) -> frozenset[tuple[str, DType]]:
        """The modes and dtypes that scatters can combine: values in a word that one compare-and-swap can replace."""
        swapped = [d for d in self.dtypes if d.itemsize <= 4]
        if "cl_khr_int64_base_atomics" in self.extensions:
            swapped += [d for d in self.dtypes if d.itemsize == 8]
        return frozenset((mode, dtype) for mode in MODES for dtype in swapped)

    def check_dtypes(self, used: frozenset[DType]) -> None:
        if lacking := used - self.dtypes:
            raise UnsupportedError("the device does not have a dtype", dtypes=sorted(map(str, lacking)),
                                   target=f"{NAME}, {self.name}")


class AnyDevice(DeviceFacts):
    """A generic device: a CPU, or a GPU with features that all vendors have."""

    def __init__(self, name: str, threads: bool) -> None:
        self.name, self.threads = f"any {name}", threads
        self.units, self.largest_group, self.local_bytes = CPU.block_units, POINTS.group, 32 << 10
        self.extensions = frozenset({"cl_khr_fp64", "cl_khr_int64_base_atomics"})


class ClDevice(DeviceFacts):
    """A device with a context and an in-order queue of its own, both made at the first use."""

    def __init__(self, index: int, device: Any, threads: bool | None = None) -> None:
        self.index = index
        self.device = device
        self.threads = self.is_cpu if threads is None else threads
        self.name = f"{device.name.strip()} ({device.platform.name.strip()})"
        self.units, self.largest_group = int(device.max_compute_units), int(device.max_work_group_size)
        self.local_bytes, self.extensions = int(device.local_mem_size), frozenset(device.extensions.split())
        self.lock = threading.RLock()
        # the CPU that PoCL compiles for, if we named it
        self.named = pocl.name_the_cpu(device.int_ptr) if self.is_pocl and self.is_cpu else ""
        self._pid = os.getpid()  # drivers start threads when they are asked for devices

    def __repr__(self) -> str:
        return f"<ClDevice {self.index}: {self.name}>"

    @cached_property
    def context(self) -> pyopencl.Context:
        import pyopencl

        return pyopencl.Context([self.device])

    @cached_property
    def queue(self) -> pyopencl.CommandQueue:
        import pyopencl

        return pyopencl.CommandQueue(self.context)

    def check_process(self) -> None:
        """Raises UnsupportedError in a forked child, which lacks the driver's threads."""
        if self._pid != os.getpid():
            raise UnsupportedError("this process was forked after OpenCL was used", target=f"{NAME}, {self.name}",
                                   hint='start processes with multiprocessing\'s "spawn" or "forkserver" method')

    # ---- what it has -----------------------------------------------------------------------------------

    @cached_property
    def is_cpu(self) -> bool:
        import pyopencl

        return bool(self.device.type & pyopencl.device_type.CPU)

    @cached_property
    def is_pocl(self) -> bool:
        return bool(self.device.platform.name.strip() == pocl.PLATFORM)

    @cached_property
    def shares_host_memory(self) -> bool:
        """Whether it computes in any memory of the process in place. GPUs that could still copy unaligned memory."""
        return self.is_cpu and bool(self.device.host_unified_memory)

    @cached_property
    def options(self) -> tuple[str, ...]:
        import pyopencl

        rounding = pyopencl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
        given = {
            "-w": True,
            "-cl-fp32-correctly-rounded-divide-sqrt": bool(self.device.single_fp_config & rounding),
            "-DFL_DOUBLE": torch.float64 in self.dtypes,
            "-DFL_CLANG": self.is_cpu and self.is_pocl,
        }
        return tuple(option for option, wanted in given.items() if wanted)

    @cached_property
    def identity(self) -> str:
        d = self.device
        parts = (d.platform.name, d.platform.version, d.name, d.version, d.driver_version, self.named, *self.options)
        return "|".join(part.strip() for part in parts)


@cache
def devices() -> tuple[ClDevice, ...]:
    """Returns the devices of all platforms. Raises UnsupportedError if there is none."""
    hint = "pip install 'flambeau[opencl]' brings a device that runs on any x86 CPU"
    try:
        import pyopencl
    except ImportError as error:
        raise UnsupportedError(f"PyOpenCL cannot be imported: {error}", target=NAME, hint=hint) from error
    try:
        with pocl.a_core_for_each_thread():
            found = [d for platform in pyopencl.get_platforms() for d in platform.get_devices()]
    except pyopencl.Error as error:
        raise UnsupportedError(f"OpenCL finds no platform: {error}", target=NAME, hint=hint) from error
    if not found:
        raise UnsupportedError("OpenCL finds no device", target=NAME, hint=hint)
    return tuple(ClDevice(k, d) for k, d in enumerate(found))


def host_device() -> ClDevice:
    """Returns the first device that works in the memory of the process, where CPU tensors are."""
    for device in devices():
        if device.shares_host_memory:
            return device
    raise UnsupportedError("no OpenCL device works in the memory of the process, where the tensors are", target=NAME,
                           hint="pip install 'flambeau[opencl]' brings one that runs on any x86 CPU")
