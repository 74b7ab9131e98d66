"""What leaves the device: DLPack within the process, and a clear no to other processes."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing.reductions as reductions
from torch.utils.dlpack import DLDeviceType

from flambeau.errors import UnsupportedError

from .device_module import NAME


def register() -> None:
    torch.Tensor.__dlpack_device__ = _dlpack_device(torch.Tensor.__dlpack_device__)  # type: ignore[method-assign]
    for kind, reduce in ((torch.Tensor, reductions.reduce_tensor), (torch.nn.Parameter, reductions.reduce_tensor),
                         (torch.UntypedStorage, reductions.reduce_storage)):
        ForkingPickler.register(kind, _only_of_others(reduce))


def _dlpack_device(others: Callable[[torch.Tensor], tuple[IntEnum, int]]) -> Callable[..., tuple[IntEnum, int]]:
    """PyTorch exports a device from outside, but knows it here by the name only that it had before it got its own."""

    def __dlpack_device__(self: torch.Tensor) -> tuple[IntEnum, int]:  # noqa: N807 - as it is called
        if self.device.type != NAME:
            return others(self)
        return DLDeviceType.kDLExtDev, self.device.index

    return __dlpack_device__


def _only_of_others(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(value: Any) -> Any:
        if value.device.type == NAME:
            raise UnsupportedError(f"memory of {value.device} cannot be shared with another process",
                                   hint="send a copy: tensor.cpu()")
        return reduce(value)

    return call
