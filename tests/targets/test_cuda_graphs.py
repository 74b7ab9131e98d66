"""The recorder of CUDA graphs, on a fake torch.cuda that only logs its calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flambeau.ir.faults import Fault, head
from flambeau.targets.cuda import recorder as cuda_graphs
from flambeau.targets.cuda.recorder import CudaRecorder


class Target:
    """A target whose data checks pass, unless `bad` is set."""

    def __init__(self) -> None:
        self.bad: tuple[int, int] | None = None
        self.stream: int | None = 7

    def queue(self) -> Any:
        return None if self.stream is None else (0, self.stream)

    def plan(self, steps: Any) -> Callable[..., tuple[int, int] | None]:
        return lambda pointers, sizes: self.bad


OPENED = ["begin A global", "end", "synchronize"]  # an empty graph keeps the pool alive as long as the recorder


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            said.append("wait")

    class Graph:
        """A fake graph. `Graph.invalid`: how many of the next calls of `capture_end` fail."""

        invalid = 0

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            said.append(f"begin {pool} {capture_error_mode}")
            if pool in already:
                raise RuntimeError("already recording to mempool_id")

        def capture_end(self) -> None:
            said.append("end")
            if Graph.invalid:
                Graph.invalid -= 1
                raise RuntimeError("invalid capture")

        def replay(self) -> None:
            said.append("replay")

    already: list[str] = []  # pools in which torch's allocator of pinned memory accepts no further capture
    pools = iter("ABC")

    def close(device: int, pool: str) -> None:
        said.append(f"close {pool}")
        already.append(pool)

    fakes: dict[str, Any] = {
        "CUDAGraph": Graph, "synchronize": lambda: said.append("synchronize"), "current_device": lambda: 0,
        "empty_cache": lambda: None, "graph_pool_handle": lambda: next(pools), "Stream": Stream,
        "current_stream": Stream, "stream": lambda stream: nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", close, raising=False)
    release = lambda device, pool: said.append(f"release {pool}")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(cuda_graphs, "_FAILED", [])
    return said


def test_a_run_is_captured_and_then_computed(said: list[str]) -> None:
    recorder = CudaRecorder(Target())  # type: ignore[arg-type]
    made = recorder.record(lambda args: [said.append("run"), gc.isenabled(), *args], [1, 2])
    assert said == [*OPENED, "begin A relaxed", "run", "end", "wait", "replay"]
    assert made.results == [None, False, 1, 2] and gc.isenabled()
    made.replay()
    assert said[-1] == "replay"


def test_a_stream_has_one_pool(said: list[str]) -> None:
    target = Target()
    recorder = CudaRecorder(target)  # type: ignore[arg-type]
    for stream in (7, 8, 7):
        target.stream = stream
        recorder.record(lambda args: [], [])
    assert [line.removeprefix("begin ") for line in said if "begin" in line] == [
        "A global", "A relaxed", "B global", "B relaxed", "A relaxed"]
    target.stream = None
    assert recorder.place() is None


def failing(ends: int) -> Callable[[list[Any]], list[Any]]:
    """A run that raises during the capture and makes the next `ends` calls of `capture_end` fail."""
    def run(args: list[Any]) -> list[Any]:
        torch.cuda.CUDAGraph.invalid = ends  # type: ignore[attr-defined]
        raise ValueError("the host waits")
    return run


def test_a_capture_that_becomes_invalid_is_abandoned(said: list[str]) -> None:
    recorder = CudaRecorder(Target())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the host waits"):
        recorder.record(failing(1), [])
    # The allocator's pool is closed, and a successful capture tells the generator that no capture is in progress.
    assert said == [*OPENED, "begin A relaxed", "end", "close A", "release A",
                    "begin None global", "end", "synchronize"]
    assert gc.isenabled() and len(cuda_graphs._FAILED) == 1
    del said[:]
    recorder.record(lambda args: [], [])  # uses another pool
    assert said[3:] == ["begin B relaxed", "end", "wait", "replay"]


def test_a_capture_that_ends_with_an_error_costs_nothing(said: list[str]) -> None:
    recorder = CudaRecorder(Target())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the host waits"):
        recorder.record(failing(0), [])
    recorder.record(lambda args: [], [])
    assert said == [*OPENED, "begin A relaxed", "end", "begin A relaxed", "end", "wait", "replay"]
    assert not cuda_graphs._FAILED


def test_it_is_said_when_the_generator_cannot_be_mended(said: list[str]) -> None:
    recorder = CudaRecorder(Target())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="random numbers may raise"), pytest.raises(ValueError, match="the host waits"):
        recorder.record(failing(2), [])


def test_what_all_earlier_kernels_found_is_raised(said: list[str]) -> None:
    target = Target()
    recorder = CudaRecorder(target)  # type: ignore[arg-type]
    recorder.settle()
    target.bad = (-1, head(Fault.INDEX) | 7)
    with pytest.raises(IndexError, match="index 7"):
        recorder.settle()
    assert said == ["synchronize"] * 2
