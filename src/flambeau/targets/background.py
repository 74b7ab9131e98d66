"""Background threads and compiler processes. All of them end before the interpreter does.

    pool = Pool(4, "compile")
    future = pool.submit(function, argument)     # in one of four threads
    thread = start(function, argument, name="keep")
    done = run(["g++", ...], environment, seconds=600)

Threads are daemons, so a program that has nothing more to do exits immediately. Its exit goes in this order: compilers
are killed with all their children; threads find at their next step that the process is ending (`Closing`), and are
joined, since a thread that returned from native code after the interpreter is gone would crash the process; functions
given to `at_exit` run last. Work that is submitted even later (by another exit handler) runs immediately, in the
calling thread.

A process that is killed runs no exit handler. Each compiler therefore has a watcher process, which reads from a pipe
whose other end is only in this process: when that closes, the compiler's process group is killed.
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

# Seconds that the exit of a process waits for threads: they may be in a compiler that is part of this process.
PATIENCE = 60.0

# The compiler gets no input; the watcher reads the pipe. Only the compiler holds the output, so that the output closes
# when the compiler ends.
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
    """Raised instead of compiling when the process is ending."""

    def __init__(self, message: str = "the process ends") -> None:
        super().__init__(message)


class OutOfTime(CompileError):
    """Raised for a compiler that exceeded its time limit and was killed."""


class _State:
    """The threads and processes of this process. A forked child starts empty, since it has none of the threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closing = False
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self.processes: dict[int, Callable[[], None]] = {}  # by process group: the function that ends it
        self.descriptors: set[int] = set()  # descriptors that no child may keep open: pipes to watchers, locks
        # functions to call at the end, and whether children call them as well
        self.last: list[tuple[Callable[[], None], bool]] = []


_state = _State()
_fork_locks: weakref.WeakSet[Any] = weakref.WeakSet()


# ---- threads -------------------------------------------------------------------------------------------


def start(function: Callable[..., Any], *args: Any, name: str) -> threading.Thread:
    """Runs a function in a thread of its own. Raises Closing if the process is ending."""
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
    """Whether the process is ending."""
    return _state.closing


def check() -> None:
    """Raises Closing if the process is ending and waits for this thread."""
    if _is_awaited():
        raise Closing


def _is_awaited() -> bool:
    return _state.closing and threading.current_thread() in _state.threads


class Pool:
    """Up to `count` threads, started when there is work for them. Work is done in order of submission."""

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
        """Starts a function; returns the future of its result. If the process is ending, the function runs
        immediately."""
        if self._state is not _state:
            self._begin()
        check()
        future: Future[T] = Future()
        with _state.lock:
            late = _state.closing
            more = False  # threads
            if not late:
                _state.pools.add(self)
                self._work.put((future, function, args))
                more = not self._idle.acquire(blocking=False) and self._started < self.count
                self._started += more
        if late:
            _do(future, function, args)
        elif more:
            try:
                start(self.work, name=self.name)
            except Closing:  # closing began in between
                self.end()
                self.work()
        return future

    def work(self) -> None:
        """Works until the process ends. Work that is waiting then is run as well: it fails at its next step, and
        reports that."""
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
            del item  # an idle thread must hold no references

    def end(self) -> None:
        self._work.put(None)


def _do(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:  # raised where the result is waited for
        future.set_exception(error)


# ---- compilers -----------------------------------------------------------------------------------------


def run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Returns the output of a program and its exit status, negative if a signal ended it.

    Raises OutOfTime if it takes longer, and Closing if the process is ending: then it is killed, with all its children.
    Raises OSError if it cannot be started.
    """
    if not os.path.isfile(command[0]) or not os.access(command[0], os.X_OK):
        raise FileNotFoundError(f"no program is called {command[0]}")
    check()
    theirs, ours = os.pipe()
    try:
        with held(ours):
            try:
                # In a session of its own: a keyboard interrupt is for this process.
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
    check()  # the exit may have killed it
    code = process.returncode
    return subprocess.CompletedProcess(list(command), 128 - code if code > 128 else code, output)


class Child:
    """A process that runs in a process group of its own. It ends with this process at the latest."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        with _state.lock:
            _state.processes[process.pid] = self.kill
        if _is_awaited():  # `close` may have missed this one
            self.kill()

    def end(self) -> None:
        """Kills what is left of it, and waits until it is gone."""
        self.kill()
        with _state.lock:
            _state.processes.pop(self.process.pid, None)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the other end of the pipe may be closed
                    pipe.close()
        self.process.wait()

    def kill(self) -> None:
        # The group exists as long as one of its processes does, and its number with it. When all are gone, and waited
        # for, the number may be reused.
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def held(descriptor: int) -> Iterator[None]:
    """Keeps a descriptor out of forked children within this block: whatever waits for it to close would wait for the
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
    """Registers a function to be called when the process ends, after its threads; the last one registered runs first.
    With `in_children`, also at the end of each forked child."""
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
    """Makes a lock free again in a forked child, which lacks the thread that held it."""
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
