"""The OpenCL target: kernels in OpenCL C, built by the device's driver, launched through PyOpenCL.

Tensors on the CPU are computed in place, by a device that works in the memory of the process: a plan waits for its
kernels, and reports faults in their data immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch

from flambeau.codegen.c.dialect import INEXACT
from flambeau.codegen.source import RangeSource
from flambeau.config import config
from flambeau.errors import CompileError

from ..base import Build, Launch, Plan, Source, Step, Target
from ..cache import shared_cache
from ..cpu.target import in_large_pages
from .compile import ClCompiler, Kernel
from .device import NAME, ClDevice, DeviceFacts, host_device

if TYPE_CHECKING:
    import pyopencl

    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel

    from .driver import ClDriver
    from .eager import ClDeviceTarget


MakeLaunch: TypeAlias = "Callable[[Kernel, pyopencl.Program], Launch]"


@cache
def _device_side() -> ClDeviceTarget:
    from .eager import ClDeviceTarget

    return ClDeviceTarget()


def rendered(kernel: AnyKernel, name: str, device: DeviceFacts, bounded: bool = False) -> RangeSource:
    from flambeau.codegen.simt.kernel import dtypes_of
    from flambeau.codegen.simt.opencl import render
    from flambeau.ir.program import AttentionKernel, TableKernel

    assert not isinstance(kernel, (AttentionKernel, TableKernel)), "a kernel of other machines"
    device.check_dtypes(dtypes_of(kernel))
    return render(kernel, name, replace(device.shape, bounded=bounded))


class OpenClTarget(Target):
    names_kernels = True
    name = NAME

    def __init__(self, device: ClDevice | None = None) -> None:
        self._given = device
        self._compilers: dict[int, ClCompiler] = {}

    @cached_property
    def device(self) -> ClDevice:
        return self._given or host_device()

    def driver(self) -> ClDriver:
        return self.on_its_memory().driver()

    def on_its_memory(self) -> ClDeviceTarget:
        return _device_side()

    def capabilities(self) -> Capabilities:
        return replace(self.device.capabilities(), inexact=INEXACT)  # compared with eager's kernels for CPUs

    def identity(self) -> str:
        return f"{self.name} {self.device.identity}"

    def machine(self) -> str:
        return f"{NAME}, {self.device.name}"

    def bounded(self, kernel: AnyKernel, name: str) -> RangeSource:
        return self.render(kernel, name, True)

    def render(self, kernel: AnyKernel, name: str, bounded: bool = False) -> RangeSource:
        return rendered(kernel, name, self.device, bounded)

    def build(self, sources: Sequence[Source]) -> Build:
        device = self.device
        device.check_process()
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        compiler = self._compilers.setdefault(device.index, ClCompiler(device, self.keeps_binaries(device)))
        texts = [source for source in sources if isinstance(source, RangeSource)]
        kernels, launch, seconds = compiler.start(texts, disk), self.launch_on(device), config.compile_timeout

        def made(name: str) -> Launch | CompileError:
            program = compiler.result(*kernels[name], seconds)
            return program if isinstance(program, CompileError) else launch(kernels[name][0], program)

        return Build({name: (program,) for name, (_, program) in kernels.items()}, made)

    def keeps_binaries(self, device: ClDevice) -> bool:
        return True

    def launch_on(self, device: ClDevice) -> MakeLaunch:
        from .host import ClLaunch

        return lambda kernel, program: ClLaunch(device, kernel, program)

    def plan(self, steps: Sequence[Step]) -> Plan:
        from .host import ClPlan

        return ClPlan(steps)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        memory = super().empty(nbytes, device)
        self.fresh(memory)
        return memory

    def fresh(self, memory: torch.Tensor) -> None:
        in_large_pages(memory)
