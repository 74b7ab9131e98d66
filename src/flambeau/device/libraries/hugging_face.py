"""Makes Hugging Face's libraries choose the device, which is not in their fixed list.

`Accelerator()` and `TrainingArguments` use the device named by ACCELERATE_TORCH_DEVICE. Unless it is set already, it is
set to ours when the device is enabled, or when accelerate is imported and the device is available. For
`device_map="auto"`, `get_max_memory` lists the devices and their memory. It is not extensible, so its result is
completed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from .. import torch_module
from ..torch_module import NAME

VARIABLE = "ACCELERATE_TORCH_DEVICE"
MODULE = "accelerate.utils.modeling"
LIBRARIES = ("accelerate", "transformers")


def follow() -> None:
    """Patch the library once its module is imported, or now if it is imported already."""
    if MODULE in sys.modules:
        complete(sys.modules[MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def recommend() -> None:
    os.environ.setdefault(VARIABLE, NAME)


class _Finder(MetaPathFinder):
    """An import hook that finds nothing itself, but patches the module after another finder's loader has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_complete(module: ModuleType) -> None:
                load(module)
                complete(module)

            spec.loader.exec_module = load_and_complete  # type: ignore[method-assign]
        return spec


def complete(module: ModuleType) -> None:
    if torch_module._is_recommended():
        recommend()
    own = getattr(module, "get_max_memory", None)
    if own is None or hasattr(own, "__wrapped__"):
        return
    ours = with_device(own)
    for name, there in [*sys.modules.items()]:  # modules that imported the function hold their own reference
        if name.partition(".")[0] in LIBRARIES:
            for key in [key for key, value in vars(there).items() if value is own]:
                setattr(there, key, ours)


def with_device(own: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
    @functools.wraps(own)
    def get_max_memory(max_memory: Any = None) -> dict[Any, Any]:
        if torch.cuda.is_available() or not torch_module._is_recommended():
            return own(max_memory)
        torch_module.init()
        if max_memory is None:
            memory = {k: torch.accelerator.get_memory_info(k)[0] for k in range(torch_module.device_count())}
            return memory | own()
        # It reports that numbered devices do not exist, so each is passed as "cpu", just to convert its unit.
        numbered = {k: own({"cpu": v})["cpu"] for k, v in max_memory.items() if isinstance(k, int)}
        return dict(sorted(numbered.items())) | own({k: v for k, v in max_memory.items() if not isinstance(k, int)})

    return get_max_memory
