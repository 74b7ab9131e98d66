"""One stream or several: a clock over the caller's own calls decides where the device's times favour several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flambeau.runtime.streams import overlap_choice
from flambeau.runtime.streams.overlap_choice import CALLS, TURNS, Trial, chosen, trial_of

CPU = torch.device("cpu")


@dataclass
class Machine:
    """A host that launches and a device that runs, with a clock that nobody waits for."""

    host: float = 0.0  # the time on the host
    device: float = 0.0  # when the device will be done
    forgotten: list[Any] = field(default_factory=list)
    capturing: bool = False

    def wait(self, *_: Any) -> None:
        self.host = max(self.host, self.device)

    def queue(self) -> int | None:
        return None if self.capturing else 1

    def recorder(self) -> Any:
        return SimpleNamespace(forget=self.forgotten.append)


class FakePlan:
    """A program whose calls take the host and the device so long, and return its name."""

    def __init__(self, machine: Machine, name: str, host: float, device: float, backward: bool = False) -> None:
        self.machine, self.name, self.times, self.device = machine, name, (host, device), CPU
        self.graphs = SimpleNamespace(backward=backward)

    def bound(self, kernels: Any, function: Any = None) -> Callable[[list[Any]], list[Any]]:
        return self.raw(kernels)

    def raw(self, kernels: Any) -> Callable[[list[Any]], list[Any]]:
        def run(args: list[Any]) -> list[Any]:
            self.machine.host += self.times[0]
            self.machine.device = max(self.machine.device, self.machine.host) + self.times[1]
            return [self.name]

        return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(overlap_choice, "choice", lambda *_: 1)
    monkeypatch.setattr(overlap_choice, "time", SimpleNamespace(perf_counter=lambda: made.host))
    monkeypatch.setattr(torch.accelerator, "synchronize", made.wait)
    return made


def both(machine: Machine, one: tuple[float, float], several: tuple[float, float], function: Any = None,
         backward: bool = False) -> Callable[[list[Any]], list[Any]]:
    plans = [FakePlan(machine, name, *times, backward) for name, times in (("one", one), ("several", several))]
    return chosen(*plans, machine, {}, function)  # type: ignore[arg-type]


@pytest.mark.parametrize(("one", "several", "want"), [
    ((1, 5), (2, 3), "several"),  # the device is slower, and it is what the caller waits for
    ((5, 2), (6, 1), "one"),  # the host is slower, and its work grows
    ((5, 6), (8, 2), "one"),  # the host becomes slower than the device was
    ((5, 2), (5, 1), "one"),  # nothing is gained
])
def test_the_clock_decides(one: tuple[float, float], several: tuple[float, float], want: str, machine: Machine) -> None:
    run = both(machine, one, several)
    names = [run([])[0] for _ in range(2 * TURNS * CALLS + 1)]
    turns = [set(names[k:k + CALLS]) for k in range(0, 2 * TURNS * CALLS, CALLS)]
    assert turns == [{"several"}, {"one"}] * TURNS
    assert names[-1] == want
    machine.capturing = True  # from now on, the chosen program runs in captures too
    assert run([]) == [want]
    (_, _, dropped), backward = machine.forgotten[0]
    assert (dropped, backward) == (want == "one", False) and len(machine.forgotten) == 1


def test_a_forward_and_its_backward_are_one_choice(machine: Machine) -> None:
    """By itself the forward gains, but with its backward the host takes longer."""
    forward = both(machine, (1, 3), (1, 2), "f")
    backward = both(machine, (10, 1), (12, 1), "f", backward=True)
    names = [(forward([])[0], backward([])[0]) for _ in range(2 * TURNS * CALLS + 2)]
    assert {pair for pair in names if pair[0] != pair[1]} == set() and names[-1] == ("one", "one")


def test_a_graph_that_comes_later_has_a_trial_of_its_own() -> None:
    first = trial_of("f", CPU)
    assert trial_of("f", CPU) is first and trial_of("g", CPU) is not first and trial_of(None, CPU) is not first
    first.over = True
    assert trial_of("f", CPU) is not first


def test_what_is_slow_at_first_does_not_count(machine: Machine) -> None:
    """Recordings are made in the first turns."""
    trial = Trial(CPU)
    for call in range(2 * TURNS * CALLS + 1):
        kind = trial.called(0)
        machine.host += (2 if kind else 3) + (1000 if call < CALLS else 0)
    assert trial.over and trial.kind == 1


def test_during_a_capture_nothing_is_tried(machine: Machine) -> None:
    run = both(machine, (1, 5), (2, 3))
    machine.capturing = True
    assert {run([])[0] for _ in range(5 * CALLS)} == {"one"}
    machine.capturing = False
    assert run([]) == ["several"]
