"""Changes to Dynamo that make calls of compiled functions shorter (`short_calls.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .patch import Change, Patch

__all__ = ["CALLS", "DISABLED", "READINGS"]


def _calls(ours: Callable[..., Any]) -> Iterator[Change]:
    from torch._dynamo.eval_frame import OptimizeContext

    from .short_calls import short_call

    full = OptimizeContext.__call__

    def __call__(self: Any, fn: Any) -> Any:
        wrapped = full(self, fn)
        return short_call(self, wrapped) if ours(self.callback) is not None else wrapped

    yield OptimizeContext, "__call__", __call__


def _disabled() -> Iterator[Change]:
    from torch._dynamo.eval_frame import DisableContext

    from .short_calls import disabled

    full = DisableContext.__call__
    yield DisableContext, "__call__", lambda self, fn: disabled(full, self, fn)


def _readings() -> Iterator[Change]:
    from torch._dynamo import utils

    from .short_calls import READINGS, short_reading

    for name, method in READINGS.items():
        yield utils, name, short_reading(vars(utils)[name], method)


CALLS = Patch(
    "calls", "`OptimizeContext.__call__` of Dynamo",
    "the code that torch.compile puts around a function takes 12 us per call, 40 with `dynamic=True`, and backends "
    "cannot replace it. Without this, calls take that much longer",
    'from the first `torch.compile(backend="flambeau")` on', _calls, lasting=True)
DISABLED = Patch(
    "disabled", "`DisableContext.__call__` of Dynamo",
    "the wrapper that Dynamo puts around a backend's function takes 1 us per call, and our functions do what is needed "
    "of it themselves. Without this, calls take that much longer",
    'from the first `torch.compile(backend="flambeau")` on', _disabled, lasting=True)
READINGS = Patch(
    "readings", "`call_size`, `call_stride` and `call_storage_offset` in `torch._dynamo.utils`",
    "each size of a symbolic shape takes 2 us per call, because Dynamo is turned off and on to read it. Without this, "
    "calls take that much longer",
    'from the first `torch.compile(backend="flambeau")` on', _readings, lasting=True)
