"""Autograd, autocast and thread state, as the C functions behind torch's own wrappers.

Compiled functions read them at each call, or they appear as nodes in Dynamo's graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["apply_directly", "autocast_devices", "call_directly", "current_transform", "deterministic_algorithms",
           "enter_autocast", "exit_autocast", "increment_version", "keeps_graph", "log_api_usage_once",
           "saved_tensors_hooks", "set_grad_enabled"]

# torch.set_grad_enabled is a class: constructing and entering it costs each call 1 us.
set_grad_enabled = torch._C._set_grad_enabled
deterministic_algorithms = torch._C._get_deterministic_algorithms
autocast_devices = torch._C._autocast_supported_devices
increment_version = torch._C._increment_version  # for tensors that a kernel wrote to; the public form takes just one
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # retain_graph=True, for the running backward
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
current_transform = torch._C._functorch.peek_interpreter_stack  # the active torch.func transform; None outside
log_api_usage_once = torch._C._log_api_usage_once  # called by torch in functions that Dynamo traces


def apply_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of an autograd function below torch's Python code, for calls outside of torch.func transforms."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def call_directly(function: Any) -> None:
    """Let the engine call an autograd function's `backward` without torch's Python code in between. Releases that pass
    a tuple of gradients keep it."""
    node = function._backward_cls
    if getattr(function, "boxed_grads_call", False) and hasattr(node, "apply_boxed"):
        node.apply_boxed = function.backward
