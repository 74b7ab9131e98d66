"""Makes eager use kernels that add in the same order every time, so that its results are repeatable.

    again, refused = warned(run)       # `refused`: torch has no such kernel for an operator of the run
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def one_order(warn_only: bool = True) -> Iterator[None]:
    """Inside the block, torch uses kernels that add in a fixed order. Where it has none, it warns, or raises."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def in_one_order(run: Callable[[], T]) -> T:
    """Runs with deterministic kernels, first in strict mode: with warnings only, torch's attention is not
    deterministic. If torch refuses an operator in strict mode, runs again with warnings only."""
    try:
        with one_order(warn_only=False):
            return run()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
    with one_order():
        return run()


def warned(run: Callable[[], T]) -> tuple[T, bool]:
    """The result with deterministic kernels, and whether torch warned that an operator has no such kernel."""
    with one_order(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = run()
    return result, any("deterministic" in str(w.message) for w in said)
