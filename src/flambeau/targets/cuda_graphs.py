"""Recordings on NVIDIA GPUs: CUDA graphs, all of a stream in one pool of torch's allocator."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Hashable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flambeau.ir.faults import error_of
from flambeau.targets.base import Plan, Recorder, Recording, Run

if TYPE_CHECKING:
    import torch

    from flambeau.targets.cuda import CudaTarget

_ONE_AT_A_TIME = threading.RLock()  # graphs that share a pool are captured one after the other


class CudaRecording(Recording):
    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Any]) -> None:
        self.graph = graph
        self.results = results

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder(Recorder):
    """Graphs of one pool use the memory of each other's intermediates, so all of them run in the order of one stream:
    each stream has a pool, and a stream to capture in, of its own. Torch's generator of the device counts in its own
    memory what a graph draws, so a replay goes on where the call before it stopped."""

    def __init__(self, target: CudaTarget) -> None:
        self.target = target
        self.failed: list[torch.cuda.CUDAGraph] = []
        self.places: dict[Hashable, tuple[Any, torch.cuda.Stream]] = {}

    def place(self) -> Hashable | None:
        return self.target.queue()

    @cached_property
    def nothing(self) -> Plan:
        return self.target.plan([])

    def check(self) -> None:
        # A replay launches nothing by itself, so nobody else would look at what kernels reported.
        if bad := self.nothing([], ()):
            error = error_of(bad[1])
            error.add_note("reported by a kernel that was launched before")
            raise error

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.check()

    def record(self, run: Run, inputs: list[Any]) -> CudaRecording:
        import torch

        with _ONE_AT_A_TIME:
            place = self.place()
            assert place is not None
            if place not in self.places:
                torch.cuda.empty_cache()  # nothing can be given back to the system during a capture
                self.places[place] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            pool, stream = self.places[place]
            graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            gc.disable()  # what it would delete may be another graph, which a capture does not survive
            try:
                with torch.cuda.stream(stream):
                    # Kernels may be loaded, and memory of the host be pinned, while we capture; torch's own capture
                    # of a pool allows it for its allocator in the same way.
                    graph.capture_begin(pool, capture_error_mode="relaxed")
                    try:
                        results = run(list(inputs))
                        graph.capture_end()
                    except BaseException:
                        self.give_up(graph, pool)
                        raise
            finally:
                if collects:
                    gc.enable()
            graph.replay()  # a capture computes nothing
            return CudaRecording(graph, results)

    def give_up(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Where a capture becomes invalid, torch leaves its allocator and its generator in the middle of it."""
        import torch

        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        self.failed.append(graph)  # the allocators may still ask it what belongs to it
        # The generator knows that nobody captures as soon as a capture ends well.
        other = torch.cuda.CUDAGraph()
        with suppress(Exception), warnings.catch_warnings(), torch.cuda.stream(torch.cuda.Stream()):
            warnings.simplefilter("ignore")  # the graph is empty
            other.capture_begin()
            other.capture_end()
