"""Starts workers, ends those that hang, and keeps what they report: one line of JSON for each test that has ended.

A test that ends its process is a result, "crashed", and one that takes longer than its limit is one, "hung"; the tests
after it go on in a new process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .files import DEVICE, KINDS, File, chosen, common_name

BATCH = 150  # tests of one process: what a process gathers (graphs, kernels, memory) goes with it
BAD = ("failed", "crashed", "hung")


@dataclass
class Settings:
    root: Path  # PyTorch's test folder
    state: Path  # what is known so far
    dtypes: tuple[str, ...]
    limit: float = 120.0  # seconds for a test
    start_limit: float = 300.0  # seconds until a worker has loaded its file: the device's core may be compiled there
    file_limit: float = float("inf")  # seconds for a file on one side; the rest of it is left for another run
    shard: tuple[int, int] = (1, 1)
    only: str = ""  # tests whose name has this part
    redo: tuple[str, ...] = ()  # statuses of ours that are run again


class State:
    """The last report on each test of a file on a side."""

    def __init__(self, settings: Settings, file: File, side: str):
        self.path = settings.state / side / (file.path.replace("/", "+") + ".jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else ()
        self.tests: dict[str, dict[str, Any]] = {}
        for line in lines:
            if line.endswith("}"):  # not cut off
                report = json.loads(line)
                self.tests[common_name(report["test"])] = report

    def add(self, report: dict[str, Any]) -> None:
        self.tests[common_name(report["test"])] = report
        with self.path.open("a") as out:
            out.write(json.dumps(report) + "\n")


class Worker:
    """A process, and its reports as they come."""

    def __init__(self, settings: Settings, file: File, side: str, tests: Iterable[str], log: IO[bytes]):
        ours, theirs = os.pipe()
        order = {"root": str(settings.root), "file": file._asdict(), "side": side, "tests": list(tests),
                 "limit": settings.limit}
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch_suite.worker", str(theirs)], stdin=subprocess.PIPE, stdout=log, stderr=log,
            pass_fds=(theirs,), env=plain | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True)  # so that it ends with what it has started
        os.close(theirs)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode())
        self.process.stdin.close()
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as reports:
            for line in reports:
                self._lines.put(line)
        self._lines.put(None)

    def next(self, limit: float) -> dict[str, Any] | None:
        """The next report; None: it has ended. TimeoutError after `limit` seconds."""
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError from None
        return None if line is None else json.loads(line)

    def end(self) -> int:
        """The exit status; a process that runs, and what it has started, is killed."""
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


def list_tests(settings: Settings, file: File, side: str) -> list[str]:
    """RuntimeError if the file cannot be loaded."""
    with tempfile.TemporaryFile() as log:
        worker = Worker(settings, file, side, (), log)
        found = []
        try:
            while (report := worker.next(settings.start_limit)) is not None:
                found.append(report["test"])
        except TimeoutError:
            worker.kill()
        if worker.end():
            raise RuntimeError(f"{file.path} does not load: {_tail(log)}")
    return found


def run_tests(settings: Settings, file: File, side: str, tests: list[str], state: State,
              show: Any = lambda report: None) -> None:
    stop = time.monotonic() + settings.file_limit
    waiting = list(tests)
    while waiting and time.monotonic() < stop:
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        with tempfile.TemporaryFile() as log:
            worker = Worker(settings, file, side, batch, log)
            open_tests, current, ended = dict.fromkeys(batch), "", ""
            limit = settings.start_limit
            try:
                while (report := worker.next(limit)) is not None:
                    limit = settings.limit
                    if "status" not in report:
                        current = report["test"]
                        continue
                    open_tests.pop(report["test"], None)
                    current = ""
                    state.add(report)
                    show(report)
                    if time.monotonic() > stop:
                        worker.kill()
                        waiting = []
                        break
                else:
                    status = worker.end()
                    ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            except TimeoutError:
                worker.kill()
            worker.end()
            if time.monotonic() > stop:
                return
            if not open_tests:
                continue
            # The worker ended early: what ran then is why; if none did, it is the first of the batch.
            culprit = current or next(iter(open_tests))
            del open_tests[culprit]
            report = {"test": culprit, "status": "crashed" if ended else "hung", "seconds": round(limit if not ended else 0, 1),
                      "error": ended or f"no end within {limit:g} seconds", "trace": _tail(log)}
            state.add(report)
            show(report)
            waiting = [*open_tests, *waiting]


def run_file(settings: Settings, file: File, show: Any = print) -> None:
    """A file on all of its sides."""
    kind = KINDS[file.kind]
    known: dict[str, State] = {}
    for side in (*kind.beside, DEVICE, *kind.judges):
        state = known[side] = State(settings, file, side)
        try:
            tests = chosen(list_tests(settings, file, side), settings.dtypes, settings.shard)
        except RuntimeError as error:
            state.add({"test": "file.load", "status": "failed", "seconds": 0, "error": str(error)[:4000], "trace": ""})
            show(f"{file.path} [{side}]: {error}")
            continue
        state.tests.pop("file.load", None)
        if settings.only:
            tests = [test for test in tests if settings.only in test]
        if side in kind.judges:
            ours = known[DEVICE].tests
            tests = [test for test in tests if ours.get(common_name(test), {}).get("status") in BAD]
        redo = settings.redo if side == DEVICE else ()
        todo = [test for test in tests if common_name(test) not in state.tests
                or state.tests[common_name(test)]["status"] in redo]
        counts: dict[str, int] = {}
        began = time.monotonic()

        def one(report: dict[str, Any], side: str = side, counts: dict[str, int] = counts, total: int = len(todo)) -> None:
            counts[report["status"]] = counts.get(report["status"], 0) + 1
            done = sum(counts.values())
            if report["status"] in BAD:
                show(f"  {side} {report['status']}: {report['test']}: {report['error'][:160]!r}")
            if done % 50 == 0 or done == total:
                show(f"{file.path} [{side}] {done}/{total}: {_words(counts)}")

        run_tests(settings, file, side, todo, state, one)
        show(f"{file.path} [{side}]: {len(tests)} tests, {len(todo)} to run: {_words(counts)}; "
             f"{time.monotonic() - began:.0f} s")


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing ran"


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-3000:]
