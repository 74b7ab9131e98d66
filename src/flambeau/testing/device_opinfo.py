"""Runs OpInfo samples on the device, forward and gradient, and compares them with the CPU.

    python -m flambeau.testing.device_opinfo [name-part ...] [--limit N] [--dtype float32]

The judge is the CPU in the same dtype at torch's own tolerances, or its error; where the two differ in rounding alone,
the float64 result decides. An entry is native if nothing of it was computed by fallback.py.
"""

from __future__ import annotations

import logging
import warnings
from functools import cache
from typing import Any

import torch

from flambeau.device.enable import enable_device
from flambeau.device.fallback import fallbacks, reset_fallbacks
from flambeau.device.random_state import DRAWS
from flambeau.device.torch_module import NAME
from flambeau.runtime.memory_layout import copied
from flambeau.torch_compat import pytree
from flambeau.torch_compat.testing import OpInfo, SampleInput

from .opinfo import OPS, PARTS, Report, gradients, is_undefined, judge, print_table, samples_of

# Operators that read sizes from a tensor argument, which stays on the CPU for all devices.
_SIZES_ON_CPU = ("tensor_split",)


def check_on_device(name: str, dtype: torch.dtype = torch.float32, limit: int | None = None,
                    device: str = "cpu") -> Report:
    """Runs all sample inputs (or the first `limit`) of the op_db entry `name` in `dtype`, as drawn for `device`."""
    enable_device()
    op, report = OPS[name], Report(name, dtype)
    samples, wants_grad = samples_of(op, dtype, limit, device)
    reset_fallbacks()
    for sample in samples:
        report.samples += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _compare(op, sample, wants_grad, report)
        except Exception as error:
            report.failures.append(f"{str(sample)[:160]}: {type(error).__name__}: {str(error)[:600]}")
    report.externs = {row.operator: row.calls for row in fallbacks()}
    return report


def _compare(op: OpInfo, sample: SampleInput, wants_grad: bool, report: Report) -> None:
    try:
        expected: Any = _evaluate(op, sample, "cpu", wants_grad)
    except Exception as error:
        try:
            _evaluate(op, sample, NAME, wants_grad)
        except Exception as ours:
            assert isinstance(ours, RuntimeError | type(error)), f"{type(ours).__name__}: {ours}; the CPU: {error}"
            return
        raise AssertionError(f"no error; the CPU: {error}") from None
    before = DRAWS.total()
    got = _evaluate(op, sample, NAME, wants_grad)
    drawn = DRAWS.total() > before
    report.gradients += bool(got[1])
    wide = cache(lambda: _evaluate(op, sample, "cpu", wants_grad, torch.float64))
    for part, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert len(a) == len(b), f"{len(a)} results, the CPU has {len(b)}"
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            where = f"{PARTS[part]} {k}"
            if not isinstance(y, torch.Tensor) or not isinstance(x, torch.Tensor):
                assert x == y, f"{where}: {x}, the CPU has {y}"
                continue
            assert x.shape == y.shape and x.dtype == y.dtype, \
                f"{where}: {x.dtype}{list(x.shape)}, the CPU {y.dtype}{list(y.shape)}"
            # Random numbers differ from the CPU's by design.
            if not (drawn or "empty" in op.name or is_undefined(op, report.dtype, part, k)):
                judge(op, x.cpu(), y, wide, part, k)


def _evaluate(op: OpInfo, sample: SampleInput, device: str, wants_grad: bool,
              dtype: torch.dtype | None = None) -> tuple[list[Any], list[Any]]:
    """(results, gradients for fixed output gradients) on a device."""
    leaves: list[torch.Tensor] = []

    def there(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device(device)
        if isinstance(x, str) and x == "cpu":
            return device
        if dtype is not None and isinstance(x, torch.dtype) and x.is_floating_point:
            return dtype
        if not isinstance(x, torch.Tensor) or (op.name in _SIZES_ON_CPU and x is not sample.input):
            return x
        marked = x.is_conj() or x.is_neg()  # `to` keeps the view a view
        moved = x.detach().to(device) if marked else copied(x, device=device)
        if dtype is not None and x.is_floating_point():
            moved = moved.to(dtype)
        if x.requires_grad and wants_grad:
            leaves.append(moved.requires_grad_())
        return moved

    first, args, kwargs = pytree.tree_map(there, (sample.input, sample.args, sample.kwargs))
    if wants_grad and isinstance(sample.input, torch.Tensor) and sample.input.requires_grad:
        first = leaves[0]
    torch.manual_seed(7)
    results = list(pytree.tree_leaves(op(first, *args, **kwargs)))
    tensors = [o for o in results if isinstance(o, torch.Tensor)]
    grads = gradients(tensors, leaves, [o.dtype for o in tensors]) if wants_grad else []
    return [o.detach() if isinstance(o, torch.Tensor) else o for o in results], grads


if __name__ == "__main__":
    logging.getLogger("flambeau.device.fallback").setLevel(logging.ERROR)
    print_table(check_on_device, __doc__.partition("\n")[0], limit=2, device=NAME)
