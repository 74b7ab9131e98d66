"""Fake tensors, with which torch traces, and the tracing context."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.source import ConstantSource
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = ["CompileContext", "ConstantSource", "FakeScriptObject", "FakeTensor", "FakeTensorMode", "FunctionalTensor",
           "TracingContext", "detect_fake_mode", "fixes_floats", "forget_shapes", "quiet_traces",
           "unset_fake_temporarily"]

LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def quiet_traces() -> Iterator[None]:
    """Silence torch's log for operators that cannot be traced with symbols, as the caller then tries another way."""
    before, LOG.disabled = LOG.disabled, True
    try:
        yield
    finally:
        LOG.disabled = before


def forget_shapes(ops: Collection[Any]) -> None:
    """Drop the cached results of these operators, which fake tensors keep for all modes."""
    known = FakeTensorMode.cache
    for key in [k for k in list(known) if k.key[0] in ops]:
        known.pop(key, None)


def fixes_floats(mode: FakeTensorMode | None) -> bool:
    """Whether guards fix floats among a graph's arguments, or bound them."""
    env = mode.shape_env if mode is not None else None
    return env is not None and any(symbol_is_type(s, SymT.FLOAT) for g in env.guards for s in g.expr.free_symbols)
