"""What each operator computes: one lowering per ATen operator, in files by family."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache

from .facts import LOWERINGS

__all__ = ["LOWERINGS", "ops_loaded"]


@lru_cache(maxsize=1)
def ops_loaded() -> None:
    """Import every family: a new file in this folder needs no other edit."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
