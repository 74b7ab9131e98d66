"""Runs parts of a benchmark in separate processes: they compile in parallel, and are measured one after the other.

    for name, told in run("flambeau.bench.compiled", {"lm24 train": {...}}, jobs=6, limit=240, prepare=160): ...

A process calls `part(talk, **arguments)` of the module. There, `talk.tell` sends a dictionary, and `talk.turn` waits
until nothing else runs on the machine. After `prepare` seconds nothing more is compiled, and after `limit` everything
ends. Whatever happens to a process, its earlier messages count. Commands with the same folder (`beside`) prepare at the
same time: none is measured before all have prepared, and they are measured one after the other.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from flambeau.bench.compile_time import CACHES
from flambeau.bench.harness import deadline, message

TOLD, READY, END = "told", "ready", "end"
MARK = "@part "  # the prefix of our lines; other code may print as well
# No cache may hold what another part compiled; deterministic products need a workspace of a fixed size.
ENVIRONMENT = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "FLAMBEAU_GRAPH_CACHE": "0", "FLAMBEAU_PROGRESS": "0",
               "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1",
               "PYTHONWARNINGS": "ignore"}
GRACE = 10.0  # seconds in which a part notices that its time is over


class OutOfTime(BaseException):
    """Raised when the time is over. Not an Exception: compilers handle those, and go on."""


class Talk:
    """The part's side of the connection."""

    def __init__(self, until: float) -> None:
        self.until = until

    def left(self) -> float:
        """Returns the seconds left to prepare."""
        return self.until - time.time()

    def tell(self, **told: Any) -> None:
        self.say(TOLD, told)

    def turn(self) -> None:
        self.say(READY)
        sys.stdin.readline()

    def say(self, kind: str, told: Any = None) -> None:
        print(f"\n{MARK}{json.dumps([kind, told])}", flush=True)

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Raises OutOfTime in a block that takes longer."""
        if seconds <= 0:
            raise OutOfTime
        return deadline(seconds, OutOfTime())

    def attempt(self, what: str, act: Callable[[], Any], seconds: float | None = None) -> bool:
        """Runs `act` within the time that is left. Returns whether it finished; if not, tells why."""
        try:
            with self.within(self.left() if seconds is None else seconds):
                act()
            return True
        except OutOfTime:
            self.tell(errors={what: "no time"})
        except Exception as error:
            self.tell(errors={what: message(error)})
        return False


class Process:
    """The parent's side of the connection."""

    def __init__(self, name: str, module: str, arguments: Mapping[str, Any], until: float, caches: Path,
                 events: queue.Queue[tuple[Process, str, Any]], environment: Mapping[str, str]) -> None:
        self.name, self.tail = name, ""
        # Our cache is shared by all parts, as it also holds extensions that would cost every part seconds of
        # compilation. Inductor calls a compiler with paths that may not contain spaces.
        folders = {variable: str(caches / ("" if folder == "flambeau" else name.replace(" ", "-")) / folder)
                   for variable, folder in CACHES.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flambeau.bench.parts", module, json.dumps(arguments), str(until)], text=True,
            env={**os.environ, **ENVIRONMENT, **folders, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True)  # so that its compilers end with it
        threading.Thread(target=self.listen, args=(events,), daemon=True).start()

    def listen(self, events: queue.Queue[tuple[Process, str, Any]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                if line.startswith(MARK):
                    events.put((self, *json.loads(line.removeprefix(MARK))))
                    continue
            except ValueError:  # another writer broke the line
                pass
            self.tail = line.strip() or self.tail
        events.put((self, END, self.process.wait()))

    def start_turn(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(module: str, parts: Mapping[str, Mapping[str, Any]], jobs: int, limit: float, prepare: float,
        environment: Mapping[str, str] | None = None, beside: Path | None = None
        ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what each part tells, as it comes. `jobs` parts prepare at once, in the given order."""
    start, events = time.time(), queue.Queue[tuple[Process, str, Any]]()
    others = Beside(beside)
    waiting, preparing, ready = list(parts), list[Process](), list[Process]()
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-", ignore_cleanup_errors=True) as caches:
        try:
            while waiting or preparing:
                while waiting and len(preparing) < jobs:
                    name = waiting.pop(0)
                    preparing.append(Process(name, module, parts[name], start + prepare, Path(caches), events,
                                             environment or {}))
                process, kind, told = received(events, start + prepare + GRACE)
                if process is None:  # a part that goes on would disturb those that measure
                    for name in [*(p.name for p in preparing), *waiting]:
                        yield name, {"errors": {"part": "no time"}}
                    while preparing:
                        preparing.pop().stop()
                    break
                if kind == TOLD:
                    yield process.name, told
                    continue
                if process in preparing:
                    preparing.remove(process)
                    ready.append(process)
                if kind == END:
                    ready.remove(process)
                    yield from last_words(process, told)
            others.wait(start + limit)
            while ready:
                mine, left = ready[0], start + limit - time.time()
                until = time.time() + min(2 * left / len(ready), left)  # twice its share, as most need less
                if left <= 0:
                    for process in ready:
                        yield process.name, {"errors": {"measure": "no time"}}
                    break
                mine.start_turn()
                while mine in ready:
                    process, kind, told = received(events, until)
                    if process is None:
                        yield mine.name, {"errors": {"measure": "no time"}}
                        ready.pop(0).stop()
                    elif kind == TOLD:
                        yield process.name, told
                    elif process in ready:
                        ready.remove(process)
                        yield from last_words(process, told)
        finally:
            for process in [*preparing, *ready]:
                process.stop()
            others.leave()


class Beside:
    """Other commands that prepare at the same time, represented by files in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.mine = folder / f"{os.getpid()}.preparing"
            self.mine.touch()
            self.lock = (folder / "lock").open("w")

    def wait(self, until: float) -> None:
        """Waits until all have prepared, and no other is being measured."""
        if self.folder is None:
            return
        self.mine.unlink(missing_ok=True)
        while any(self.folder.glob("*.preparing")) and time.time() < until:
            time.sleep(0.1)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def leave(self) -> None:
        if self.folder is not None:
            self.mine.unlink(missing_ok=True)
            self.lock.close()


def received(events: queue.Queue[tuple[Process, str, Any]], until: float) -> tuple[Process | None, str, Any]:
    """Returns the next event, or no process if none comes in time."""
    try:
        return events.get(timeout=max(until - time.time(), 0.01))
    except queue.Empty:
        return None, "", None


def last_words(process: Process, status: int) -> Iterator[tuple[str, dict[str, Any]]]:
    process.stop()  # compilers may be left
    if status:
        yield process.name, {"errors": {"part": f"exit {status}: {process.tail[-200:]}"}}


def absorb(row: Any, told: Mapping[str, Any]) -> None:
    """Merges a message into a dataclass: dictionaries are updated, other values replaced."""
    for key, value in told.items():
        if isinstance(value, dict):
            getattr(row, key).update(value)
        else:
            setattr(row, key, value)


def threads(jobs: int) -> dict[str, str]:
    """Returns settings for the number of compilers of each of so many parts. Compilers wait a good deal: half as many
    more than there are cores."""
    count = str(max(1, 3 * (os.cpu_count() or 1) // (2 * jobs)))
    return {"FLAMBEAU_JOBS": count, "TORCHINDUCTOR_COMPILE_THREADS": count}


def main(module: str, arguments: str, until: str) -> None:
    warnings.simplefilter("ignore")
    talk = Talk(float(until))
    try:
        importlib.import_module(module).part(talk, **json.loads(arguments))
    except Exception as error:
        talk.tell(errors={"part": message(error)})
    sys.stdout.flush()
    os._exit(0)  # does not wait for recorded graphs and compilers' threads


if __name__ == "__main__":
    # so that it is the module that the parts import
    importlib.import_module("flambeau.bench.parts").main(*sys.argv[1:])
