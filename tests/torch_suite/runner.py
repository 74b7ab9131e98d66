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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .files import DEVICE, KINDS, File, chosen, common_name

BATCH = 150  # tests of one process: what a process gathers (graphs, kernels, memory) goes with it
BAD = ("failed", "crashed", "hung")
LOADING = "file.load"  # stands for all tests of a file that cannot be loaded


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

    def __init__(self, settings: Settings, file: File, side: str, log: IO[bytes]):
        ours, theirs = os.pipe()
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch_suite.worker", str(theirs)], stdin=subprocess.PIPE, stdout=log, stderr=log,
            pass_fds=(theirs,), env=plain | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True)  # so that it ends with what it has started
        os.close(theirs)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()
        self.tell({"root": str(settings.root), "file": file._asdict(), "side": side, "limit": settings.limit})

    def tell(self, order: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as will be seen
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

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


def run_tests(settings: Settings, file: File, side: str, choose: Callable[[list[str]], list[str]], state: State,
              show: Callable[[dict[str, Any], int], None] = lambda report, total: None) -> int:
    """Those of the file's tests that `choose` returns, and how many they are. RuntimeError if it cannot be loaded."""
    stop = time.monotonic() + settings.file_limit
    waiting: list[str] | None = None
    total = 0

    def ended(report: dict[str, Any]) -> None:
        state.add(report)
        show(report, total)

    while waiting is None or (waiting and time.monotonic() < stop):
        with tempfile.TemporaryFile() as log:
            worker = Worker(settings, file, side, log)
            try:
                loaded = worker.next(settings.start_limit)
            except TimeoutError:
                loaded = None
            if loaded is None:
                worker.kill()
                worker.end()
                raise RuntimeError(f"{file.path} does not load: {_tail(log)}")
            if waiting is None:
                waiting = choose(loaded["tests"])
                total = len(waiting)
            batch, waiting = waiting[:BATCH], waiting[BATCH:]
            worker.tell(batch)
            left, crime = _follow(settings, worker, batch, ended, stop)
            if time.monotonic() > stop:
                break
            if crime:
                ended(crime | {"trace": _tail(log)})
            waiting = left + waiting
    return total


def _follow(settings: Settings, worker: Worker, batch: list[str], ended: Callable[[dict[str, Any]], None],
            stop: float) -> tuple[list[str], dict[str, Any]]:
    """What is left of a batch when its worker has ended, and the report on the test that ended it."""
    left, current, why = dict.fromkeys(batch), "", "hung"
    try:
        while time.monotonic() < stop:
            report = worker.next(settings.limit)
            if report is None:
                why = "crashed"
                break
            current = report["test"] if "status" not in report else ""
            if "status" in report:
                left.pop(report["test"], None)
                ended(report)
    except TimeoutError:
        pass
    if why == "hung":
        worker.kill()
    status = worker.end()
    if not left:
        return [], {}
    culprit = current or next(iter(left))  # if none was under way, it is the next one
    del left[culprit]
    word = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return [*left], {"test": culprit, "status": why, "seconds": settings.limit if why == "hung" else 0,
                     "error": word if why == "crashed" else f"no end within {settings.limit:g} seconds"}


def run_file(settings: Settings, file: File, show: Callable[[str], None] = print) -> None:
    """A file on all of its sides."""
    kind = KINDS[file.kind]
    known: dict[str, State] = {}
    for side in (*kind.beside, DEVICE, *kind.judges):
        state = known[side] = State(settings, file, side)
        redo = settings.redo if side == DEVICE else ()
        counts: Counter[str] = Counter()
        began = time.monotonic()

        def choose(names: list[str], side: str = side, state: State = state, redo: tuple[str, ...] = redo) -> list[str]:
            tests = [test for test in chosen(names, settings.dtypes, settings.shard) if settings.only in test]
            if side in kind.judges:
                ours = known[DEVICE].tests
                tests = [test for test in tests if ours.get(common_name(test), {}).get("status") in BAD]
            return [test for test in tests if common_name(test) not in state.tests
                    or state.tests[common_name(test)]["status"] in redo]

        def one(report: dict[str, Any], total: int, side: str = side, counts: Counter[str] = counts) -> None:
            counts[report["status"]] += 1
            if report["status"] in BAD:
                show(f"  {side} {report['status']}: {report['test']}: {report['error'][:160]!r}")
            if counts.total() % 50 == 0:
                show(f"{file.path} [{side}] {counts.total()} of {total}: {_words(counts)}")

        try:
            total = run_tests(settings, file, side, choose, state, one)
        except RuntimeError as error:
            state.add({"test": LOADING, "status": "failed", "seconds": 0, "error": str(error)[-1000:], "trace": ""})
            show(f"  {side}: {error}")
            continue
        if state.tests.get(LOADING, {}).get("status") == "failed":
            state.add({"test": LOADING, "status": "passed", "seconds": 0})
        show(f"{file.path} [{side}]: {total} to run: {_words(counts)}; {time.monotonic() - began:.0f} s")


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing ran"


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-3000:]
