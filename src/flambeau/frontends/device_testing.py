"""PyTorch's operator database on the device: samples, forward and gradient, beside the CPU, and what ran there.

    python -m flambeau.frontends.device_testing [name-part ...] [--limit N] [--dtype float32]

The judge is the CPU in the same dtype at torch's own tolerances, or its error; where the two differ in rounding alone,
the float64 result decides. An entry is native if nothing of it was computed by fallback.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from .device import enable_device
from .device_module import NAME
from .device_random import DRAWS
from .fallback import fallbacks, reset_fallbacks
from .testing import OPS, no_further, tolerance


@dataclass
class DeviceReport:
    op: str
    dtype: torch.dtype
    samples: int = 0
    gradients: int = 0
    failures: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def native(self) -> bool:
        return self.samples > 0 and not self.fallbacks


def check_on_device(name: str, dtype: torch.dtype = torch.float32, limit: int | None = None,
                    grad: bool = True) -> DeviceReport:
    """Every sample input (or the first `limit`) of the op_db entry `name` in `dtype`."""
    enable_device()
    op, report = OPS[name], DeviceReport(name, dtype)
    wants_grad = grad and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") \
        and dtype.is_floating_point
    torch.manual_seed(1234)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=wants_grad))[:limit]
    reset_fallbacks()
    for sample in samples:
        report.samples += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _compare(op, sample, wants_grad, report)
        except Exception as error:
            report.failures.append(f"{str(sample)[:160]}: {type(error).__name__}: {str(error)[:600]}")
    report.fallbacks = {row.operator: row.calls for row in fallbacks()}
    return report


# ---- one sample ------------------------------------------------------------------------------------------


def _compare(op: OpInfo, sample: SampleInput, wants_grad: bool, report: DeviceReport) -> None:
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
    exact: Any = None
    for part, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert len(a) == len(b), f"{len(a)} results, the CPU has {len(b)}"
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            where = f"{'gradient' if part else 'output'} {k}"
            if not isinstance(y, torch.Tensor) or not isinstance(x, torch.Tensor):
                assert x == y, f"{where}: {x}, the CPU has {y}"
                continue
            assert x.shape == y.shape and x.dtype == y.dtype, \
                f"{where}: {x.dtype}{list(x.shape)}, the CPU {y.dtype}{list(y.shape)}"
            if drawn or "empty" in op.name:
                continue  # other numbers than the CPU's by design
            try:
                torch.testing.assert_close(x.cpu(), y, equal_nan=True, check_layout=False,
                                           **tolerance(op, y.dtype))  # type: ignore[arg-type]
            except AssertionError as error:
                if not y.is_floating_point():
                    raise AssertionError(f"{where}: {error}") from None
                exact = exact or _evaluate(op, sample, "cpu", wants_grad, torch.float64)
                if not no_further(x.cpu(), y, exact[part][k]):
                    raise AssertionError(f"{where}: {error}") from None


# Operators that take sizes out of a tensor, which is on the CPU everywhere.
_SIZES_ON_CPU = ("tensor_split",)


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
        moved = _as_it_lies(x.detach(), device)
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
    differentiable = [o for o in results if isinstance(o, torch.Tensor) and o.requires_grad]
    grads: list[Any] = []
    if wants_grad and differentiable and leaves:
        draw = torch.Generator().manual_seed(3)
        seeds = [torch.randn(o.shape, generator=draw, dtype=torch.float64).to(o.dtype).to(o.device)
                 for o in differentiable]
        grads = list(torch.autograd.grad(differentiable, leaves, seeds, allow_unused=True))
    return [o.detach() if isinstance(o, torch.Tensor) else o for o in results], grads


def _as_it_lies(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy elsewhere with the same strides, if those have no overlaps."""
    if x.layout is not torch.strided:
        return x.clone().to(device)
    if x.numel() == 0 or min(x.stride(), default=1) <= 0:
        return x.clone().to(device)
    if x.is_conj() or x.is_neg():
        return x.to(device) if device != "cpu" else x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


# ---- the table -------------------------------------------------------------------------------------------


def entries(parts: list[str], dtype: torch.dtype) -> Iterator[str]:
    for name, op in OPS.items():
        if dtype in op.supported_dtypes("cpu") and (not parts or any(part in name for part in parts)):
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; none: every entry")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=2, help="samples of each entry")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th entry from the k-th on")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    logging.getLogger("flambeau.frontends.fallback").setLevel(logging.ERROR)
    dtype: torch.dtype = getattr(torch, a.dtype)
    k, n = map(int, a.part.split("/"))
    reports: list[DeviceReport] = []
    for name in list(entries(a.names, dtype))[k::n]:
        start = time.perf_counter()
        report = check_on_device(name, dtype, a.limit)
        reports.append(report)
        print(f"{'ok  ' if report.ok else 'FAIL'} {'native  ' if report.native else 'fallback'} {name} "
              f"samples={report.samples} gradients={report.gradients} {report.fallbacks or ''} "
              f"{time.perf_counter() - start:.1f}s", flush=True)
        for text in report.failures[:2]:
            print("     ", text.replace("\n", " ")[:500], flush=True)
        if a.json:
            rows = [{"op": r.op, "ok": r.ok, "native": r.native, "samples": r.samples, "fallbacks": r.fallbacks}
                    for r in reports]
            a.json.write_text(json.dumps(rows, indent=1))
    right, native = sum(r.ok for r in reports), sum(r.ok and r.native for r in reports)
    print(f"{len(reports)} entries, {right} right, {native} of them without fallback")


if __name__ == "__main__":
    main()
