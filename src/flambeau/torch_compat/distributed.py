"""Process groups written in Python: the objects that their calls return."""

from __future__ import annotations

from torch._C._distributed_c10d import Work
from torch._C._distributed_c10d import _create_work_from_future as work_from_future  # type: ignore[attr-defined]

__all__ = ["Work", "work_from_future"]
