"""Records CUDA graphs. The recordings of a function share one pool of torch's allocator."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from flambeau.ir.faults import error_of
from flambeau.torch_compat import cuda as torch_cuda

from ..base import Plan, Recorder, Recording, Run

if TYPE_CHECKING:
    from .target import CudaTarget

_ONE_AT_A_TIME = threading.RLock()  # graphs that share a pool are captured one after the other


class CudaRecording(Recording):
    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Any]) -> None:
        self.graph = graph
        self.results = results

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder(Recorder):
    """Records CUDA graphs. Graphs of one pool share memory for intermediates, so all of them run in the order of one
    stream: each stream has pools, and capture streams, of its own. Torch's generator of the device counts in its own
    memory what a graph draws, so that a replay continues where the call before it stopped."""

    def __init__(self, target: CudaTarget) -> None:
        self.target = target
        # A pool, the stream to capture in, and a graph that keeps the pool alive: torch does not reuse a pool without
        # graphs.
        self.places: dict[Hashable, tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]] = {}

    def place(self) -> Hashable | None:
        return self.target.queue()

    def forget(self, group: Hashable) -> None:
        with _ONE_AT_A_TIME:
            for place in [p for p in self.places if p[1] == group]:  # type: ignore[index]
                del self.places[place]

    @cached_property
    def nothing(self) -> Plan:
        return self.target.plan([])

    def check(self) -> None:
        # A replay launches nothing through our launcher, so nothing else would read what kernels reported.
        if bad := self.nothing([], ()):
            error = error_of(bad[1])
            error.add_note("reported by a kernel that was launched before")
            raise error

    def settle(self) -> None:
        torch.cuda.synchronize()
        self.check()

    def record(self, run: Run, inputs: list[Any], group: Hashable = None) -> CudaRecording:
        with _ONE_AT_A_TIME:
            place = self.place(), group
            if place not in self.places:
                torch.cuda.empty_cache()  # memory cannot be returned to the system during a capture
                pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
                self.places[place] = pool, stream, capture_nothing(stream, pool)
            pool, stream, _ = self.places[place]
            graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            gc.disable()  # garbage collection may delete another graph, which would invalidate the capture
            try:
                with torch.cuda.stream(stream):
                    # Kernels may be loaded, and host memory be pinned, during the capture; torch's own capture allows
                    # it for its allocator in the same way.
                    graph.capture_begin(pool, capture_error_mode="relaxed")
                    results = run(list(inputs))
                    graph.capture_end()
            except BaseException:
                with torch.cuda.stream(stream):
                    ended = attempt(graph.capture_end)
                if not ended:
                    del self.places[place]
                    abandon(graph, pool)
                raise
            finally:
                if collects:
                    gc.enable()
            # The capture wrote the generator's seed on the capture stream: wait for it.
            torch.cuda.current_stream().wait_stream(stream)
            graph.replay()  # a capture computes nothing
            return CudaRecording(graph, results)


# ---- captures that fail ----------------------------------------------------------------------------------


_FAILED: list[torch.cuda.CUDAGraph] = []  # the allocator of pinned memory keeps asking them which blocks belong to them


def abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Cleans up after a capture that became invalid and cannot be ended. Torch leaves these in the middle of it:

    - The allocator of the device, which can be told.
    - The allocator of pinned memory, which cannot. It takes no second capture in the same pool, so the pool is given
    up; recordings that were made in it keep their memory.
    - Up to 2.11 the generator, which draws no more numbers until a capture succeeds: an empty one does.
    """
    _FAILED.append(graph)
    device = torch.cuda.current_device()
    if attempt(torch_cuda.end_allocate_to_pool, device, pool):
        # if it could not be ended, it had ended already, and the graph releases the pool
        attempt(torch_cuda.release_pool, device, pool)
    if not attempt(capture_nothing, torch.cuda.Stream()):
        warnings.warn("flambeau: a CUDA graph capture failed, and torch's random numbers may raise from now on; "
                      "options={'graphs': False} avoids it", stacklevel=2)


def capture_nothing(stream: torch.cuda.Stream, *pool: Any) -> torch.cuda.CUDAGraph:
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.simplefilter("ignore")  # the graph is empty
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(*pool)
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def attempt(call: Callable[..., Any], *args: Any) -> bool:
    try:
        call(*args)
    except Exception:
        return False
    return True
