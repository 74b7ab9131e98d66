"""Flambeau: a PyTorch compiler that writes each operator once.

    torch.compile(model, backend="flambeau")

Importing this package is cheap: torch is imported by the doors, when the first of them is used.
"""

from __future__ import annotations

import importlib
import logging

from flambeau.config import config as _config
from flambeau.errors import CacheError, CompileError, Error, OptionError, UnsupportedError

__version__ = "0.1.0"

# Public names that need torch, and the module that has them.
_LAZY = {
    "TrainStep": "flambeau.package.trace",
    "accelerate": "flambeau.eager.accelerate",
    "accelerated": "flambeau.eager.accelerate",
    "enable_device": "flambeau.device.enable",
    "export": "flambeau.package.export",
    "fallbacks": "flambeau.device.fallback",
    "flambeau_backend": "flambeau.compile.backend",
    "load": "flambeau.package.module",  # without torch
    "mark_layers": "flambeau.compile.regions.marked_layers",
}
_MODULES = ("debug",)  # that need torch

__all__ = [
    "CacheError",
    "CompileError",
    "Error",
    "OptionError",
    "TrainStep",
    "UnsupportedError",
    "__version__",
    "accelerate",
    "accelerated",
    "enable_device",
    "export",
    "fallbacks",
    "flambeau_backend",
    "load",
    "mark_layers",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'flambeau' has no attribute {name!r}")
    # By name, at run time: an import statement here would give every room that imports from `flambeau` a way
    # to the doors, against the import order.
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY.keys())


def _start_log() -> None:
    if not _config.is_given("log"):
        return  # Python's own way with warnings, or TORCH_LOGS
    logger = logging.getLogger(__name__)
    logger.setLevel(_config.log.upper())
    if logger.level < logging.WARNING:
        # Asked for by FLAMBEAU_LOG, and without a handler Python shows only warnings and errors.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


_start_log()
