"""Chooses one stream or several: by the device's time at the first call, then by a clock over the caller's own calls.

Both programs have the same kernels and give the same bits, so times may choose between them.

1. The first call times both on copies of its arguments, and the result is kept on disk. If CUDA graphs are requested,
   recordings are timed. If the target cannot time its device, the host's clock is used, which waits.
2. Where several streams are faster on the device, they can still be slower for the caller: while the device waits for
   the host, only the host's work counts, and a recording with branches takes longer to launch. So the next calls take
   turns, and a clock decides (`Trial`): once for all graphs of a function, as these share the host's time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from flambeau.targets.base import Launch, Run, Target

from ..memory_layout import reach

if TYPE_CHECKING:
    from flambeau.errors import CompileError

    from ..launch_plan import LaunchPlan

IN_A_ROW = 3  # runs per measurement with the host's clock
CALLS, TURNS = 8, 5  # calls of a graph in one turn of a trial, and the turns of each program
log = logging.getLogger(__name__)


def chosen(plan: LaunchPlan, beside: LaunchPlan, target: Target, kernels: Mapping[str, Launch | CompileError],
           function: Hashable) -> Run:
    """A run function that uses the faster of two plans: chosen at the first call, or by a trial in the next ones."""
    lock, graph = threading.Lock(), next(_numbers)
    keys = [("streams", graph if function is None else function, k) for k in (0, 1)]  # of what shares memory
    state: tuple[Trial | None, tuple[Run, ...]] | None = None

    def begin(args: list[Any]) -> tuple[Trial | None, tuple[Run, ...]]:
        nonlocal state
        with lock:
            if state is None:
                if choice(plan, beside, target, kernels, args):
                    state = trial_of(function, plan.device), tuple(
                        p.bound(kernels, key) for p, key in zip((plan, beside), keys))
                else:
                    state = None, (plan.bound(kernels, function),)
            return state

    def run(args: list[Any]) -> list[Any]:
        nonlocal state
        now = state
        if now is None or now[0] is not None:
            if target.queue() is None:  # a capture is in progress, which allows no waiting
                return plan.raw(kernels)(args)
            trial, runs = now or begin(args)
            if trial is not None:
                kind = trial.called(graph)
                if not trial.over:
                    return runs[kind](args)
                runs = runs[kind],
                state = None, runs
                if plan.graphs is not None and (recorder := target.recorder()) is not None:
                    recorder.forget((keys[1 - kind], plan.graphs.backward))
            return runs[0](args)
        return now[1][0](args)

    return run


class Trial:
    """Lets calls take turns, some on several streams, some on one, until a clock has decided for the caller.

    A turn ends when a graph has been called `CALLS` times in it. Then the host waits for the device, and whichever of
    the two took longer counts. The first turn of each program does not count, as recordings are made in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, threading.Lock()
        self.calls: Counter[int] = Counter()  # in this turn, by graph
        self.kind, self.over = 1, False  # 0: one stream, 1: several
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self.start = time.perf_counter()

    def called(self, graph: int) -> int:
        """Counts a call of a graph, and returns the program for it."""
        with self.lock:
            if not self.over:
                if self.calls[graph] == CALLS:
                    self.end_turn()
                self.calls[graph] += 1
            return self.kind

    def end_turn(self) -> None:
        host = time.perf_counter() - self.start
        torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        # The host's time for each call, or the device's, which begins after the first call was launched.
        self.seconds[self.kind].append(max(host, now - self.start - host / CALLS) / CALLS)
        self.kind, self.start = 1 - self.kind, now
        self.calls.clear()
        if len(self.seconds[0]) == TURNS:
            one, several = (min(found[1:]) for found in self.seconds)
            self.kind, self.over = int(several < one), True
            log.info("by a clock, one stream %.1f us, several %.1f us", 1e6 * one, 1e6 * several)


_numbers = itertools.count()
TRIALS: WeakValueDictionary[Hashable, Trial] = WeakValueDictionary()  # by function and device


def trial_of(function: Hashable, device: torch.device) -> Trial:
    """The trial that a graph takes part in: that of its function, unless it is over."""
    found = TRIALS.get((function, device)) if function is not None else None
    if found is None or found.over:
        found = Trial(device)
        TRIALS[(object() if function is None else function, device)] = found
    return found


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
