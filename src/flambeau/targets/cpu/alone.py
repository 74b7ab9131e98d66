"""The CPU without libraries, for packages, which run where there is no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..base import Convolution
from .target import CpuTarget

if TYPE_CHECKING:
    from flambeau.ir.capabilities import Capabilities


class LibraryFreeCpu(CpuTarget):
    name = "cpu-alone"

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), name=self.name, contracts=True, sorts=True, tables=False)

    def channels_last(self, convolutions: Sequence[Convolution], calls: int) -> Mapping[Convolution, float]:
        return {}
