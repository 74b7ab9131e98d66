"""Torch's profiler: the ranges that cost a microsecond. `record_function`, the public ones, cost ten."""

from __future__ import annotations

from torch._C._profiler import _RecordFunctionFast as record_range

__all__ = ["record_range"]
