"""What a commit draws: the sample of the slow tests, and the seeds of random programs."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache
def commit() -> str:
    """The commit that is tested; a fixed name where there is no history."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() if done.returncode == 0 else "15"


def first_seed() -> int:
    """Another one with every commit."""
    return int(commit()[:7], 16) * 1000
