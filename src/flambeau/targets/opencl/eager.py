"""OpenCL devices as PyTorch's device "flambeau": asynchronous kernels on device memory, on the current stream."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from flambeau.codegen.source import items_function

from ..base import Plan, Run, Step
from .device import ClDevice, devices
from .target import MakeLaunch, OpenClTarget

if TYPE_CHECKING:
    import pyopencl

    from ..base import Launch
    from .compile import Kernel
    from .driver import ClDriver


class ClDeviceTarget(OpenClTarget):
    """The target for the driver's devices: its current device is PyTorch's."""

    name = "flambeau"
    opaque = True

    @cached_property
    def _driver(self) -> ClDriver:
        devices()  # says what to install if PyOpenCL is missing
        from .driver import ClDriver

        return ClDriver()

    def driver(self) -> ClDriver:
        return self._driver

    def on_its_memory(self) -> ClDeviceTarget:
        return self

    @property
    def device(self) -> ClDevice:
        return self._driver.found[torch.accelerator.current_device_index()]

    def keeps_binaries(self, device: ClDevice) -> bool:
        return not device.is_pocl

    def launch_on(self, device: ClDevice) -> MakeLaunch:
        launcher = self._driver.launcher

        def make(kernel: Kernel, program: pyopencl.Program) -> Launch:
            import pyopencl

            from .compile import functions_of

            source, items = kernel.source, items_function(kernel.source)
            functions = [pyopencl.Kernel(program, name) for name in functions_of(kernel)]
            parts = tuple((f.int_ptr, part.group) for f, part in zip(functions, source.ranges, strict=True))
            number = self._driver.number_of(source) if source.checks else -1
            launch: Launch = launcher.Launch(kernel.shown, device.index, parts, source.itemsizes,
                                             lambda *sizes: items(device.units, *sizes), number, functions)
            return launch

        return make

    def plan(self, steps: Sequence[Step]) -> Plan:
        plan: Plan = self._driver.launcher.Plan(steps)
        return plan

    def fresh(self, memory: torch.Tensor) -> None:
        pass

    def queue(self) -> Hashable | None:
        device = torch.accelerator.current_device_index()
        return device, torch.accelerator.current_stream(device).stream_id

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.accelerator.device_index(device.index or 0)

    def guarded(self, run: Run, device: torch.device) -> Run:
        if self._driver.devices == 1:
            return run
        index, current, change = device.index or 0, torch.accelerator.current_device_index, \
            torch.accelerator.set_device_index

        def run_on_device(args: list[Any]) -> list[Any]:
            before = current()
            change(index)
            try:
                return run(args)
            finally:
                change(before)

        return run_on_device
