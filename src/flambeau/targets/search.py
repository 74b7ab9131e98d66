"""Searches for the fastest block shape: times the heuristic's choice and its neighbours on the first call's data.

    torch.compile(model, backend="flambeau", options={"search": True})     # or FLAMBEAU_SEARCH=1

Which of a source's alternatives is the fastest depends on the machine. The answer is kept on disk under a key of all
their texts, the chip, Triton and the sizes (to the next power of two), and later processes time nothing.

Every alternative runs on the same memory as the heuristic's kernel, and has to leave the same results there, except for
rounding; otherwise it is dropped. So only kernels that give the same result however often they are launched have
alternatives (`codegen/triton/block_variants.py`). Workspaces are no obstacle, since each launch clears them; nor are
random numbers, which follow from a seed in memory. A plan decides once: if its sizes grow later, its shapes stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from flambeau.codegen.source import BlockSource
from flambeau.codegen.triton.dialect import pointed
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.targets.base import Build, Launch, Plan, Step
from flambeau.targets.cache import shared_cache

from .cuda.triton_compile import identity

log = logging.getLogger(__name__)

SUFFIX = ".tuned"
ROUNDS = 5  # each times all candidates, alternately forwards and backwards, because clocks drift
GAIN = 0.98  # share of the heuristic's time that another must stay below: smaller differences are noise
# The tolerance for rounding, relative to the greatest result.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2,
            torch.float8_e4m3fn: 0.125, torch.float8_e5m2: 0.25}


_undecided = ContextVar("undecided", default=False)


@contextmanager
def undecided() -> Iterator[None]:
    """Makes plans use the heuristic's shapes within this block, and decide later."""
    token = _undecided.set(True)
    try:
        yield
    finally:
        _undecided.reset(token)


class Timed(Protocol):
    """The methods of a target for which shapes can be searched."""

    def build(self, sources: Sequence[Any]) -> Build: ...
    def plan(self, steps: Sequence[Step]) -> Plan: ...
    def queue(self) -> object | None: ...

    def chip(self) -> str:
        """Identifies the chip, as far as times on it differ."""

    def memory(self, address: int, nbytes: int) -> torch.Tensor:
        """Returns memory as a uint8 tensor that shares it."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the time that the kernels launched by `run` take."""


@dataclass
class Choice:
    """The launch of a source with alternatives: the heuristic's, until a plan decides."""

    source: BlockSource
    launch: Launch
    decided: dict[tuple[int, ...], Launch] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> int:
        return self.launch(pointers, sizes)


def offered(source: BlockSource, launch: Launch) -> Launch:
    return Choice(source, launch) if source.alternatives else launch


def is_open(steps: Sequence[Step]) -> bool:
    return any(isinstance(launch, Choice) for launch, _, _ in steps)


class OpenPlan:
    """A plan with undecided launches. The first call runs step by step, since a step reads the results of those before
    it."""

    def __init__(self, target: Timed, steps: Sequence[Step]) -> None:
        self._target, self._steps = target, list(steps)
        self._first: Plan = target.plan([(_heuristic(launch), where, which) for launch, where, which in steps])
        self._plan: Plan | None = None
        self._lock = threading.Lock()

    def __call__(self, pointers: Sequence[int], sizes: Sequence[int], /) -> tuple[int, int] | None:
        if self._plan is not None:
            return self._plan(pointers, sizes)
        if _undecided.get() or self._target.queue() is None:  # during a graph capture nothing may be waited for
            return self._first(pointers, sizes)
        with self._lock:
            made: list[Step] = []
            for k, (launch, where, which) in enumerate(self._steps):
                if isinstance(launch, Choice):
                    launch = decide(self._target, launch, [pointers[slot] + offset for slot, offset in where],
                                    [sizes[slot] for slot in which])
                made.append((launch, where, which))
                bad = self._target.plan(made[-1:])(pointers, sizes)
                if bad is not None:
                    return (k if bad[0] == 0 else bad[0]), bad[1]
            self._plan = self._target.plan(made)
        return None


def _heuristic(launch: Launch) -> Launch:
    return launch.launch if isinstance(launch, Choice) else launch


def decide(target: Timed, choice: Choice, pointers: Sequence[int], sizes: Sequence[int]) -> Launch:
    """Returns the fastest launch for such sizes: known to this process, stored on disk, or found now."""
    alike = tuple(n.bit_length() for n in sizes)
    if alike not in choice.decided:
        source = choice.source
        texts = [(s.text, repr(s.parts)) for s in (source, *source.alternatives)]
        number = int(kept([texts, alike, target.chip(), identity()],
                          (lambda: str(search(target, choice, pointers, sizes))) if source.results else None) or 0)
        launch = built(target, source.alternatives[number - 1 : number])[0] if number else choice.launch
        choice.decided[alike] = launch or choice.launch
    return choice.decided[alike]


def kept(about: Sequence[Any], find: Callable[[], str] | None) -> str:
    """Returns the answer to a question that any process has stored; finds it now if `find` is given."""
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    disk = shared_cache(config.cache_dir, config.cache_limit_mb)
    data = disk.read(key, SUFFIX)
    if data is not None or find is None:
        return (data or b"").decode()
    found = find()
    disk.put(key, found.encode(), SUFFIX)
    return found


def fastest(target: Any, candidates: Mapping[int, Callable[[], object]], gain: float = GAIN
            ) -> tuple[int, dict[int, float]]:
    """Returns the fastest candidate (zero unless another takes less than `gain` of its time), and the seconds that
    each took."""
    best = dict.fromkeys(candidates, float("inf"))
    for turn in range(ROUNDS):
        for number in sorted(candidates, reverse=bool(turn % 2)):
            best[number] = min(best[number], target.seconds(candidates[number]))
    first = min(best, key=lambda number: best[number])
    return (first if best[first] < gain * best[0] else 0), best


def search(target: Timed, choice: Choice, pointers: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the number of the fastest candidate whose results agree with the heuristic's (zero: the heuristic's)."""
    source = choice.source
    names = {f"n{k}": n for k, n in enumerate(sizes)}
    results = []
    for at, count in source.results:
        kind = source.pointers[at]
        nbytes = int(eval(count, {}, names)) * pointed(kind).itemsize
        results.append((kind, target.memory(pointers[at], nbytes)))
    def run(launch: Launch) -> None:
        for _, memory in results:
            memory.fill_(0xA5)  # makes elements that are not written visible
        launch(pointers, sizes)

    run(choice.launch)
    wanted = [memory.clone() for _, memory in results]
    candidates: dict[int, Launch] = {0: choice.launch}
    for number, launch in enumerate(built(target, source.alternatives), 1):
        if launch is None:
            continue
        try:
            run(launch)
        except RuntimeError as error:  # of the driver: it needs more than the machine has for one program
            log.info("%s: candidate %d does not start: %s", source.name, number, error)
            continue
        if all(agree(floats(kind, memory), floats(kind, want))
               for (kind, memory), want in zip(results, wanted, strict=True)):
            candidates[number] = launch
        else:
            log.warning("%s: a candidate gives other results than the heuristic's kernel, and is dropped:\n%s",
                        source.name, source.alternatives[number - 1].text)
    winner, best = fastest(target, {k: partial(launch, pointers, sizes) for k, launch in candidates.items()})
    log.info("%s: candidate %d of %d, %.1f us instead of %.1f", source.name, winner, len(candidates),
             1e6 * best[winner], 1e6 * best[0])
    return winner


def built(target: Timed, sources: Sequence[BlockSource]) -> list[Launch | None]:
    """Returns the launch of each source; None for one that does not build, perhaps too large for the machine."""
    made = target.build(sources).wait()
    for name, kernel in made.items():
        if isinstance(kernel, CompileError):
            log.info("%s is no candidate: %s", name, kernel.message)
    return [None if isinstance(k := made[s.name], CompileError) else k for s in sources]


def floats(kind: str, memory: torch.Tensor) -> torch.Tensor:
    """Returns the memory behind a pointer as floats, if they are; their results may differ by rounding."""
    dtype = pointed(kind)
    return memory.view(dtype) if dtype in ROUNDING else memory


def agree(made: torch.Tensor, wanted: torch.Tensor, least: float = 0) -> bool:
    """Whether results agree, up to rounding relative to the greatest: by `least`, or more for dtypes with fewer
    digits."""
    if wanted.dtype not in ROUNDING or not wanted.numel():
        return torch.equal(made, wanted)
    rounding = max(ROUNDING[wanted.dtype], least)
    if wanted.dtype.itemsize == 1:  # torch does not compare floats of 8 bits
        made, wanted = made.float(), wanted.float()
    scale = wanted.nan_to_num(0, 0, 0).abs().max().item()
    return torch.allclose(made, wanted, rtol=rounding, atol=rounding * scale, equal_nan=True)
