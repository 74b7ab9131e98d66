"""The target for Apple GPUs: tensors on `mps`, kernels in Metal Shading Language.

Texts can be written on any machine (`flambeau ops --target metal`); they are compiled and launched on a Mac (`mac.py`),
or by the emulator.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from flambeau.codegen.source import RangeSource

from ..base import Build, Plan, Source, Step, Target

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities
    from flambeau.ir.program import AnyKernel


class MetalTarget(Target):
    names_kernels = True
    name = "mps"
    addresses = False
    # Not measured: families with handwritten kernels in PyTorch there, from sizes at which a launch costs nothing.
    wins: ClassVar[Mapping[str, int]] = dict.fromkeys(
        ("cumulative", "max pooling", "average pooling", "adaptive pooling", "softmax", "activations"), 1 << 16)

    def capabilities(self) -> Capabilities:
        from flambeau.codegen.simt.metal import capabilities

        return capabilities(self.name)

    def identity(self) -> str:
        return f"{self.name} {platform.mac_ver()[0]} {platform.machine()}"

    def machine(self) -> str:
        return "an Apple GPU"

    def render(self, kernel: AnyKernel, name: str, bounded: bool = False) -> RangeSource:
        from flambeau.codegen.simt.metal import render
        from flambeau.ir.program import AttentionKernel, TableKernel

        assert not isinstance(kernel, (AttentionKernel, TableKernel)), "a kernel of other machines"
        return render(kernel, name, bounded)

    def bounded(self, kernel: AnyKernel, name: str) -> RangeSource:
        return self.render(kernel, name, True)

    def build(self, sources: Sequence[Source]) -> Build:
        from .mac import MacLibrary, compiler

        library = MacLibrary([s for s in sources if isinstance(s, RangeSource)], compiler())
        return Build(dict.fromkeys(library.kernels, ()), library.launch)

    def plan(self, steps: Sequence[Step]) -> Plan:
        from .mac import MacPlan

        return MacPlan(steps)
