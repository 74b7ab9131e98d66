"""Inductor: the class of its results (which AOTAutograd's cache knows), its settings, its table of devices."""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.output_code import OutputCode

__all__ = ["OutputCode", "aoti_load", "aoti_package", "config", "name_device"]


def name_device(device: str) -> None:
    """Add a device to Inductor's table of device names, so that it looks for code generators."""
    from torch._inductor.codegen.common import DeviceOpOverrides, register_device_op_overrides

    overrides: Any = DeviceOpOverrides()
    register_device_op_overrides(device, overrides)


def aoti_package(program: Any, path: str) -> str:
    """Compile an exported program to AOTInductor's package."""
    from torch._inductor import aoti_compile_and_package

    return aoti_compile_and_package(program, package_path=path)


def aoti_load(path: str) -> Any:
    from torch._inductor import aoti_load_package

    return aoti_load_package(path)
