"""Runs programs in worker processes: a crash or a hang is a finding, and the next program gets a new process."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from patience import answers

from .program import Program

LIFE = 400  # programs per process: Dynamo and the loader never free what they keep, so processes are replaced


@dataclass
class Outcome:
    seed: int
    program: Program | None = None
    ours: list[tuple[str, str]] = field(default_factory=list)  # kind, detail
    torchs: list[tuple[str, str]] = field(default_factory=list)
    seconds: tuple[float, ...] = (0.0, 0.0)  # CPU seconds of the program, and of its compilers
    shrunk: Program | None = None


@dataclass(frozen=True)
class Traced:
    """A task: run a program with torch's own tracing only. If that crashes or raises, a crash of ours is torch's."""

    program: Program

    @property
    def seed(self) -> int:
        return self.program.seed


def spent() -> tuple[float, ...]:
    return time.process_time(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def serve(pipe: Connection, target: str, options: dict[str, Any]) -> None:
    """The loop of a worker process: receives programs or seeds, and sends outcomes."""
    import logging

    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # Dynamo logs every error that it raises
    import torch._dynamo

    import flambeau
    torch._dynamo.config.recompile_limit = 64
    # Dynamo times each graph's guards once, after flushing the CPU's caches, which takes a tenth of a program's time.
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
    from .judge import findings, traced
    from .kinds import draw

    if target == "device":
        flambeau.enable_device()
    if target == "opencl":  # writing binaries for other processes, which none will use, takes a third of the time
        from flambeau.targets.opencl.target import OpenClTarget

        OpenClTarget.keeps_binaries = lambda self, device: False
    while True:
        task = pipe.recv()
        if task is None:
            return
        start = spent()
        try:
            if isinstance(task, Traced):
                ours, torchs = [], traced(task.program, target)
            else:
                program = draw(task, **options) if isinstance(task, int) else task
                pipe.send(program)
                ours, torchs = findings(program, target)
            found = [(f.kind, f.detail) for f in ours], [(f.kind, f.detail) for f in torchs]
        except Exception:
            found = [("the fuzzer", traceback.format_exc()[-1500:])], []
        pipe.send((*found, tuple(b - a for a, b in zip(start, spent(), strict=True))))


class Worker:
    def __init__(self, target: str, options: dict[str, Any], limit: float) -> None:
        self.target, self.options, self.limit = target, options, limit
        self.process: Any = None
        self.ran = 0

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.target, self.options), daemon=True)
        self.process.start()
        theirs.close()
        self.ran = 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None

    def run(self, task: int | Program | Traced) -> Outcome:
        """Runs a program, or that of a seed, in the worker process and returns its outcome."""
        if self.process is None or self.ran >= LIFE:
            self.stop()
            self.start()
        self.ran += 1
        out = Outcome(task if isinstance(task, int) else task.seed, task if isinstance(task, Program) else None)
        fresh = 60.0 if self.ran == 1 else 0.0  # to import torch and start the device
        try:
            self.pipe.send(task)
            while True:
                if not answers(self.process.pid, self.pipe.poll, self.limit + fresh):
                    out.ours = [("hang", f"no result after {self.limit:.0f} s")]
                    self.stop()
                    return out
                got = self.pipe.recv()
                if isinstance(got, Program):
                    out.program = got
                else:
                    out.ours, out.torchs, out.seconds = got
                    return out
        except (EOFError, OSError):
            self.process.join()
            out.ours = [("crash", f"exit status {self.process.exitcode}")]
            self.stop()
            if out.program is not None and not isinstance(task, Traced):
                alone = self.run(Traced(out.program))
                # torch's replay of views may read beyond a list: whether it crashes or raises depends on chance.
                if any(kind in ("crash", "raises") for kind, _ in alone.ours + alone.torchs):
                    out.ours, out.torchs = [], out.ours
            return out


def run_all(seeds: Iterable[int], target: str, jobs: int, limit: float, options: dict[str, Any],
            told: Callable[[Worker, Outcome], None]) -> None:
    """Runs all seeds on `jobs` workers. `told` is called with each outcome, in any order, by several threads."""
    waiting = iter(seeds)
    lock = threading.Lock()

    def loop() -> None:
        worker = Worker(target, options, limit)
        try:
            while True:
                with lock:
                    seed = next(waiting, None)
                if seed is None:
                    return
                told(worker, worker.run(seed))
        finally:
            worker.stop()

    threads = [threading.Thread(target=loop) for _ in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
