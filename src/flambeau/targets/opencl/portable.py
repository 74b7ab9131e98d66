"""OpenCL sources for any CPU or GPU, for packages. Nothing runs here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flambeau.codegen.source import RangeSource
from flambeau.errors import UnsupportedError

from ..base import Build, Plan, Source, Step, Target
from .device import NAME, AnyDevice
from .target import rendered

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel

CPUS, GPUS = AnyDevice("CPU", threads=True), AnyDevice("GPU", threads=False)


class PortableOpenCl(Target):
    name = NAME
    names_kernels = True

    def __init__(self, device: AnyDevice) -> None:
        self.device = device

    def capabilities(self) -> Capabilities:
        return self.device.capabilities()

    def render(self, kernel: AnyKernel, name: str) -> RangeSource:
        return rendered(kernel, name, self.device)

    def build(self, sources: Sequence[Source]) -> Build:
        raise UnsupportedError(f"texts for {self.device.name} are built where they run", target=NAME)

    def plan(self, steps: Sequence[Step]) -> Plan:
        raise UnsupportedError(f"texts for {self.device.name} run where they are built", target=NAME)
