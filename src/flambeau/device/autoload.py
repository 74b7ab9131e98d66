"""Makes the name of the device known when torch is imported.

PyTorch calls `autoload` while it is imported (entry point group `torch.backends`), so nothing happens here but that the
name becomes known. The first tensor on the device starts it (`torch.flambeau._lazy_init`), or says why there is none.

PyTorch takes one device from outside, and that one is then its accelerator. Where there is another, the device keeps
out of the way until `flambeau.enable_device()`. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns all of this off.
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
    """Announce the device, unless somebody else is or wants to be the one from outside, or PyTorch has one itself.

    An installation that is found twice calls this twice."""
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
    """The device from outside that is there already, if it is not ours."""
    name = backend_name()
    return None if name in ("privateuseone", NAME) else name


def _process_group(*args: Any) -> Any:
    from .process_group import StagedGroup

    return StagedGroup(*args)


def _before_loading(storage: Any, location: str) -> None:
    """PyTorch loads what lies on the device; it asks before whether that is available, and does not start it."""
    if location.partition(":")[0] == NAME:
        torch_module.init()


def _others() -> bool:
    """Whether packages besides this one bring a device: theirs may be loaded after ours, and must find its place."""
    return any(entry.name != NAME for entry in entry_points(group=GROUP))


def _own_accelerator() -> bool:
    """Whether PyTorch has devices itself. Builds for CUDA run on machines without one; counting starts no driver."""
    found = accelerator()
    return found is not None and torch.get_device_module(found).device_count() > 0


# ---- before the start ------------------------------------------------------------------------------------


def started() -> None:
    """From here on PyTorch gets its answers from the device itself."""
    if BEFORE_START.is_applied:
        BEFORE_START.undo()


# What programs call that do not mean this device: loaders pin memory where an accelerator is available, and every
# barrier asks which one that is. PyTorch looks into the device for it, which is not there yet, instead of starting it.


def _pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    torch_module.init()
    return self.pin_memory(*args, **kwargs)


_device = torch.device  # Dynamo does not compile frames that do not speak of torch


def _get_accelerator() -> torch.device:
    return _device(NAME if torch_module._is_recommended() else "cpu")


def _find_accelerator() -> torch.device | None:
    return _device(NAME) if torch_module._is_recommended() else None
