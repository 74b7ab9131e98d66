"""DLPack within the process, and a clear error for sharing with other processes."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType

from flambeau.config import config
from flambeau.errors import UnsupportedError
from flambeau.torch_compat.patches import DLPACK, SHARING

from .torch_module import NAME


def register() -> None:
    if config.patches:
        DLPACK.apply(_dlpack_device)
        SHARING.apply(_only_of_others)


def _dlpack_device(others: Callable[[torch.Tensor], tuple[IntEnum, int]]) -> Callable[..., tuple[IntEnum, int]]:
    """Add the device to `__dlpack_device__`: PyTorch can export it, but only knows its original name here."""

    def __dlpack_device__(self: torch.Tensor) -> tuple[IntEnum, int]:  # PyTorch's name
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
