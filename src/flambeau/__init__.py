"""Flambeau: a compiler for PyTorch in which each operator is written once.

    torch.compile(model, backend="flambeau")

Importing this package is fast: torch is imported when a function that needs it is first used.
"""

from __future__ import annotations

import importlib
import logging

from flambeau.config import config as _config
from flambeau.errors import CacheError, CompileError, Error, OptionError, UnsupportedError

__version__ = "0.1.0"

# Public names that are imported at first use, and their modules. Most need torch.
_LAZY = {
    "TrainStep": "flambeau.package.trace",
    "accelerate": "flambeau.eager.accelerate",
    "accelerated": "flambeau.eager.accelerate",
    "enable_device": "flambeau.device.enable",
    "export": "flambeau.package.export",
    "fallbacks": "flambeau.device.fallback",
    "flambeau_backend": "flambeau.compile.backend",
    "load": "flambeau.package.module",  # works without torch
    "mark_layers": "flambeau.compile.regions.marked_layers",
}
_MODULES = ("debug",)  # submodules that are imported at first use

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
    # Imported by name: with an import statement here, every module that imports from `flambeau` would also import the
    # high-level modules, against the import order that CI checks.
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY.keys())


def _start_log() -> None:
    if not _config.is_given("log"):
        return  # Python's default handling of warnings, or TORCH_LOGS
    logger = logging.getLogger(__name__)
    logger.setLevel(_config.log.upper())
    if logger.level < logging.WARNING:
        # Without a handler, Python shows only warnings and errors.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


_start_log()
