"""The fuzzer, with a seed from the commit, and the programs of past findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from drawn import first_seed

from .found import FOUND
from .program import written
from .run import LENGTH, TARGETS, environment
from .shrink import shrink, signature
from .workers import Traced, Worker

NEEDS = {"opencl": "pyopencl", "device": "pyopencl", "interpreter": "triton"}
CHUNKS, PROGRAMS = 12, 25  # 300 programs per target
_workers: dict[str, Worker] = {}


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    for worker in _workers.values():
        worker.stop()


def worker_of(target: str, tmp: Path) -> Worker:
    """The process that runs the programs of a target for this process of pytest."""
    if (needed := NEEDS.get(target)) and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if target not in _workers:
        os.environ.update(environment(str(tmp)))
        _workers[target] = Worker(target, {"longest": LENGTH[target]}, limit=120.0)
    return _workers[target]


# On targets other than the CPU a program takes a second, so most of them run only in `make test-all`.
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("target", [t if t == "cpu" else pytest.param(t, marks=pytest.mark.slow) for t in TARGETS])
def test_random_programs(target: str, chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    worker = worker_of(target, tmp_path_factory.getbasetemp())
    first = first_seed() + chunk * PROGRAMS
    for seed in range(first, first + PROGRAMS):
        outcome = worker.run(seed)
        if not outcome.ours:
            continue
        kind, program = outcome.ours[0][0], outcome.program
        assert program is not None, f"seed {seed} on {target}: {outcome.ours}"
        small = shrink(program, lambda p, kind=kind: any(k == kind for k, _ in worker.run(p).ours), 60.0)
        name = signature(kind, small)
        pytest.fail(f"seed {seed} on {target}: {name}\n{outcome.ours[0][1]}\n\n{small.text(target)}")


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found(target: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    outcome = worker_of(target, tmp_path_factory.getbasetemp()).run(FOUND[name])
    assert not outcome.ours, f"{outcome.ours}\n\n{FOUND[name].text(target)}"


def test_views_of_inputs_that_share_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """AOTAutograd would replay those of one upon the other, and read beyond a list of parts."""
    from flambeau.torch_compat import TORCH

    program = written([("torch.ones(2, 14)", "[:, ::2]")], "v0 = a1.split(3, 0)[-1]", "v1 = a0.split(1, 0)[-1] + 1",
                      "v2 = a1.mul_(3)", results="v2, v2, v0, v1")
    both = program.inputs[0], replace(program.inputs[0], name="a1", layout="[:, ::2].select(0, 0)", of="a0")
    outcome = worker_of("cpu", tmp_path_factory.getbasetemp()).run(replace(program, inputs=both))
    found = outcome.ours + (outcome.torchs if TORCH >= (2, 13) else [])  # torch 2.11 crashes without us
    assert not {"crash", "raises", "value"} & {kind for kind, _ in found}


class Crashing(Worker):
    """A worker whose process crashes on each program. `alone`: the findings of torch's own tracing, None if that
    crashes as well."""

    exitcode, pid = -11, 0

    def __init__(self, alone: list[tuple[str, str]] | None) -> None:
        super().__init__("cpu", {}, limit=1.0)
        self.alone = alone

    def start(self) -> None:
        self.pipe = self.process = self
        self.ran = 0

    def send(self, task: object) -> None:
        self.task = task

    def poll(self, seconds: float) -> bool:
        return True

    def recv(self) -> object:
        if isinstance(self.task, Traced) and self.alone is not None:
            return [], self.alone, (0.0, 0.0)
        raise EOFError

    def kill(self) -> None: ...

    join = close = kill


@pytest.mark.parametrize(("alone", "excused"), [(None, True), ([("raises", "")], True), ([("strides", "")], False)])
def test_a_crash_of_torch(alone: list[tuple[str, str]] | None, excused: bool) -> None:
    outcome = Crashing(alone).run(written(["torch.ones(3)"], results="a0"))
    assert dict(outcome.torchs if excused else outcome.ours) == {"crash": "exit status -11"}
    assert not (outcome.ours if excused else outcome.torchs)


def test_the_reference_has_the_same_numbers() -> None:
    """The reference uses the program's random numbers, as torch draws others in float64, and any result would pass."""
    import torch

    from .judge import too_far
    from .reference import Reference

    program = written(["torch.randn(5, 8)"], "v0 = a0 * 3", results="v0")
    torch.manual_seed(0)
    ran = program.call({})[0] * 3
    assert too_far(ran, ran, Reference(program, {}), "result", 0) is None
    assert too_far(ran.sin(), ran, Reference(program, {}), "result", 0)
    assert torch.equal(ran.double(), Reference(program, {}).value("result", 0).float().double())
