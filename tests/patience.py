"""Waits for a process by the CPU time that it has used rather than by the clock, as other processes share the cores."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

IDLE = 0.01  # share of a core: a process that used less during a whole limit is blocked for good


def spent(pid: int) -> float:
    """The CPU seconds that a process and its child processes, such as compilers, have used."""
    found = Path(f"/proc/{pid}")
    try:
        fields = (found / "stat").read_text().rpartition(")")[2].split()
        started = [int(child) for task in found.glob("task/*/children") for child in task.read_text().split()]
    except OSError:  # the process has ended, or there is no /proc: then only the clock counts
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(spent, started))


def answers(pid: int, within: Callable[[float], bool], limit: float, stop: float = float("inf")) -> bool:
    """Whether an answer came before the process had used `limit` CPU seconds or was idle for that long, and before the
    time `stop`. `within` waits for an answer for a number of seconds."""
    before = spent(pid)
    while (left := stop - time.monotonic()) > 0:
        if within(min(limit, left)):
            return True
        now = spent(pid)
        if now - before >= limit or now - before < IDLE * limit:
            break
        limit, before = limit - (now - before), now
    return False


def output_of(command: Sequence[str], env: Mapping[str, str], limit: float, cwd: Path | None = None) -> str:
    """What a command prints. Fails if it does not succeed within so many CPU seconds."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)

        def within(seconds: float) -> bool:
            try:
                return process.wait(seconds) is not None
            except subprocess.TimeoutExpired:
                return False

        try:
            ended = answers(process.pid, within, limit)
        finally:
            process.kill()
        out.seek(0)
        said = out.read()
    assert ended, f"{command} took too long:\n{said}"
    assert process.wait() == 0, said
    return said
