"""Registers the device's name when torch is imported.

PyTorch calls `autoload` during its import (entry point group `torch.backends`), so only the name is registered here.
The first tensor on the device starts it (`torch.flambeau._lazy_init`), or raises the reason why there is none.

PyTorch supports one external device, which becomes its accelerator. If there is another accelerator, the device is not
registered until `flambeau.enable_device()`. TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables all of this.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import torch

from flambeau.config import config
from flambeau.torch_compat.device import accelerator, backend_name, register_device_module
from flambeau.torch_compat.patches import BEFORE_START

from . import torch_module
from .libraries import hugging_face
from .torch_module import NAME

GROUP = "torch.backends"


def autoload() -> None:
    """Register the device, unless PyTorch has an accelerator of its own, or another package brings an external device.

    Called twice if the installation is found twice."""
    if backend_name() == NAME:
        return
    if taken() is None and not _others() and not _own_accelerator():
        announce()
        if config.patches:
            BEFORE_START.apply(_pin_memory, _get_accelerator, _find_accelerator)
        hugging_face.follow()


def announce() -> None:
    if backend_name() == NAME:
        return
    torch.utils.rename_privateuse1_backend(NAME)
    register_device_module(NAME, torch_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.serialization.register_package(0, lambda storage: None, _before_loading)
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend(NAME, _process_group, devices=[NAME, "cpu"])


def taken() -> str | None:
    """The name of another external device that is registered already; None if there is none."""
    name = backend_name()
    return None if name in ("privateuseone", NAME) else name


def _process_group(*args: Any) -> Any:
    from .process_group import StagedGroup

    return StagedGroup(*args)


def _before_loading(storage: Any, location: str) -> None:
    """Start the device before a storage is loaded onto it: PyTorch only checks whether the device is available."""
    if location.partition(":")[0] == NAME:
        torch_module.init()


def _others() -> bool:
    """Whether other installed packages provide a device: they may be loaded later, and must find the place free."""
    return any(entry.name != NAME for entry in entry_points(group=GROUP))


def _own_accelerator() -> bool:
    """Whether PyTorch itself has devices. CUDA builds also run on machines without one; counting starts no driver."""
    found = accelerator()
    return found is not None and torch.get_device_module(found).device_count() > 0


# ---- patches until the device starts ---------------------------------------------------------------------


def started() -> None:
    """Undo the patches, because PyTorch can ask the device itself from now on."""
    if BEFORE_START.is_applied:
        BEFORE_START.undo()


# Functions that programs call without meaning this device: data loaders pin memory if an accelerator is available, and
# every barrier asks which one that is. Instead of starting the device, PyTorch looks into it before it exists.


def _pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    torch_module.init()
    return self.pin_memory(*args, **kwargs)


_device = torch.device  # Dynamo does not compile frames that do not refer to torch


def _get_accelerator() -> torch.device:
    return _device(NAME if torch_module._is_recommended() else "cpu")


def _find_accelerator() -> torch.device | None:
    return _device(NAME) if torch_module._is_recommended() else None
