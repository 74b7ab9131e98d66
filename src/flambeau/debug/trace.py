"""`with flambeau.debug.trace("out/"):` a report of what runs inside, as one page, and a trace for Perfetto.

    out/report.html     graphs, kernels by what they lose against the limit, memory over time, texts
    out/trace.json.gz   for https://ui.perfetto.dev
"""

from __future__ import annotations

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
    """Trace what runs inside the block, graphs that were compiled before included, and write a report into a folder.

    Put it around a few steps that are like the others, after the first ones: torch's profiler runs along, and what is
    compiled inside is counted with what runs.
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
    from flambeau.report.trace_page import page  # which reads sessions, and so stands above them

    (out / REPORT).write_text(page(session, found))


def add_plans(out: Path, session: Session) -> None:
    """Beside what ran, how the model had it, for programs on several streams."""
    from flambeau.report import lanes

    lanes.add_plans(out / TRACE, [(f"graph {k}", g.program, g.captured.graph.capabilities.tuning)
                                  for k, g in enumerate(session.known(), 1)])


def made_folder(folder: str | Path) -> Path:
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{folder} is no folder that a report could go to: {error.strerror}") from None
    return out


def activities() -> list[ProfilerActivity]:
    there = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [ProfilerActivity.CPU, *([there[here.type]] if here is not None and here.type in there else [])]


def settle() -> None:
    """What was launched is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
