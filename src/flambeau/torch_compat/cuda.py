"""CUDA devices, streams and memory pools, as C functions. torch without CUDA has none of them.

Each launch queries device and stream: torch.cuda's Python functions take some 0.5 us each, these a tenth of that.
"""

from __future__ import annotations

from typing import Any

import torch

NAMES = {
    "get_device": "_cuda_getDevice",
    "current_raw_stream": "_cuda_getCurrentRawStream",
    "exchange_device": "_cuda_exchangeDevice",
    "maybe_exchange_device": "_cuda_maybeExchangeDevice",
    "is_current_stream_capturing": "_cuda_isCurrentStreamCapturing",
    # A failed recording leaves its memory pool open, and torch.cuda.graphs does not close it.
    "end_allocate_to_pool": "_cuda_endAllocateToPool",
    "release_pool": "_cuda_releasePool",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch._C, NAMES[name])


def sleep(cycles: int) -> None:
    """Make the current stream wait."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
