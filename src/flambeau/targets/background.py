"""Background threads and the compilers that they wait for. All end before the interpreter does.

    pool = Pool(4, "compile")
    future = pool.submit(function, argument)     # in one of four threads
    thread = start(function, argument, name="keep")
    done = run(["g++", ...], environment, seconds=600)

Threads are daemons, so a program that has nothing more to do ends at once. Its exit then goes in this order: compilers
are killed with all that they started; threads find at their next step that the process ends (`Closing`), and are waited
for, since one that came back from native code after the interpreter is gone would take the process down; what was
given to `at_exit` is done last. Work that is asked for later still (by somebody else's exit handler) is done at once,
by the first that asks.

A process that is killed runs no exit handler. Each compiler therefore has a watcher beside it, which reads from a pipe
whose other end is in this process only: when that closes, the compiler's process group is killed.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from flambeau.errors import CompileError

T = TypeVar("T")

# How long the end of a process waits for threads: they may be in a compiler that is part of this process.
PATIENCE = 60.0

# The compiler has no input; the watcher has the pipe. Output is the compiler's alone, so that it ends with it.
_WATCHED = """
exec 3<&0 </dev/null
"$@" 3<&- &
compiler=$!
{ read -r _ <&3; kill -s KILL 0; } >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait "$compiler"
code=$?
kill -s KILL "$watcher"
exit "$code"
"""


class Closing(CompileError):
    """Nothing is compiled any more: the process ends."""

    def __init__(self, message: str = "the process ends") -> None:
        super().__init__(message)


class OutOfTime(CompileError):
    """A compiler that had not ended in time, and was ended."""


class _State:
    """What is under way in this process. A forked child begins with nothing: it has none of the threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closing = False
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self.processes: dict[int, Callable[[], None]] = {}  # by process group: how it is ended
        self.descriptors: set[int] = set()  # that no child may keep open: pipes to watchers, locks
        self.last: list[tuple[Callable[[], None], bool]] = []  # done at the end, and whether children do it as well


_state = _State()
_fork_locks: weakref.WeakSet[Any] = weakref.WeakSet()


# ---- threads -------------------------------------------------------------------------------------------


def start(function: Callable[..., Any], *args: Any, name: str) -> threading.Thread:
    """Run a function in a thread of its own. Closing, where the process ends already."""
    thread = threading.Thread(target=_quietly, args=(function, *args), name=f"flambeau-{name}", daemon=True)
    with _state.lock:
        if _state.closing:
            raise Closing
        _state.threads.add(thread)
        thread.start()
    return thread


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    with suppress(Closing):
        function(*args)


def closing() -> bool:
    """Whether the process ends."""
    return _state.closing


def check() -> None:
    """Raise Closing if the process ends and waits for this thread."""
    if _is_awaited():
        raise Closing


def _is_awaited() -> bool:
    return _state.closing and threading.current_thread() in _state.threads


class Pool:
    """Up to `count` threads, started when there is work for them, which is done in the order it came."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self._begin()

    def _begin(self) -> None:
        self._state = _state
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._work = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """The result, which is on its way; there at once where the process ends."""
        if self._state is not _state:
            self._begin()
        check()
        future: Future[T] = Future()
        with _state.lock:
            late = _state.closing
            if not late:
                _state.pools.add(self)
                self._work.put((future, function, args))
        if late:
            _do(future, function, args)
        elif not self._idle.acquire(blocking=False) and self._started < self.count:
            self._started += 1
            try:
                start(self.work, name=self.name)
            except Closing:  # since then
                self.end()
                self.work()
        return future

    def work(self) -> None:
        """Until the process ends. What is waiting then is done as well: it fails at its next step, and says so."""
        while True:
            try:
                item = self._work.get(block=False)
            except queue.Empty:
                self._idle.release()
                item = self._work.get()
            if item is None:  # nothing comes after it
                self.end()  # for the next thread
                return
            _do(*item)
            del item  # what is idle holds nothing

    def end(self) -> None:
        self._work.put(None)


def _do(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:  # raised where it is waited for
        future.set_exception(error)


# ---- compilers -----------------------------------------------------------------------------------------


def run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """The output of a program and its exit status, negative if a signal ended it.

    OutOfTime if it takes longer, Closing if the process ends: then it is killed, with all that it started. OSError
    if it cannot be started.
    """
    if not os.path.isfile(command[0]) or not os.access(command[0], os.X_OK):
        raise FileNotFoundError(f"no program is called {command[0]}")
    check()
    theirs, ours = os.pipe()
    try:
        with held(ours):
            try:
                # In a session of its own: an interrupt from the keyboard is for this process.
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _WATCHED, "sh", *command], stdin=theirs, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, env=dict(environment), text=True, errors="replace",
                    start_new_session=True)
            finally:
                os.close(theirs)
            child = Child(process)
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise OutOfTime(f"{command[0]} had not ended after {seconds:g} seconds, and was ended",
                                hint="FLAMBEAU_COMPILE_TIMEOUT is the limit") from None
            finally:
                child.end()
    finally:
        os.close(ours)
    check()  # it was killed then
    code = process.returncode
    return subprocess.CompletedProcess(list(command), 128 - code if code > 128 else code, output)


class Child:
    """A process that runs in a process group of its own. It ends with this one at the latest."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        with _state.lock:
            _state.processes[process.pid] = self.kill
        if _is_awaited():  # `close` may have been too early for this one
            self.kill()

    def end(self) -> None:
        """Kill what is left of it, and wait until it is gone."""
        self.kill()
        with _state.lock:
            _state.processes.pop(self.process.pid, None)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # of a pipe that nobody reads any more
                    pipe.close()
        self.process.wait()

    def kill(self) -> None:
        # The group lives as long as one of its processes does, and its number with it; when all are gone, and waited
        # for, the number may be somebody else's.
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def held(descriptor: int) -> Iterator[None]:
    """Within it a descriptor is open that a forked child must not keep: what waits for it to close would wait for the
    child as well."""
    hold(descriptor)
    try:
        yield
    finally:
        release(descriptor)


def hold(descriptor: int) -> None:
    with _state.lock:
        _state.descriptors.add(descriptor)


def release(descriptor: int) -> None:
    with _state.lock:
        _state.descriptors.discard(descriptor)


# ---- ends ----------------------------------------------------------------------------------------------


def at_exit(function: Callable[[], None], in_children: bool = False) -> None:
    """Have something done when the process ends, after its threads; the last comes first. Where `in_children`, also at
    the end of each child that it forks."""
    with _state.lock:
        _state.last.append((function, in_children))


@atexit.register
def close() -> None:
    with _state.lock:
        _state.closing = True
        ends = list(_state.processes.values())
        pools, threads, last = list(_state.pools), list(_state.threads), list(_state.last)
    for end in (*ends, *(pool.end for pool in pools)):
        end()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    for function, _ in reversed(last):
        function()


def fork_safe(lock: T) -> T:
    """A lock that is free in a forked child, whose thread that held it is not there."""
    _fork_locks.add(lock)
    return lock


def _after_fork() -> None:
    global _state
    for descriptor in _state.descriptors:
        with suppress(OSError):
            os.close(descriptor)
    last = [(function, True) for function, in_children in _state.last if in_children]
    _state = _State()
    _state.last = last
    for lock in list(_fork_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork)
