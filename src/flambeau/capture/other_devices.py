"""Handles tensors of a graph that are on other devices than the graph itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flambeau.ir import build
from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import const
from flambeau.ir.index import Index
from flambeau.ir.nodes import Host, Value
from flambeau.runtime.launch_plan import laid_out, on_device


class Elsewhere:
    """The values that are not on the graph's device: kernels cannot read them, but calls can."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: set[str] = set()
        self._numbers: dict[str, Any] = {}  # values of constants with one element
        self._brought: dict[str, Value] = {}

    def __contains__(self, v: Value) -> bool:
        return v.buffer in self._buffers

    def note(self, v: Value | None, t: torch.Tensor | None) -> None:
        """Record that v stands for the tensor t, if t is on another device."""
        if v is not None and t is not None and t.device != self.device:
            self._buffers.add(v.buffer)

    def note_number(self, v: Value, number: Any) -> None:
        self._buffers.add(v.buffer)
        self._numbers[v.buffer] = number

    def is_constant(self, v: Value) -> bool:
        return v.buffer in self._numbers

    def brought(self, x: Any) -> Any:
        """Make a scalar readable for kernels; any other argument is returned unchanged."""
        if not isinstance(x, Value) or x not in self:
            return x
        if x.buffer in self._numbers:
            return replace(build.pointwise(x.shape, lambda _: const(self._numbers[x.buffer], x.dtype)), host=True)
        g = build.graph()
        if x.buffer in g.inputs and (not is_float(x.dtype) or torch.float64 in g.capabilities.dtypes):
            text = f"word({x.buffer}.item())" if is_float(x.dtype) else f"int({x.buffer}.item())"
            return replace(build.run_number(Host(text, frozenset((x.buffer,))), x.dtype), host=True)
        if x.buffer not in self._brought:
            made, = build.extern(on_device, (x, self.device), {}, [((), x.dtype, ())])
            assert made is not None
            self._brought[x.buffer] = replace(made, host=True)
        return self._brought[x.buffer]

    def copied(self, v: Value, strides: tuple[Index, ...]) -> Value:
        """Copy v to new memory with these strides, on its own device."""
        made, = build.extern(laid_out, (v, strides), {}, [(v.shape, v.dtype, strides)])
        assert made is not None
        self._buffers.add(made.buffer)
        return made
