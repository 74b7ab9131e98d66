"""Chooses one stream or several: the first call times both on copies of its arguments, and the choice is kept on disk.

Both programs have the same kernels and give the same bits, so a timing may choose between them. If CUDA graphs are
requested, recordings are timed. If the target cannot time its device, the host's clock is used, which waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flambeau.targets.base import Launch, Run, Target

from ..memory_layout import reach

if TYPE_CHECKING:
    from flambeau.errors import CompileError

    from ..launch_plan import LaunchPlan

IN_A_ROW = 3  # runs per measurement with the host's clock
log = logging.getLogger(__name__)


def chosen(plan: LaunchPlan, beside: LaunchPlan, target: Target, kernels: Mapping[str, Launch | CompileError],
           function: Hashable) -> Run:
    """A run function that uses the faster of two plans, chosen at the first call."""
    lock = threading.Lock()
    found: list[Run] = []

    def run(args: list[Any]) -> list[Any]:
        if not found:
            if target.queue() is None:  # a capture is in progress, which allows no waiting
                return plan.raw(kernels)(args)
            with lock:
                if not found:
                    best = choice(plan, beside, target, kernels, args)
                    found.append((plan, beside)[best].bound(kernels, function))
        return found[0](args)

    return run


def choice(plan: LaunchPlan, beside: LaunchPlan, target: Target, kernels: Mapping[str, Launch | CompileError],
           args: list[Any]) -> int:
    """Returns 0 for one stream, 1 for several."""
    from flambeau.targets.identity import identity
    from flambeau.targets.search import kept

    about = [*identity(target), target.chip(), plan.source, beside.source, bool(plan.graphs),
             *(f"{k.text}{getattr(k, 'parts', '')!r}" for k in plan.kernels)]
    try:
        return int(kept(about, lambda: measured((plan, beside), target, kernels, args)).split()[0])
    except Exception as error:  # such as out of memory; one stream is always correct
        log.info("streams are not timed: %s: %s", type(error).__name__, error)
        return 0


def measured(plans: tuple[LaunchPlan, LaunchPlan], target: Target, kernels: Mapping[str, Launch | CompileError],
             args: list[Any]) -> str:
    """The index of the faster plan, and the seconds that each took."""
    from flambeau.targets.search import fastest

    device = plans[0].device
    recorder = target.recorder() if plans[0].graphs is not None and not plans[0].graphs.obstacle else None
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    candidates: dict[int, Callable[[], object]] = {}
    held: list[list[Any]] = []  # a recording reads its arguments at fixed addresses, so they must stay alive
    groups = [("trial", id(plans), k) for k in range(len(plans))]
    try:
        with torch.no_grad():
            for k, p in enumerate(plans):
                given = [copied(x) if isinstance(x, torch.Tensor) else x for x in args]
                held.append(given)
                raw = p.raw(kernels)
                raw(list(given))  # libraries choose their kernels
                made = None if recorder is None else recorder.record(raw, given, groups[k])
                again = partial(call, raw, given) if made is None else made.replay
                candidates[k] = again if target.times else partial(in_a_row, again, device)
            best, seconds = fastest(target, candidates)
    finally:
        candidates.clear()
        module.set_rng_state(state, device)
        if recorder is not None:
            for group in groups:
                recorder.forget(group)
    log.info("one stream %.1f us, several %.1f us", *(1e6 * seconds[k] for k in (0, 1)))
    return f"{best} {seconds[0]:.4g} {seconds[1]:.4g}"


def copied(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with the same strides, which the programs were made for, including gaps between its elements."""
    shape, strides = x.shape, x.stride()
    return x.detach().as_strided((reach(shape, strides),), (1,)).clone().as_strided(shape, strides, 0)


def in_a_row(again: Callable[[], object], device: torch.device) -> None:
    """Run several times, and wait until the device has finished."""
    for _ in range(IN_A_ROW):
        again()
    torch.accelerator.synchronize(device)


def call(run: Run, args: list[Any]) -> object:
    return run(list(args))
