"""The fuzzer, with a seed from the commit; and what it found once."""

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
from .workers import Worker

NEEDS = {"opencl": "pyopencl", "device": "pyopencl", "interpreter": "triton"}
CHUNKS, PROGRAMS = 12, 25  # 300 programs a target
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


# Elsewhere than on the CPU a program takes a second: most of them run in `make test-all` only.
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


def test_a_crash_of_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """AOTAutograd replays views of an input upon another one: it reads beyond a list of parts."""
    program = written([("torch.ones(2, 14)", "[:, ::2]")], "v0 = a1.split(3, 0)[-1]", "v1 = a0.split(1, 0)[-1] + 1",
                      "v2 = a1.mul_(3)", results="v2, v2, v0, v1")
    both = program.inputs[0], replace(program.inputs[0], name="a1", layout="[:, ::2].select(0, 0)", of="a0")
    outcome = worker_of("cpu", tmp_path_factory.getbasetemp()).run(replace(program, inputs=both))
    assert not outcome.ours
