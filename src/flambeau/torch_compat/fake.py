"""Tensors without data, with which torch traces, and what is known while it does."""

from __future__ import annotations

from torch._dynamo.source import ConstantSource
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = ["CompileContext", "ConstantSource", "FakeTensor", "FakeTensorMode", "FunctionalTensor", "TracingContext",
           "detect_fake_mode", "unset_fake_temporarily"]
