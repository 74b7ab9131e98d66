"""Run a whole script in a session, as `python script.py args` would; with a folder, also trace some of its steps.

The trace covers three steps. A step begins with the first forward that is called after the last compilation. The trace
begins when this program is called again and has run twice, and ends with the third call after that. If a script has no
such steps, the report uses the clocks of the session.
"""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile

from flambeau.config import config
from flambeau.errors import OptionError
from flambeau.report.program import is_backward
from flambeau.runtime.watchers import Part

from .profile import Profile, Ranges, read
from .session import Session
from .trace import TRACE, activities, add_plans, made_folder, settle, write_report

STEPS = 3


class Window:
    """A watcher that starts and stops torch's profiler."""

    def __init__(self, session: Session, ranges: Ranges) -> None:
        self.session, self.ranges = session, ranges
        ranges.on = False
        self.first: Any = None  # the plan of the program with which a step begins
        self.known = 0  # graphs that had been compiled when it was chosen
        self.profiler: profile | None = None
        self.left, self.wall, self.start = STEPS, 0.0, 0.0

    def __call__(self, part: Part, call: Callable[..., Any]) -> Callable[..., Any]:
        if part.where:
            return call

        def run(args: list[Any]) -> Any:
            if self.profiler is None and self.known < len(self.session.graphs):
                self.first = None
            if self.first is None and not self.backward(part):
                self.first, self.known = part.plan, len(self.session.graphs)
            elif self.first is part.plan and not self.wall:
                self.turn()
            return call(args)

        return run

    def backward(self, part: Part) -> bool:
        made = next((g for g in self.session.graphs if g.package is part.plan), None)
        return made is not None and is_backward(made.gm)

    def turn(self) -> None:
        """Called when a step begins."""
        if self.profiler is not None:
            self.left -= 1
            if not self.left:
                self.stop()
        elif self.session.clocks.programs[id(self.first)].calls >= 2:
            self.profiler = profile(activities=activities(), profile_memory=True)
            settle()
            self.profiler.start()
            self.ranges.on = True
            self.start = time.perf_counter()

    def stop(self) -> None:
        if self.profiler is not None and not self.wall:
            settle()
            self.wall, self.ranges.on = time.perf_counter() - self.start, False
            self.profiler.stop()


def run_script(script: Path, arguments: Sequence[str], folder: Path | None = None) -> tuple[Session, int]:
    """Run a script. Returns the session and the script's exit status."""
    if not script.is_file():
        raise OptionError(f"there is no file {script}")
    out = None if folder is None else made_folder(folder)
    session, ranges = Session(), Ranges()
    window = Window(session, ranges)
    if out is not None:
        session.watchers += [ranges, window]  # the window is outermost
    with config.override(graph_cache=False), session:
        status = executed(script, arguments)
    if out is not None:
        window.stop()
        found = Profile(session.clocks.read())
        (out / TRACE).unlink(missing_ok=True)  # of an earlier run
        if window.profiler is not None:
            window.profiler.export_chrome_trace(str(out / TRACE))
            found = read(out / TRACE, ranges, window.wall)
            add_plans(out, session)
        write_report(out, session, found)
    return session, status


def executed(script: Path, arguments: Sequence[str]) -> int:
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.parent.resolve()), *sys.path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1 if end.code else 0
    except Exception:  # raised by the script: still report what happened until then
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path = before
    return 0
