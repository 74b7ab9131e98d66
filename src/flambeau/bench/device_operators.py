"""Measures memory-bound operators of the device against a copy and, if the device is a CPU, against PyTorch's CPU.

    flambeau bench device

Every result is compared with the CPU's before it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.bench.floors import FloorRow
from flambeau.bench.harness import alternate, clock_of, message
from flambeau.device.enable import enable_device
from flambeau.device.torch_module import NAME
from flambeau.targets.opencl.device import devices

SIDES = {"full": 8192, "small": 1536, "tiny": 64}  # sides of the square matrices
ROUNDS, SECONDS = 9, 0.05  # measurements of a call; seconds of consecutive calls that make one
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}


class Case(NamedTuple):
    group: str
    name: str
    moved: float  # bytes, in units of a float32 matrix
    call: Callable[[Tensor, Tensor, Tensor], Any]


def image(x: Tensor) -> Tensor:
    side = x.shape[0] // 16
    return x.reshape(-1, 8, side, side)


def norm_gradients(x: Tensor, y: Tensor) -> Any:
    size = [x.shape[1]]
    _, mean, scale = torch.native_layer_norm(x, size, y[0], y[1], 1e-5)
    return torch.ops.aten.native_layer_norm_backward(x, y, size, mean, scale, y[0], y[1], [True, True, True])


# Functions of two square matrices and one for the result.
CASES = (
    Case("map", "copy", 2, lambda x, y, o: o.copy_(x)),
    Case("map", "add", 3, lambda x, y, o: torch.add(x, y, out=o)),
    Case("map", "mul by a number", 2, lambda x, y, o: torch.mul(x, 2.0, out=o)),
    Case("map", "relu", 2, lambda x, y, o: torch.relu(x)),
    Case("map", "gelu", 2, lambda x, y, o: F.gelu(x)),
    Case("map", "sigmoid", 2, lambda x, y, o: torch.sigmoid(x)),
    Case("map", "add a row", 2, lambda x, y, o: x + y[0]),
    Case("map", "greater", 2.25, lambda x, y, o: x > y),
    Case("map", "add, off by one", 3, lambda x, y, o: x.view(-1)[1:] + y.view(-1)[1:]),
    Case("layout", "transposed copy", 2, lambda x, y, o: x.t().contiguous()),
    Case("layout", "heads to rows", 2, lambda x, y, o: x.view(8, -1, 64, 8).transpose(1, 2).contiguous()),
    Case("layout", "to channels last", 2, lambda x, y, o: image(x).contiguous(memory_format=torch.channels_last)),
    Case("rows", "softmax", 2, lambda x, y, o: x.softmax(1)),
    Case("rows", "log_softmax", 2, lambda x, y, o: x.log_softmax(1)),
    Case("rows", "layer_norm", 2, lambda x, y, o: F.layer_norm(x, (x.shape[1],), y[0], y[1])),
    Case("rows", "layer_norm and gradients", 5, lambda x, y, o: norm_gradients(x, y)),
    Case("reduction", "sum of rows", 1, lambda x, y, o: x.sum(1)),
    Case("reduction", "sum of columns", 1, lambda x, y, o: x.sum(0)),
    Case("reduction", "sum", 1, lambda x, y, o: x.sum()),
    Case("reduction", "places of maxima", 1, lambda x, y, o: x.argmax(1)),
    Case("scan", "cumsum of rows", 2, lambda x, y, o: x.cumsum(1)),
    Case("scan", "cumsum of columns", 2, lambda x, y, o: x.cumsum(0)),
    Case("scan", "cummax of rows", 4, lambda x, y, o: x.cummax(1)),
    Case("pooling", "max_pool2d 2", 1.25, lambda x, y, o: F.max_pool2d(image(x), 2)),
    Case("pooling", "max_pool2d 3/2/1", 1.25, lambda x, y, o: F.max_pool2d(image(x), 3, 2, 1)),
    Case("pooling", "avg_pool2d 3/1/1", 2, lambda x, y, o: F.avg_pool2d(image(x), 3, 1, 1)),
)


def measure(only: str | None, size: str, console: Callable[[Sequence[Case]], Iterator[Case]] = iter,
            ) -> Iterator[FloorRow]:
    enable_device()
    side = SIDES[size]
    host = [torch.randn(side, side, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    there = [x.to(NAME) for x in host]
    bandwidth = 0.0
    for case in console([s for s in CASES if not only or only in f"{s.group} {s.name}" or s.name == "copy"]):
        row = FloorRow(case.name, case.group, "forward", int(case.moved * 4 * side * side))
        try:
            check(case, there, host)
            # On the same cores PyTorch's CPU device is the peer.
            peers = {"flambeau": there} | ({"cpu": host} if devices()[0].is_cpu else {})
            calls = {name: partial(case.call, *tensors) for name, tensors in peers.items()}
            times = alternate(calls, 0.0, (ROUNDS, ROUNDS), 1, clock_of(NAME), burst=SECONDS)
            row.seconds = {name: statistics.median(taken) for name, taken in times.items()}
        except Exception as error:
            row.errors["flambeau"] = message(error)
        else:
            bandwidth = bandwidth or row.bytes / row.seconds["flambeau"]
            row.floor = row.bytes / bandwidth
        yield row


def check(case: Case, there: list[Tensor], host: list[Tensor]) -> None:
    got, want = ([t.cpu() for t in (r if isinstance(r, tuple) else (r,))] for r in (
        case.call(*there), case.call(*host)))
    for x, y in zip(got, want, strict=True):
        close = TOLERANCE.get(y.dtype, 0.0)
        # Long sums are compared relative to the largest value.
        torch.testing.assert_close(x, y, rtol=close, atol=close * float(y.abs().max()) if close else 0.0)
