"""`with flambeau.debug.trace("out/"):` writes a report of what runs inside the block, and a trace for Perfetto.

    out/report.html     where the time went, graphs, kernels ranked by lost time, memory over time, sources
    out/trace.json.gz   for https://ui.perfetto.dev
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from flambeau.config import config
from flambeau.errors import OptionError

from .profile import Profile, Ranges, read
from .session import Session

REPORT, TRACE = "report.html", "trace.json.gz"


@contextmanager
def trace(folder: str | Path) -> Iterator[Session]:
    """Trace what runs inside the block, and write a report into a folder: `report.html` and `trace.json.gz`.

    Put it around a few typical steps, after the first ones. Graphs that were compiled before the block are included.
    torch's profiler runs during the block. If something is compiled inside the block, its time is part of the report.
    """
    out = made_folder(folder)
    ranges = Ranges()
    with config.override(graph_cache=False), Session(ranges) as session:
        settle()
        with profile(activities=activities(), profile_memory=True) as recorded:
            start = time.perf_counter()
            yield session
            settle()
            wall = time.perf_counter() - start
    recorded.export_chrome_trace(str(out / TRACE))
    write_report(out, session, read(out / TRACE, ranges, wall))
    add_plans(out, session)


def write_report(out: Path, session: Session, found: Profile) -> None:
    from flambeau.report.trace_page import page  # imported here, because it imports this package

    (out / REPORT).write_text(page(session, found))


def add_plans(out: Path, session: Session) -> None:
    """Adds the modelled timeline of each program on several streams to the trace, for comparison with the real one."""
    from flambeau.report import lanes

    lanes.add_plans(out / TRACE, [(f"graph {k}", g.program, g.captured.graph.capabilities.tuning)
                                  for k, g in enumerate(session.known(), 1)])


def made_folder(folder: str | Path) -> Path:
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot write a report to {folder}: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise OptionError(f"cannot write a report to {folder}: Permission denied")
    return out


def activities() -> list[ProfilerActivity]:
    there = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [ProfilerActivity.CPU, *([there[here.type]] if here is not None and here.type in there else [])]


def settle() -> None:
    """Wait until everything that was launched is finished."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
