"""`flambeau.enable_device()`: starts the device, so that tensors can be created on it.

    flambeau.enable_device()
    x = torch.randn(3, device="flambeau")

Where autoload.py has announced the device, its first use enables it. The core (device_core.cpp) gives PyTorch memory,
streams, events and views; copies are device_copy.py's, `torch.flambeau` is torch_module.py. Operators are programs of
their own (device_ops.py), or run on the CPU (fallback.py).
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
_LIBRARIES: list[torch.library.Library] = []  # what they register goes when they do


def enable_device() -> None:
    """Make `torch.device("flambeau")` known, for the rest of the process. UnsupportedError if there is none."""
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
        announce()  # what may fail has been done
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
        # Copies know conjugated and negated views; what resolves them elsewhere is itself a copy.
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
    recommended: bool  # one is something else than the CPU, which PyTorch has anyway, or somebody asked for them


@cache
def found() -> Found:
    """What there would be; nothing where something is missing for it."""
    try:
        driver = device_target().driver() if shutil.which(config.compiler) else None
    except Error:
        driver = None
    return Found(0, False) if driver is None else Found(
        driver.devices, driver.accelerates or config.is_given("device"))
