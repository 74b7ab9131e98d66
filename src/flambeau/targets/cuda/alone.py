"""NVIDIA GPUs without libraries, for packages, which run where there is no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import Convolution
from .target import CudaTarget

if TYPE_CHECKING:
    import torch

    from flambeau.ir.capabilities import Capabilities


class LibraryFreeCuda(CudaTarget):
    name = "cuda-alone"
    times = False  # products are always our own kernels, even where a library would be faster

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), name=self.name, contracts=True, sorts=True, tables=False,
                       shares=False)  # its runtime has no flags

    def channels_last(self, convolutions: Sequence[Convolution], calls: int) -> Mapping[Convolution, float]:
        return {}

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return super().on(device) if device.type == "cuda" else nullcontext()  # a package is made on any machine
