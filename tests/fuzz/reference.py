"""The float64 result of a program, and how far it moves if every operator is off by one rounding."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .program import FLOATS, Program, tracked
from .seen import Call, call

# Operators that move or choose values: they do not round, and noise would break ties.
_QUIET = {"clone", "copy", "copy_", "_to_copy", "where", "gather", "index", "index_select", "index_put", "index_put_",
          "scatter", "scatter_", "fill", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "sort", "topk",
          "argmax", "argmin", "max", "min", "amax", "amin", "aminmax", "maximum", "minimum", "fmax", "relu", "abs",
          "neg", "neg_", "gt", "lt", "ge", "le", "eq", "ne", "sign", "sgn", "floor", "ceil", "round", "trunc",
          "logical_not", "logical_and", "logical_or", "logical_xor", "any", "all", "isnan", "isclose", "cat", "stack",
          "constant_pad_nd", "flip", "roll", "repeat", "tril", "triu", "masked_fill", "masked_fill_", "index_fill_",
          "index_fill", "cummax", "cummin", "_cummax_helper", "_cummin_helper", "signbit", "heaviside", "clamp",
          "threshold_backward", "max_pool2d_with_indices", "adaptive_max_pool2d", "median", "kthvalue", "detach",
          "take", "bucketize", "slice_scatter", "select_scatter", "diagonal_scatter", "select_backward",
          "slice_backward", "new_zeros", "zeros", "empty", "full", "index_copy_", "index_copy", "scatter_reduce",
          "count_nonzero", "nonzero", "fill_diagonal_", "empty_like", "new_empty_strided", "embedding"}


class Noise(TorchDispatchMode):
    """A mode that multiplies the operands and results of each operator that rounds by 1 + eps or 1 - eps, at random."""

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps = eps
        self.generator = torch.Generator().manual_seed(seed)

    def off(self, t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        sign = torch.randint(0, 2, t.shape, generator=self.generator) * 2 - 1
        return t * (1 + sign * self.eps)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        mutates = any(a.alias_info is not None for a in func._schema.arguments)
        if mutates or func.is_view or name in _QUIET:
            out = func(*args, **(kwargs or {}))
            if name.rstrip("_") != name and name not in _QUIET and isinstance(out, Tensor) and out.is_floating_point():
                with torch.no_grad(), suppress(RuntimeError):  # torch refuses to write to memory that overlaps
                    out.copy_(self.off(out))
            return out
        out = func(*(self.off(a) if not isinstance(a, list | tuple) else type(a)(map(self.off, a)) for a in args),
                   **(kwargs or {}))
        return type(out)(map(self.off, out)) if isinstance(out, list | tuple) else self.off(out)


@dataclass
class Reference:
    """The float64 run of a program at one of its sizes, made when it is first needed."""

    program: Program
    sizes: Mapping[str, int]
    _run: Call | None = None
    _noise: list[Call] | None = None

    def _call(self, *modes: Any) -> Call:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with ExitStack() as stack:
                for m in modes:
                    stack.enter_context(m)
                function = copying(self.program, self.sizes).function(is_wide=True)
                return call(self.program, function, self.sizes, is_wide=True)
        finally:
            torch.set_default_dtype(before)

    def value(self, group: str, k: int) -> Tensor | None:
        self._run = self._run or self._call()
        return _of(self._run, group, k)

    def noise(self, group: str, k: int) -> Tensor | None:
        """The elementwise change of the value if every operator is off by one rounding error."""
        if self._noise is None:
            eps = max((torch.finfo(d).eps for d in _float_dtypes(self.program, self.sizes)), default=2e-16)
            self._noise = [self._call(Noise(eps, s)) for s in range(10)]
        exact = self.value(group, k)
        moved = [_of(c, group, k) for c in self._noise]
        if exact is None or any(m is None or m.shape != exact.shape for m in moved):
            return None
        return torch.stack([(m - exact).abs() for m in moved if m is not None]).amax(0)


def copying(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program with a clone after each change of dtype that copies: in double precision the change would return its
    input."""
    try:
        env = tracked(program, sizes).env
    except Exception:
        return program
    steps = []
    for s in program.steps:
        if s.name in ("casts", "roundings") and s.makes and env[s.makes[0]].untyped_storage()._cdata not in {
                env[n].untyped_storage()._cdata for n in s.reads if isinstance(env[n], Tensor)}:
            s = replace(s, text=f"{s.text}.clone()")
        steps.append(s)
    return replace(program, steps=tuple(steps))


def _float_dtypes(program: Program, sizes: Mapping[str, int]) -> set[torch.dtype]:
    try:
        env = tracked(program, sizes).env
    except Exception:
        return set(FLOATS)
    return {v.dtype for v in env.values() if isinstance(v, Tensor) and v.dtype in FLOATS}


def _of(c: Call, group: str, k: int) -> Tensor | None:
    if c.error is not None:
        return None
    if group == "memory":
        return c.memory[k] if k < len(c.memory) else None
    row = (c.results if group == "result" else c.gradients)[k:k + 1]
    return row[0].value if row and row[0] is not None else None
