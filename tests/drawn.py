"""Derives random choices from the commit: the sample of slow tests, and the seeds of random programs."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache
def commit() -> str:
    """The hash of the tested commit; a fixed number if there is no history."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() if done.returncode == 0 else "15"


def first_seed() -> int:
    """The first seed of random programs, different for each commit."""
    return int(commit()[:7], 16) * 1000
