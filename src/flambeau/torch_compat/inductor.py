"""Inductor: the class of its results, which AOTAutograd's cache knows, its settings, and its table of devices."""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.output_code import OutputCode

__all__ = ["OutputCode", "config", "name_device"]


def name_device(device: str) -> None:
    """Give a device a row in the table of what Inductor's texts call devices, so that it asks for generators."""
    from torch._inductor.codegen.common import DeviceOpOverrides, register_device_op_overrides

    overrides: Any = DeviceOpOverrides()
    register_device_op_overrides(device, overrides)
