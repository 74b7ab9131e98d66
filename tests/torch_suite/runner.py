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
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from patience import answers

from .files import DEVICE, KINDS, File, chosen, common_name
from .worker import WHERE

# Tests of one process, by kind of file: what a process gathers (graphs, kernels, memory) goes with it. On the device
# most tests are short beside the seconds that a file takes to load.
BATCH = {"device": 300, "skeleton": 300, "compile": 150}
BAD = ("failed", "crashed", "hung")
LOADING = "file.load"  # stands for all tests of a file that cannot be loaded


@dataclass
class Settings:
    root: Path  # PyTorch's test folder
    state: Path  # what is known so far
    dtypes: tuple[str, ...]
    limit: float = 600.0  # seconds of processors for a test
    start_limit: float = 300.0  # seconds until a worker has loaded its file: the device's core may be compiled there
    time: float = float("inf")  # seconds for all; what is left then is left for another run
    jobs: int = 1  # processes at once
    shard: tuple[int, int] = (1, 1)
    only: str = ""  # tests whose name has this part
    redo: tuple[str, ...] = ()  # statuses of ours that are run again


class State:
    """The last report on each test of a file on a side."""

    def __init__(self, settings: Settings, file: File, side: str):
        self.path = settings.state / side / (file.path.replace("/", "+") + ".jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        lines = self.path.read_text().splitlines() if self.path.exists() else ()
        self.tests: dict[str, dict[str, Any]] = {}
        for line in lines:
            if line.endswith("}"):  # not cut off
                report = json.loads(line)
                self.tests[common_name(report["test"])] = report

    def add(self, report: dict[str, Any]) -> None:
        with self.lock, self.path.open("a") as out:
            self.tests[common_name(report["test"])] = report
            out.write(json.dumps(report) + "\n")


class Worker:
    """A process, and its reports as they come."""

    def __init__(self, settings: Settings, file: File, side: str, log: IO[bytes]):
        ours, theirs = os.pipe()
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        threads = str(max(1, (os.cpu_count() or 1) // settings.jobs))  # the processes fill the cores
        plain = {"OMP_NUM_THREADS": threads, "POCL_MAX_PTHREAD_COUNT": threads} | plain
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch_suite.worker", str(theirs)], stdin=subprocess.PIPE, stdout=log, stderr=log,
            pass_fds=(theirs,), env=plain | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True)  # so that it ends with what it has started
        os.close(theirs)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()
        # A share of the memory for each process, and one for all that is not ours: some tests take what they get.
        share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (settings.jobs + 1)
        self.tell({"root": str(settings.root), "file": file._asdict(), "side": side, "memory": share})

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

    def next(self, limit: float, stop: float) -> dict[str, Any] | None:
        """The next report; None: it has ended. TimeoutError after `limit` seconds, or at the time `stop`."""
        got: list[str | None] = []

        def within(seconds: float) -> bool:
            with suppress(queue.Empty):
                got.append(self._lines.get(timeout=seconds))
            return bool(got)

        if not answers(self.process.pid, within, limit, stop):
            raise TimeoutError
        return None if got[0] is None else json.loads(got[0])

    def end(self) -> int:
        """The exit status; a process that runs, and what it has started, is killed."""
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def say_where(self) -> None:
        """Into its log."""
        with suppress(ProcessLookupError):
            self.process.send_signal(WHERE)
            time.sleep(0.3)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


def run_tests(settings: Settings, file: File, side: str, choose: Callable[[list[str]], list[str]], state: State,
              show: Callable[[dict[str, Any]], None] = lambda report: None, stop: float = float("inf")) -> None:
    """Those of the file's tests that `choose` returns, until the time `stop`. RuntimeError if it cannot be loaded."""
    waiting: list[str] | None = None

    def ended(report: dict[str, Any]) -> None:
        state.add(report)
        show(report)

    while (waiting is None or waiting) and time.monotonic() < stop:
        with tempfile.TemporaryFile() as log:
            worker = Worker(settings, file, side, log)
            try:
                loaded = worker.next(settings.start_limit, stop)
            except TimeoutError:
                loaded = None
            if loaded is None:
                worker.kill()
                worker.end()
                if time.monotonic() >= stop:
                    return
                raise RuntimeError(f"{file.path} does not load: {_tail(log)}")
            if waiting is None:
                waiting = choose(loaded["tests"])
            worker.tell(waiting)
            waiting, crime = _follow(settings, worker, waiting, ended, stop)
            if crime and time.monotonic() < stop:
                ended(crime | {"trace": _tail(log)})


def _follow(settings: Settings, worker: Worker, batch: list[str], ended: Callable[[dict[str, Any]], None],
            stop: float) -> tuple[list[str], dict[str, Any]]:
    """What is left of a batch when its worker has ended, and the report on the test that ended it."""
    left, current, why = dict.fromkeys(batch), "", "hung"
    try:
        while time.monotonic() < stop:
            report = worker.next(settings.limit, stop)
            if report is None:
                why = "crashed"
                break
            current = report["test"] if "status" not in report else ""
            if "status" in report:
                left.pop(report["test"], None)
                ended(report)
    except TimeoutError:
        worker.say_where()
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


class Suite:
    """The chosen tests of some files, in batches by chance, on all sides of their file."""

    def __init__(self, settings: Settings, files: Iterable[File], show: Callable[[str], None] = print):
        self.settings, self.files, self.show = settings, tuple(files), show
        self.states = {(file, side): State(settings, file, side) for file in self.files for side in sides(file)}
        self.counts: Counter[tuple[str, str]] = Counter()  # (file, status) of ours

    def run(self) -> None:
        stop = time.monotonic() + self.settings.time
        with ThreadPoolExecutor(self.settings.jobs) as pool:
            listed = list(pool.map(lambda file: self._list(file, stop), self.files))
            list(pool.map(lambda batch: self._run(*batch, stop), in_turn(dict(zip(self.files, listed, strict=True)))))

    def _list(self, file: File, stop: float) -> list[str]:
        """The common names of the tests that are not known; what stands in the report on the file as a whole."""
        state = self.states[file, DEVICE]
        found = self._listed(file)

        def take(tests: list[str]) -> list[str]:
            found.extend(tests)
            return []

        try:
            if not found:
                run_tests(self.settings, file, DEVICE, take, state, stop=stop)
        except RuntimeError as error:
            state.add({"test": LOADING, "status": "failed", "seconds": 0, "error": str(error)[-1000:], "trace": ""})
            self.show(f"  {file.path}: {error}")
            return []
        if time.monotonic() >= stop:
            return []
        names = [common_name(test) for test in chosen(found, self.settings.dtypes, self.settings.shard)
                 if self.settings.only in test]
        state.add({"test": LOADING, "status": "passed", "seconds": 0, "selected": len(names), "tests": found})
        left = [test for test in names if not (self._known(file, test) and self._judged(file, test))]
        self.show(f"{file.path}: {len(names)} tests, {len(left)} to run")
        return left

    def _listed(self, file: File) -> list[str]:
        """All tests of a file as they were when it was loaded, if it has not changed since."""
        state = self.states[file, DEVICE]
        known = state.tests.get(LOADING, {}).get("tests", [])
        return known if known and (self.settings.root / file.path).stat().st_mtime < state.path.stat().st_mtime else []

    def _known(self, file: File, test: str) -> bool:
        """Ours, or that there is nothing to compare with."""
        ours = self.states[file, DEVICE].tests.get(test)
        return ours["status"] not in self.settings.redo if ours else self._no_reference(file, test)

    def _judged(self, file: File, test: str) -> bool:
        ours = self.states[file, DEVICE].tests.get(test, {})
        return ours.get("status") not in BAD or all(
            test in self.states[file, side].tests for side in KINDS[file.kind].judges)

    def _no_reference(self, file: File, test: str) -> bool:
        found = (self.states[file, side].tests.get(test) for side in KINDS[file.kind].beside)
        return any(report is not None and report["status"] != "passed" for report in found)

    def _run(self, file: File, batch: list[str], stop: float) -> None:
        kind = KINDS[file.kind]
        for side in sides(file):
            state, wanted = self.states[file, side], batch
            if side == DEVICE:
                wanted = [test for test in batch if not self._known(file, test)]
            elif side in kind.judges:
                ours = self.states[file, DEVICE].tests
                wanted = [test for test in batch if ours.get(test, {}).get("status") in BAD]
            if side != DEVICE:
                wanted = [test for test in wanted if test not in state.tests]
            if not wanted:
                continue
            try:
                run_tests(self.settings, file, side, _named(wanted), state, self._shown(file, side), stop)
            except RuntimeError as error:
                self.show(f"  {side}: {error}")

    def _shown(self, file: File, side: str) -> Callable[[dict[str, Any]], None]:
        def one(report: dict[str, Any]) -> None:
            if report["status"] in BAD:
                self.show(f"  {file.path} [{side}] {report['status']}: {report['test']}: {report['error'][:160]!r}")
            if side != DEVICE:
                return
            self.counts[file.path, report["status"]] += 1
            counts = Counter({status: count for (path, status), count in [*self.counts.items()] if path == file.path})
            if counts.total() % 50 == 0:
                words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
                self.show(f"{file.path}: {words}")

        return one


def sides(file: File) -> tuple[str, ...]:
    kind = KINDS[file.kind]
    return (*kind.beside, DEVICE, *kind.judges)


def in_turn(tests: dict[File, list[str]]) -> list[tuple[File, list[str]]]:
    """Batches such that whenever a run is stopped, about the same share of every file has run.

    Tests of one operator and dtype run in one process, since they need the same kernels.
    """
    placed = []
    for file, names in tests.items():
        alike = sorted(names, key=lambda name: name.split("_")[::-1])  # names end with operator and dtype
        parts = max(1, round(len(names) / BATCH[file.kind]))
        batches = [alike[k * len(alike) // parts:(k + 1) * len(alike) // parts] for k in range(parts) if names]
        batches.sort(key=lambda batch: zlib.crc32(batch[0].encode()))
        placed += [(k / parts, file.path, file, batch) for k, batch in enumerate(batches)]
    return [(file, batch) for *_, file, batch in sorted(placed)]


def _named(wanted: Iterable[str]) -> Callable[[list[str]], list[str]]:
    common = dict.fromkeys(wanted)

    def choose(names: list[str]) -> list[str]:
        found = {common_name(name): name for name in names}
        return [found[name] for name in common if name in found]

    return choose


def _tail(log: IO[bytes]) -> str:
    """The end of a worker's log; of a crash the stack, without the modules that are listed after it."""
    log.seek(0)
    return log.read().decode(errors="replace").split("\nExtension modules:")[0][-3000:]
