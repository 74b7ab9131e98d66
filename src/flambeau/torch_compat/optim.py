"""torch's optimizers: the functions over lists of tensors that their steps and gradient clipping call.

Torch's modules look these functions up by name at each call, and replacing them there is the only way to another
implementation: hooks of optimizers (`register_step_pre_hook`) run before or after a step, not in its place.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from types import CodeType, ModuleType

import torch

READS = "reads"  # a step that computes with numbers read from its states
# Module, name, and kind ("": only calls others). A step updates the tensors in its lists row by row, returning nothing.
FUNCTIONS = (
    *((f"torch.optim.{name}", name, "step") for name in
      ("adam", "sgd", "rmsprop", "adagrad", "adadelta", "adamax", "radam")),
    *((f"torch.optim.{name}", name, READS) for name in ("nadam", "asgd")),
    ("torch.nn.utils.clip_grad", "_get_total_norm", "total_norm"),
    ("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "clip_with_norm"),
    ("torch.nn.utils.clip_grad", "clip_grad_norm_", ""),
)
COUNT = "_get_value"  # the function with which steps read a counter that is a tensor
GROUP = "_init_group"  # the method that collects the lists of one group
# Methods of `Optimizer` that do not use tensors. The check is called `_cuda_…` up to 2.12.
ASIDES = ("_optimizer_step_code", "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")


def files(kinds: Collection[str]) -> frozenset[str]:
    """The files that define the functions of these kinds."""
    return frozenset(inspect.getfile(importlib.import_module(module)) for module, _, kind in FUNCTIONS if kind in kinds)


def base_file() -> str:
    return inspect.getfile(torch.optim.Optimizer)


def places(module: str, name: str) -> list[ModuleType]:
    """The modules in which a function is found under its name: its own, and the parent package if it exports it."""
    own = importlib.import_module(module)
    found = getattr(own, name)
    return [m for m in (own, importlib.import_module(module.rpartition(".")[0])) if getattr(m, name, None) is found]


def group_classes() -> list[type]:
    """The optimizer classes with their own `_init_group` whose steps are of the kind "step"."""
    modules = {module for module, _, kind in FUNCTIONS if kind == "step"}
    return [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and GROUP in vars(kind)
            and modules & {c.__module__ for c in kind.__mro__}]


def aside_codes() -> list[CodeType]:
    return [found.__code__ for name in ASIDES if (found := getattr(torch.optim.Optimizer, name, None)) is not None]
