"""How long a process is waited for: by what it has had of the processors, since others may have had them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

IDLE = 0.01  # of a processor: who has had less, over a limit, waits for what does not come


def spent(pid: int) -> float:
    """Seconds of processors, with those of what it has started, as of compilers."""
    found = Path(f"/proc/{pid}")
    try:
        fields = (found / "stat").read_text().rpartition(")")[2].split()
        started = [int(child) for task in found.glob("task/*/children") for child in task.read_text().split()]
    except OSError:  # it has ended, or there are no such files: then the clock alone counts
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(spent, started))


def answers(pid: int, within: Callable[[float], bool], limit: float, stop: float = float("inf")) -> bool:
    """Whether an answer came, for which `within` waits some seconds, before the process had worked, or waited, for
    `limit` seconds, and before the time `stop`."""
    before = spent(pid)
    while (left := stop - time.monotonic()) > 0:
        if within(min(limit, left)):
            return True
        now = spent(pid)
        if now - before >= limit or now - before < IDLE * limit:
            break
        limit, before = limit - (now - before), now
    return False
