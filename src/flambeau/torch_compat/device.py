"""The out-of-tree device ("PrivateUse1"): its name, its module, and which accelerator is current.

Imported while torch itself is being imported (autoload), so this file imports only what torch has loaded by then.
"""

from __future__ import annotations

import torch

__all__ = ["accelerator", "backend_name", "register_device_module", "set_eval_frame"]

backend_name = torch._C._get_privateuse1_backend_name  # `torch.utils` only has the function that sets it
register_device_module = torch._register_device_module
set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame  # which frames Dynamo sees, without importing it


def accelerator() -> torch.device | None:
    """The device type that torch uses as its accelerator, present or not; the public function asks the device."""
    found: torch.device | None = torch._C._accelerator_getAccelerator()
    return found
