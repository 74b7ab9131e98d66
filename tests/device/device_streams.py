"""What test_device.py runs in a process of its own: the order that streams keep, and that these tests would notice.

Each test has a twin in which the driver drops what it is about; there, the same rounds must go wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pyopencl
import pytest
import torch

import flambeau
from flambeau.targets.opencl.driver import ClDriver

DEV = "flambeau"
ROUNDS = int(os.environ.get("FLAMBEAU_TEST_ROUNDS", "10"))
SIZE = 1 << 18

_dropped: set[str] = set()


class Forgetful:
    """A driver's function that does nothing while it is dropped."""

    def __init__(self, name: str, instead: Any) -> None:
        self._real = getattr(ClDriver, name)
        setattr(ClDriver, name, lambda driver, *args: instead if name in _dropped else self._real(driver, *args))


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    Forgetful("wait", None)
    Forgetful("query", True)
    flambeau.enable_device()


@pytest.fixture(autouse=True)
def sound() -> Iterator[None]:
    yield
    _dropped.clear()
    torch.flambeau.synchronize()
    torch.flambeau.empty_cache()


class Gate:
    """A command that keeps a stream busy until it is opened."""

    def __init__(self, stream: torch.Stream) -> None:
        there = queue_of(stream)
        self._event = pyopencl.UserEvent(there.device.context)
        there.last = pyopencl.enqueue_barrier(there.queue, wait_for=[self._event])
        there.queue.flush()

    def open(self) -> None:
        self._event.set_status(pyopencl.command_execution_status.COMPLETE)


class Waiting:
    """One stream writes, late; another waits for its event and reads."""

    def __init__(self) -> None:
        self.writer, self.reader = torch.Stream(device=DEV), torch.Stream(device=DEV)
        self.x, self.out = torch.empty(SIZE, device=DEV), torch.empty(SIZE, device=DEV)
        self.zeros, self.ones = torch.zeros(SIZE, device=DEV), torch.ones(SIZE, device=DEV)

    def round(self) -> bool:
        """Whether the reader saw what was written."""
        self.x.copy_(self.zeros)
        torch.flambeau.synchronize()
        gate = Gate(self.writer)
        with self.writer:
            self.x.copy_(self.ones)
        event = self.writer.record_event()
        self.reader.wait_event(event)
        with self.reader:
            self.out.copy_(self.x)
        queue_of(self.reader).queue.flush()
        if "wait" in _dropped:  # nothing holds the reader: it is through before the writer begins
            self.reader.synchronize()
        assert not self.writer.query()
        gate.open()
        torch.flambeau.synchronize()
        return bool((self.out.cpu() == 1).all())


class Reuse:
    """A stream reads memory, late, that its owner has freed and asks for again."""

    def __init__(self, recorded: bool = True) -> None:
        self.recorded = recorded
        self.user = torch.Stream(device=DEV)
        self.out, self.zeros = torch.empty(SIZE, device=DEV), torch.zeros(SIZE, device=DEV)

    def round(self) -> bool:
        """Whether the reader saw what was there."""
        torch.flambeau.empty_cache()
        x = torch.empty(SIZE, device=DEV).copy_(torch.full((SIZE,), 7.0))
        torch.flambeau.synchronize()
        gate = Gate(self.user)
        with self.user:
            self.out.copy_(x)
        if self.recorded:
            x.record_stream(self.user)
        address = x.data_ptr()
        del x
        during = torch.empty(SIZE, device=DEV).copy_(self.zeros)
        torch.flambeau.current_stream().synchronize()
        gate.open()
        self.user.synchronize()
        again = torch.empty(SIZE, device=DEV)
        assert address in (during.data_ptr(), again.data_ptr())  # it comes back when its user is done
        return bool((self.out.cpu() == 7).all())


def queue_of(stream: torch.Stream) -> Any:
    from flambeau.device import torch_module as device_module

    driver: Any = device_module._native()._driver
    return driver.stream(stream.device.index, stream.stream_id)


def test_an_event_makes_a_stream_wait() -> None:
    case = Waiting()
    assert all(case.round() for _ in range(ROUNDS))


def test_a_wait_that_is_dropped_is_noticed() -> None:
    case = Waiting()
    _dropped.add("wait")
    assert not any(case.round() for _ in range(ROUNDS))


def test_recorded_memory_is_not_reused_early() -> None:
    case = Reuse()
    assert all(case.round() for _ in range(ROUNDS))


@pytest.mark.parametrize("defect", ["not recorded", "query"])
def test_memory_that_is_reused_early_is_noticed(defect: str) -> None:
    case = Reuse(recorded=defect != "not recorded")
    _dropped.add(defect)
    assert not any(case.round() for _ in range(ROUNDS))


def test_waiting_across_devices() -> None:
    there = torch.Stream(device="flambeau:1")
    x = torch.ones(SIZE, device=DEV)
    event = torch.flambeau.current_stream().record_event()
    there.wait_event(event)
    with there:
        y = x.to("flambeau:1", non_blocking=True)
    there.synchronize()
    assert bool((y.cpu() == 1).all())


def test_events_tell_when_they_happened() -> None:
    stream = torch.Stream(device=DEV)
    gate = Gate(stream)
    event = stream.record_event()
    assert not event.query() and not stream.query()
    gate.open()
    event.synchronize()
    assert event.query()
