"""`flambeau.enable_device()`: starts the device, so that tensors can be created on it.

    flambeau.enable_device()
    x = torch.randn(3, device="flambeau")

If autoload.py has registered the device, its first use enables it. The core (device_core.cpp) provides memory, streams,
events and views to PyTorch; copies are in copies.py, and `torch.flambeau` is torch_module.py. Operators are programs of
their own (operators.py), or run on the CPU (fallback.py).
"""

from __future__ import annotations

import shutil
import threading
from functools import cache
from typing import NamedTuple

import torch

from flambeau.config import config
from flambeau.errors import Error
from flambeau.runtime.launch_plan import SEEDS
from flambeau.runtime.watchers import look_on
from flambeau.targets.base import device_target

from . import compile_interface, exchange, torch_module
from .autoload import announce, started, taken
from .copies import Copies
from .core import load_core
from .fallback import Fallback
from .libraries import hugging_face
from .libraries.torchvision import register_detection
from .operators import load as load_gates
from .operators import open_gates
from .python_kernels import private
from .random_state import Seeds
from .sparse import register_sparse
from .torch_module import NAME

_LOCK = threading.RLock()
_LIBRARIES: list[torch.library.Library] = []  # kept, because kernels are unregistered when their library is destroyed


def enable_device() -> None:
    """Register `torch.device("flambeau")` for the rest of the process. UnsupportedError if there is no device."""
    with _LOCK:
        if torch_module.is_initialized():
            return
        if other := taken():
            raise Error(f"PyTorch takes one device from outside, and {other!r} is there already")
        look_on()
        target = device_target()
        driver, core = target.driver(), load_core()
        if own := target.on_its_memory() is not None:
            load_gates()
            driver.follow(core.stream_function)
        announce()  # after everything that may fail
        core.start(driver)
        torch_module._start(core, driver.found)
        started()
        exchange.register()
        compile_interface.register()
        copies = Copies(NAME, driver, core)
        aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        for name, kernel in (("_copy_from", copies.copy_from), ("_copy_from_and_resize", copies.copy_and_resize),
                             ("_local_scalar_dense", copies.item)):
            aten.impl(name, private(kernel), "PrivateUse1")
        # Copies handle conjugated and negated views; materializing them elsewhere is itself a copy.
        for name in ("_copy_from", "_copy_from_and_resize"):
            for key in ("Conjugate", "Negative"):
                aten.impl(name, torch.library.fallthrough_kernel, key)
        fallback = Fallback(copies, core.generator, torch_module.current_device)
        fallback.register(everything, aten)
        register_sparse(everything, aten, fallback)
        _LIBRARIES.extend((aten, everything, register_detection(fallback.call)))
        if own:
            SEEDS[NAME] = Seeds(copies, core.generator)
            open_gates()
        torch_module._finish()
        hugging_face.recommend()
        hugging_face.follow()


class Found(NamedTuple):
    devices: int
    recommended: bool  # one is not the CPU, which PyTorch has anyway, or the user asked for the device


@cache
def found() -> Found:
    """The devices that could be enabled; none if something required is missing."""
    try:
        driver = device_target().driver() if shutil.which(config.compiler) else None
    except Error:
        driver = None
    return Found(0, False) if driver is None else Found(
        driver.devices, driver.accelerates or config.is_given("device"))
