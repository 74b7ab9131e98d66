"""The device "flambeau": after `enable_device()`, tensors live on it.

    flambeau.enable_device()
    x = torch.randn(3, device="flambeau")

The core (device_core.cpp) gives PyTorch memory, streams, events and views; copies are device_copy.py's,
`torch.flambeau` is device_module.py. Operators are programs of their own (device_ops.py), or run on the CPU
(fallback.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from flambeau.errors import Error
from flambeau.targets.base import get_target

from . import device_module
from .device_composed import register_composed
from .device_copy import Copies
from .device_module import NAME
from .device_native import load_core
from .device_ops import open_gates
from .device_random import Seeds
from .fallback import Fallback
from .package import SEEDS

_LOCK = threading.Lock()
_LIBRARIES: list[torch.library.Library] = []  # what they register goes when they do


def enable_device() -> None:
    """Make `torch.device("flambeau")` known, for the rest of the process. UnsupportedError if there is none."""
    with _LOCK:
        if _LIBRARIES:
            return
        taken = torch._C._get_privateuse1_backend_name()
        if taken not in ("privateuseone", NAME):
            raise Error(f"PyTorch takes one device from outside, and {taken!r} is there already")
        driver = get_target(NAME).driver()
        core = load_core()
        torch.utils.rename_privateuse1_backend(NAME)
        core.start(driver)
        driver.follow(core.stream_function)
        device_module._start(core, tuple(device.name for device in driver.found))
        torch._register_device_module(NAME, device_module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        copies = Copies(NAME, driver, core)
        aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        for name, kernel in (("_copy_from", copies.copy_from), ("_copy_from_and_resize", copies.copy_and_resize),
                             ("_local_scalar_dense", copies.item)):
            aten.impl(name, _private(kernel), "PrivateUse1")
        # Copies know conjugated and negated views; what resolves them elsewhere is itself a copy.
        for name in ("_copy_from", "_copy_from_and_resize"):
            for key in ("Conjugate", "Negative"):
                aten.impl(name, torch.library.fallthrough_kernel, key)
        fallback = Fallback(copies, core.generator, device_module.current_device)
        fallback.register(everything, aten)
        register_composed(aten, fallback.call)
        _LIBRARIES.extend((aten, everything))
        SEEDS[NAME] = Seeds(copies, core.generator)
        open_gates()


def _private(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What a kernel does on the host is not the caller's: neither modes nor a default device reach it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return call
