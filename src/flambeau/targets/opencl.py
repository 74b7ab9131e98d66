"""OpenCL devices of any vendor: kernels in OpenCL C, built by the device's driver, launched through PyOpenCL.

Tensors on the CPU are computed where they are, by a device that works in the memory of the process: a plan waits for
its kernels, and reports what they found wrong with their data at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from flambeau.codegen.source import RangeSource
from flambeau.config import config
from flambeau.errors import CompileError, Error
from flambeau.targets.base import Build, Launch, Plan, Source, Step, Target
from flambeau.targets.cache import shared_cache
from flambeau.targets.cpu import in_large_pages
from flambeau.targets.opencl_compile import Building, ClCompiler, Kernel
from flambeau.targets.opencl_device import NAME, ClDevice, host_device
from flambeau.targets.opencl_memory import HostMemory, Memory, Span, addresses

if TYPE_CHECKING:
    import pyopencl
    import torch

    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel
    from flambeau.targets.opencl_driver import ClDriver
    from flambeau.targets.opencl_eager import ClDeviceTarget


MakeLaunch: TypeAlias = "Callable[[Kernel, pyopencl.Program], Launch]"


@cache
def _device_side() -> ClDeviceTarget:
    from flambeau.targets.opencl_eager import ClDeviceTarget

    return ClDeviceTarget()


class OpenClTarget(Target):
    name = NAME

    def __init__(self, device: ClDevice | None = None) -> None:
        self._given = device
        self._compilers: dict[int, ClCompiler] = {}
        self._memories: dict[int, Memory] = {}

    @cached_property
    def device(self) -> ClDevice:
        return self._given or host_device()

    def driver(self) -> ClDriver:
        return self.on_its_memory().driver()

    def on_its_memory(self) -> ClDeviceTarget:
        return _device_side()

    def capabilities(self) -> Capabilities:
        return self.device.capabilities()

    def identity(self) -> str:
        return f"{self.name} {self.device.identity}"

    def render(self, kernel: AnyKernel, name: str) -> RangeSource:
        from flambeau.codegen.opencl import dtypes_of, render
        from flambeau.ir.program import TableKernel

        assert not isinstance(kernel, TableKernel), "buffers have no addresses here"

        self.device.check_dtypes(dtypes_of(kernel))
        return render(kernel, name, self.device.shape)

    def build(self, sources: Sequence[Source]) -> ClBuild:
        device = self.device
        device.check_process()
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        compiler = self._compilers.setdefault(device.index, ClCompiler(device, self.keeps_binaries(device)))
        texts = [source for source in sources if isinstance(source, RangeSource)]
        return ClBuild(self.launch_on(device), compiler.start(texts, disk))

    def keeps_binaries(self, device: ClDevice) -> bool:
        return True

    def launch_on(self, device: ClDevice) -> MakeLaunch:
        memory = self._memories.setdefault(device.index, HostMemory(device))
        return lambda kernel, program: ClLaunch(device, memory, kernel, program)

    def plan(self, steps: Sequence[Step]) -> Plan:
        return ClPlan(steps)

    def empty(self, nbytes: int) -> torch.Tensor:
        import torch

        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.fresh(memory)
        return memory

    def fresh(self, memory: torch.Tensor) -> None:
        in_large_pages(memory)


class ClBuild(Build):
    def __init__(self, launch: MakeLaunch, kernels: dict[str, tuple[Kernel, Building]]) -> None:
        self._launch = launch
        self._kernels = kernels

    def done(self) -> bool:
        return all(program.done() for _, program in self._kernels.values())

    def wait(self) -> dict[str, Launch | CompileError]:
        out: dict[str, Launch | CompileError] = {}
        for name, (kernel, future) in self._kernels.items():
            program = future.result()
            out[name] = program if isinstance(program, CompileError) else self._launch(kernel, program)
        return out


class ClLaunch:
    """A kernel of one device: its functions, in the order of their launches."""

    def __init__(self, device: ClDevice, memory: Memory, kernel: Kernel, program: pyopencl.Program) -> None:
        import numpy
        import pyopencl

        self.name = kernel.source.name
        self.device = device
        self.memory = memory
        self.source = kernel.source
        self._items = items_function(kernel.source)
        self._functions = [pyopencl.Kernel(program, name) for name in kernel.functions()]
        long = numpy.int64
        kinds = [*(None, long) * len(self.source.itemsizes), *(long,) * self.source.sizes, None, long]
        for function in self._functions:
            function.set_scalar_arg_dtypes(kinds)

    def enqueue(self, places: Sequence[tuple[pyopencl.Buffer | None, int]], sizes: Sequence[int],
                faults: pyopencl.Buffer, at: int) -> None:
        import pyopencl

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
    """Launches in a row on one device's queue."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps: list[tuple[ClLaunch, tuple[tuple[int, int], ...], tuple[int, ...]]] = []
        for launch, where, which in steps:
            assert isinstance(launch, ClLaunch)
            self._steps.append((launch, tuple(where), tuple(which)))
        self._device = self._steps[0][0].device
        self._memory = self._steps[0][0].memory

    @cached_property
    def _faults(self) -> pyopencl.Buffer:
        """A word for each of the steps."""
        import numpy
        import pyopencl

        flags = pyopencl.mem_flags
        return pyopencl.Buffer(self._device.context, flags.READ_WRITE | flags.COPY_HOST_PTR,
                               hostbuf=numpy.zeros(len(self._steps), numpy.int32))

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> tuple[int, int] | None:
        import pyopencl

        self._device.check_process()
        placed = [addresses(pointers, where) for _, where, _ in self._steps]
        spans = [Span(address, nbytes, written) for (launch, _, _), there in zip(self._steps, placed, strict=True)
                 for address, nbytes, written in zip(there, launch.source.reach, launch.source.written, strict=True)]
        try:
            with self._device.lock, self._memory.window(spans) as find:
                for at, ((launch, _, which), there) in enumerate(zip(self._steps, placed, strict=True)):
                    launch.enqueue([find(a) for a in there], [sizes[slot] for slot in which], self._faults, at)
                    # Nothing after it may run: a later step may update what the caller will still use.
                    if launch.source.checks and (code := self._reported(at)):
                        return at, code
                return None
        except pyopencl.Error as error:
            raise Error(f"a launch failed: {error}", target=f"{NAME}, {self._device.name}") from error

    def _reported(self, at: int) -> int:
        """What a step found wrong; waits for it."""
        import numpy
        import pyopencl

        word = numpy.zeros(1, numpy.int32)
        place = at * word.itemsize
        pyopencl.enqueue_copy(self._device.queue, word, self._faults, src_offset=place)
        code = int(word[0])
        if code:
            word[0] = 0
            pyopencl.enqueue_copy(self._device.queue, self._faults, word, dst_offset=place)
        return code


def items_function(source: RangeSource) -> Callable[..., tuple[int, ...]]:
    """Of the cores and the sizes: the work-items of each launch."""
    names = ", ".join(["units", *(f"n{k}" for k in range(source.sizes))])
    scope: dict[str, Any] = {}
    exec(f"def items({names}): return ({''.join(r.items + ', ' for r in source.ranges)})", scope)
    items: Callable[..., tuple[int, ...]] = scope["items"]
    return items
