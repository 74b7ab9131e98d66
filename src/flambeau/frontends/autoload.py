"""The device's name, for PyTorch: `import torch` is enough for `torch.device("flambeau")`.

PyTorch calls `autoload` while it is imported (entry point group `torch.backends`), so nothing happens here but that the
name becomes known. The first tensor on the device starts it (`torch.flambeau._lazy_init`), or says why there is none.

PyTorch takes one device from outside, and that one is then its accelerator. Where there is another, the device keeps
out of the way until `flambeau.enable_device()`. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns all of this off.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import torch

from . import device_module
from .device_module import NAME

GROUP = "torch.backends"


def autoload() -> None:
    """Announce the device, unless somebody else is or wants to be the one from outside, or PyTorch has one itself."""
    if taken() is None and not _others() and not _own_accelerator():
        announce()
        torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]


def announce() -> None:
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def taken() -> str | None:
    """The device from outside that is there already, if it is not ours."""
    name = torch._C._get_privateuse1_backend_name()
    return None if name in ("privateuseone", NAME) else name


def _others() -> bool:
    """Whether packages besides this one bring a device: theirs may be loaded after ours, and must find its place."""
    return any(entry.name != NAME for entry in entry_points(group=GROUP))


def _own_accelerator() -> bool:
    """Whether PyTorch has devices itself. Builds for CUDA run on machines without one; counting starts no driver."""
    found = torch._C._accelerator_getAccelerator()
    return found is not None and torch.get_device_module(found).device_count() > 0


def _pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Until the first call: loaders pin where an accelerator is available, and PyTorch does not start it for that."""
    device_module.init()
    if torch.Tensor.__dict__.get("pin_memory") is _pin_memory:
        del torch.Tensor.pin_memory
    return self.pin_memory(*args, **kwargs)
