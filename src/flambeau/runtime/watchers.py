"""Hooks around programs and launches: NVTX ranges (FLAMBEAU_NVTX=1), and the watchers of flambeau.debug.

The hooks are looked up once, when a program is bound: without a watcher, a call has no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import torch

from flambeau.config import config
from flambeau.targets.base import Plan

if TYPE_CHECKING:
    from .launch_plan import LaunchPlan, Step


@dataclass(frozen=True, eq=False)
class Part:
    """The object that a watcher wraps: a program, one of its launches (`step`), or an operator call."""

    plan: LaunchPlan
    title: str
    where: str = ""  # for a launch or call: the name that runs it in the source, and the position there
    step: Step | None = None


Watcher: TypeAlias = Callable[[Part, Callable[..., Any]], Callable[..., Any]]
WATCHERS: list[Watcher] = []
BOUND: WeakSet[Any] = WeakSet()  # objects that hold the run function of a program, and can bind it again


def bind_anew() -> None:
    """Bind all programs again, because the watchers have changed since they were bound."""
    for holder in list(BOUND):
        holder.bind_again()


def watching(device: torch.device) -> list[Watcher]:
    nvtx = config.nvtx and device.type == "cuda"
    return [*([ranged(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)] if nvtx else ()), *WATCHERS]


def look_on() -> None:
    """With FLAMBEAU_DEBUG, start the report shown at process end. Imported by name, as it is a higher layer."""
    if config.debug:
        import_module("flambeau.debug.levels").start()


def ranged(push: Callable[[str], Any], pop: Callable[[], Any]) -> Watcher:
    def watch(part: Part, call: Callable[..., Any]) -> Callable[..., Any]:
        def ranged(*args: Any, **given: Any) -> Any:
            push(part.title)
            try:
                return call(*args, **given)
            finally:
                pop()

        return ranged

    return watch


def title(names: Sequence[str]) -> str:
    """The title of a program with these kernels."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more if names else "flambeau, no kernel"


def watched(watchers: Sequence[Watcher], part: Part, call: Callable[..., Any]) -> Callable[..., Any]:
    for watch in watchers:
        call = watch(part, call)
    return call


def one_by_one(launches: Sequence[Plan]) -> Plan:
    """Run plans of one launch each in turn, where normally one native call makes all launches."""

    def run(pointers: Any, sizes: Any) -> Any:
        for at, launch in enumerate(launches):
            if (bad := launch(pointers, sizes)) is not None:
                where, code = bad
                return (where + at if where >= 0 else where), code
        return None

    return run
