"""The dispatcher: its keys, its kernels, and guards that exclude parts of it.

`torch.library` registers kernels; it neither says which there are nor calls those below a key.
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

# What this thread includes and leaves out. Kernels set it to call autograd, or what is below it, from within.
included_keys = torch._C._dispatch_tls_local_include_set
excluded_keys = torch._C._dispatch_tls_local_exclude_set
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard
DisableAutocast = torch._C._DisableAutocast

# Whether somebody watches calls (`TorchDispatchMode`): asked at each run of a program, so it is the C function itself.
count_dispatch_modes = torch._C._len_torch_dispatch_stack


def composite(op: Any) -> Callable[..., Any]:
    """Torch's own kernel of an operator that is made of others, whatever stands in its place."""
    return partial(op._op_dk, DispatchKey.CompositeImplicitAutograd)


_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIP = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)


def untraced(fn: _Function) -> _Function:
    """A function that Dynamo traces neither itself nor what it calls: `torch.compiler.disable` without a wrapper and
    without an import of Dynamo. After a graph break it watches kernels too, and would run them on fake tensors."""
    set_code_exec_strategy(fn.__code__, _SKIP)
    return fn
