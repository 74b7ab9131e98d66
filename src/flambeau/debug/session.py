"""A session watches what happens while it is open: graphs, breaks, recompilations, times of steps, caches.

    with Session() as session: ...
    show(session)                      # report/session.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from flambeau import pipeline
from flambeau.compile import disk_cache
from flambeau.compile.regions import cut
from flambeau.compile.regions.cut import Pieces
from flambeau.pipeline import Compiled
from flambeau.runtime.watchers import BOUND, WATCHERS, Watcher, bind_anew
from flambeau.targets.cache import counts
from flambeau.torch_compat.compilations import Break, Compilation, breaks, compilations, keep_compilations
from flambeau.torch_compat.dynamo import compilation_time_metrics

from .clocks import Clocks


@dataclass
class Before:
    """The counters of torch and ours when the session began."""

    compilations: int = field(default_factory=lambda: len(compilations()))
    breaks: int = field(default_factory=lambda: len(breaks()))
    seconds: Mapping[str, int] = field(default_factory=lambda: {k: len(v) for k, v in compilation_time_metrics.items()})
    cache: Counter[str] = field(default_factory=lambda: disk_cache.stats.copy())
    kernels: Counter[str] = field(default_factory=lambda: Counter(counts))


class Session:
    """`watchers` are put around programs, the last one outermost. Without any, clocks are used."""

    def __init__(self, *watchers: Watcher) -> None:
        self.graphs: list[Compiled] = []
        self.regions: list[Pieces] = []
        self.clocks = Clocks()
        self.watchers = [*(watchers or [self.clocks])]
        self.opened = ExitStack()

    def __enter__(self) -> Session:
        keep_compilations()
        self.before = Before()
        self.opened.enter_context(held(pipeline.OBSERVERS, self.graphs.append))
        self.opened.enter_context(held(cut.OBSERVERS, self.regions.append))
        for watcher in self.watchers:
            self.opened.enter_context(held(WATCHERS, watcher))
        bind_anew()
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()
        bind_anew()

    def known(self) -> list[Compiled]:
        """All graphs in use, including those compiled before the session."""
        return [*self.graphs, *(h for h in BOUND if isinstance(h, Compiled) and h not in self.graphs)]

    def compilations(self) -> Sequence[Compilation]:
        return compilations()[self.before.compilations:]

    def functions(self) -> dict[str, Compilation]:
        """Dynamo's compilations by frame, including those before the session."""
        return {c.frame: c for c in compilations()}

    def breaks(self) -> Sequence[Break]:
        return breaks()[self.before.breaks:]

    def seconds(self) -> dict[str, list[float]]:
        """Compile times, measured by torch."""
        return {name: times[self.before.seconds.get(name, 0):] for name, times in compilation_time_metrics.items()}

    def cache(self) -> Counter[str]:
        """Counts of the graph cache on disk: hit, miss, stored, refused."""
        return disk_cache.stats - self.before.cache

    def kernels(self) -> Counter[str]:
        """Counts of the kernel cache on disk: read, written."""
        return Counter(counts) - self.before.kernels

    def externs(self) -> Counter[str]:
        """Operators without a lowering, for which graphs call ATen."""
        return sum((Counter(g.captured.externs) for g in self.graphs), Counter())

    def fallbacks(self) -> list[tuple[str, int, int]]:
        """Operators of the device that ran on the CPU in this process, with calls and bytes."""
        found = sys.modules.get("flambeau.device.fallback")
        return [] if found is None else found.fallbacks()


@contextmanager
def held(observers: list[Any], observe: Any) -> Iterator[None]:
    observers.append(observe)
    try:
        yield
    finally:
        observers.remove(observe)
