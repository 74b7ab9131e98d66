"""Optimizer steps in eager mode on an accelerated device: the kernels of compiled steps, with eager's rounding.

Nothing is imported for it before the first step of any optimizer. From then on, gradient clipping uses our kernels too.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


class EagerSteps:
    """One request to run the eager steps on a device type with our kernels."""

    def __init__(self, device: str) -> None:
        self.device, self.on = device, False
        self._hook = register_optimizer_step_pre_hook(self._start)

    def _start(self, *_: Any) -> None:
        self._hook.remove()
        self._switch(True)

    def undo(self) -> None:
        self._hook.remove()
        self._switch(False)

    def _switch(self, on: bool) -> None:
        if self.on == on:
            return
        from flambeau.compile.backend import flambeau_backend

        from .compiled_steps import EAGER, install

        routes = install(flambeau_backend)
        if routes is not None:
            (routes.begin if on else routes.end)()
            EAGER[self.device] += 1 if on else -1
            self.on = on
