"""Autograd, autocast and thread state, as the C functions behind torch's own wrappers.

Compiled functions read them at each call, or meet them as nodes of Dynamo's graphs.
"""

from __future__ import annotations

import torch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["autocast_devices", "current_transform", "deterministic_algorithms", "enter_autocast", "exit_autocast",
           "increment_version", "keeps_graph", "log_api_usage_once", "saved_tensors_hooks", "set_grad_enabled"]

# torch.set_grad_enabled is a class, whose making and entering cost a call 1 us.
set_grad_enabled = torch._C._set_grad_enabled
deterministic_algorithms = torch._C._get_deterministic_algorithms
autocast_devices = torch._C._autocast_supported_devices
increment_version = torch._C._increment_version  # of tensors that a kernel wrote to; its public form takes one
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # retain_graph=True, of the backward that runs
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
current_transform = torch._C._functorch.peek_interpreter_stack  # of torch.func: None outside
log_api_usage_once = torch._C._log_api_usage_once  # which torch calls in functions that Dynamo traces
