"""The dispatcher: its keys, its kernels, and guards that exclude parts of it.

`torch.library` registers kernels, but cannot list them or call those below a key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunction, DispatchKey, DispatchKeySet
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = ["AutoDispatchBelowAutograd", "DisableAutocast", "DisableTorchFunction", "DispatchKey", "DispatchKeySet",
           "ForceDispatchKeyGuard", "TorchDispatchMode", "all_operator_names", "composite",
           "count_dispatch_modes", "disable_current_modes", "excluded_keys", "has_kernel", "has_kernel_for_key",
           "included_keys", "key_for_device", "no_python_dispatcher", "untraced"]

all_operator_names = torch._C._dispatch_get_all_op_names
has_kernel = torch._C._dispatch_has_kernel
has_kernel_for_key = torch._C._dispatch_has_kernel_for_dispatch_key
key_for_device = torch._C._dispatch_key_for_device

# The keys that this thread includes and excludes. Kernels set them to call autograd, or kernels below it.
included_keys = torch._C._dispatch_tls_local_include_set
excluded_keys = torch._C._dispatch_tls_local_exclude_set
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard
DisableAutocast = torch._C._DisableAutocast

# Whether a `TorchDispatchMode` is active. Called at each run of a program, so this is the C function itself.
count_dispatch_modes = torch._C._len_torch_dispatch_stack


def composite(op: Any) -> Callable[..., Any]:
    """Torch's own kernel of a composite operator, even if another kernel replaces it."""
    return partial(op._op_dk, DispatchKey.CompositeImplicitAutograd)


_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIP = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)


def untraced(fn: _Function) -> _Function:
    """Make Dynamo skip a function and everything it calls: `torch.compiler.disable` without a wrapper and without
    importing Dynamo. After a graph break, Dynamo also watches kernels, and would run them on fake tensors."""
    set_code_exec_strategy(fn.__code__, _SKIP)
    return fn
