"""A progress bar, shown if compiling takes longer than two seconds and stderr is a terminal.

    with progress("compiling 8 parts", 8) as step:
        ...
        step()
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flambeau.config import config

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS = 2.0

Count = Callable[[], tuple[int, int]]  # how much is done, and of how much


class _Terminal:
    """One progress display for all compilations, with a line for each, shown two seconds after the first one began."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tasks: dict[Any, Count] = {}
        self.bar: Progress | None = None
        self.timer: threading.Timer | None = None

    def begin(self, what: str, count: Count) -> Any:
        with self.lock:
            if self.bar is None:
                self.bar = new_bar(self.refresh)
                self.timer = threading.Timer(SECONDS, self.show, (self.bar,))
                self.timer.daemon = True
                self.timer.start()
            task = self.bar.add_task(what, total=None)
            self.tasks[task] = count
            return task

    def show(self, bar: Progress) -> None:
        with self.lock:
            if bar is self.bar:  # otherwise it has just ended
                bar.start()

    def refresh(self, bar: Progress) -> None:
        for task, count in list(self.tasks.items()):
            done, total = count()
            bar.update(task, completed=done, total=total)

    def end(self, task: Any) -> None:
        with self.lock:
            assert self.bar is not None and self.timer is not None
            del self.tasks[task]
            self.bar.remove_task(task)
            if not self.tasks:
                self.timer.cancel()
                self.bar.stop()
                self.bar = self.timer = None


def new_bar(refresh: Callable[[Progress], None]) -> Progress:
    # Imported here, because most processes never show a bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    class Bar(Progress):
        def get_renderables(self) -> Any:
            refresh(self)
            return super().get_renderables()

    columns = TextColumn("flambeau: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Bar(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)


_TERMINAL = _Terminal()


@contextmanager
def progress(what: str, total: int = 1, count: Count | None = None) -> Iterator[Callable[[], None]]:
    """Show progress; the yielded function counts one of `total` as done. Alternatively `count` reports the progress."""
    done = [0]

    def step() -> None:
        done[0] += 1

    if not config.progress or not sys.stderr.isatty():
        yield step
        return
    task = _TERMINAL.begin(what, count or (lambda: (done[0], total)))
    try:
        yield step
    finally:
        _TERMINAL.end(task)
