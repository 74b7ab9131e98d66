"""torchvision's operators on the device, in a process of its own (test_device.py), beside formulas in plain loops.

Where torchvision is not installed, its operators are defined here after the device has been started, as by a library
that is imported later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import flambeau
from flambeau.device.fallback import reset_fallbacks
from two_devices import DEV, enabled, quiet  # noqa: F401

CONVOLUTION = ("SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
               "SymInt groups, SymInt offset_groups, bool use_mask")
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {CONVOLUTION}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@pytest.fixture(scope="module")
def tv(enabled: None) -> Iterator[Any]:  # noqa: F811
    if find_spec("torchvision"):
        import torchvision  # noqa: F401
        yield torch.ops.torchvision
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    yield torch.ops.torchvision


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    reset_fallbacks()
    yield
    assert flambeau.fallbacks() == []


def on_device(args: Any) -> list[Any]:
    return [x.to(DEV) if isinstance(x, torch.Tensor) else x for x in args]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.device.type == DEV and got.is_contiguous()
    torch.testing.assert_close(got.cpu().double(), wanted.detach(), rtol=1e-4, atol=1e-4)


def overlap(a: list[float], b: list[float]) -> float:
    width, height = (max(min(a[k + 2], b[k + 2]) - max(a[k], b[k]), 0.0) for k in (0, 1))
    area = sum((x[2] - x[0]) * (x[3] - x[1]) for x in (a, b))
    return width * height / (area - width * height)


def kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    out: list[int] = []
    at = boxes.double().tolist()
    for k in scores.sort(stable=True, descending=True)[1].tolist():
        if all(overlap(at[j], at[k]) <= threshold for j in out):
            out.append(k)
    return out


@pytest.mark.parametrize("count", [1, 13])
def test_nms(tv: Any, count: int) -> None:
    low = torch.rand(count, 2)
    boxes = torch.cat((low, low + torch.rand(count, 2)), 1)
    scores = torch.randint(0, 9, (count,)).float()  # with ties
    chain = torch.arange(count) * 0.4  # each drops the next, if it is kept
    row = torch.stack((chain, torch.zeros(count), chain + 1, torch.ones(count)), 1)
    for case in ((boxes, scores, 0.3), (row, -chain, 0.2)):
        found = tv.nms(*on_device(case))
        assert found.dtype is torch.int64 and found.tolist() == kept(*case)


def bilinear(plane: torch.Tensor, y: Any, x: Any, border: bool) -> Any:
    """Of positions at most one beyond the image: the border's value, or one on its way to zero."""
    height, width = plane.shape
    y0, x0 = (float(torch.as_tensor(at).detach()) for at in (y, x))
    if border and not (-1 <= y0 <= height and -1 <= x0 <= width):
        return 0.0
    if not border and not (-1 < y0 < height and -1 < x0 < width):
        return 0.0
    if border:
        y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
    top, left = (math.floor(torch.as_tensor(at).detach()) for at in (y, x))
    total: Any = 0.0
    for j, wy in ((top, 1 - (y - top)), (top + 1, y - top)):
        for i, wx in ((left, 1 - (x - left)), (left + 1, x - left)):
            if 0 <= j < height and 0 <= i < width:
                total = total + plane[j, i] * wy * wx
    return total


def regions(image: torch.Tensor, rois: torch.Tensor, scale: float, rows: int, columns: int, ratio: int, aligned: bool
            ) -> torch.Tensor:
    out = []
    for batch, *ends in rois.tolist():
        x1, y1, x2, y2 = (e * scale - 0.5 * aligned for e in ends)
        sizes = [(high - low if aligned else max(high - low, 1.0)) / bins
                 for low, high, bins in ((y1, y2, rows), (x1, x2, columns))]
        ny, nx = (ratio if ratio > 0 else math.ceil(n) for n in sizes)
        for plane in image[int(batch)]:
            for p in range(rows):
                for q in range(columns):
                    samples = [bilinear(plane, y1 + (p + (j + 0.5) / ny) * sizes[0],
                                        x1 + (q + (i + 0.5) / nx) * sizes[1], True)
                               for j in range(ny) for i in range(nx)]
                    out.append(sum(samples, torch.zeros((), dtype=torch.float64)) / max(ny * nx, 1))
    return torch.stack(out).reshape(len(rois), image.shape[1], rows, columns)


@pytest.mark.parametrize(("ratio", "aligned"), [(2, True), (-1, False)])
def test_roi_align(tv: Any, ratio: int, aligned: bool) -> None:
    image = torch.randn(2, 2, 7, 8, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0, 1.0, 2, 9, 8], [1, 0, 0, 5, 3], [0, -9, 3, 40, 4.5]])
    rest = (0.6, 3, 2, ratio, aligned)
    wanted = regions(image, rois, *rest)
    args = on_device((image.detach().float(), rois, *rest))
    close(tv.roi_align(*args), wanted)
    grad = torch.randn_like(wanted)
    slope, = torch.autograd.grad(wanted, image, grad)
    close(tv._roi_align_backward(grad.float().to(DEV), args[1], *rest[:3], *image.shape, *rest[3:]), slope)


def deformed(image: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor,
             stride_h: int, stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int,
             offset_groups: int, use_mask: bool) -> torch.Tensor:
    n, channels = image.shape[:2]
    outs, each, kh, kw = weight.shape
    out = []
    for b in range(n):
        for o in range(outs):
            for p in range(offset.shape[2]):
                for q in range(offset.shape[3]):
                    total: Any = bias[o]
                    for c in range(each):
                        channel = o // (outs // groups) * each + c
                        group = channel // (channels // offset_groups)
                        for tap in range(kh * kw):
                            at = group * kh * kw + tap
                            y = p * stride_h - pad_h + tap // kw * dilation_h + offset[b, 2 * at, p, q]
                            x = q * stride_w - pad_w + tap % kw * dilation_w + offset[b, 2 * at + 1, p, q]
                            factor = mask[b, at, p, q] if use_mask else 1.0
                            total = total + weight[o, c, tap // kw, tap % kw] * factor * bilinear(
                                image[b, channel], y, x, False)
                    out.append(total)
    return torch.stack(out).reshape(n, outs, *offset.shape[2:])


@pytest.mark.parametrize("use_mask", [True, False])
def test_deform_conv2d(tv: Any, use_mask: bool) -> None:
    geometry = (2, 1, 1, 0, 1, 2, 2, 2 if use_mask else 1, use_mask)
    sizes = ((1, 4, 5, 6), (2, 2, 2, 2), (1, 16 if use_mask else 8, 3, 4), (1, 8, 3, 4) if use_mask else (1, 1), (2,))
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    wanted = deformed(*given, *geometry)
    args = on_device([x.detach().float() for x in given])
    close(tv.deform_conv2d(*args, *geometry), wanted)
    grad = torch.randn_like(wanted)
    slopes = torch.autograd.grad(wanted, given, grad, allow_unused=True, materialize_grads=True)
    found = tv._deform_conv2d_backward(grad.float().to(DEV), *args, *geometry)
    for a, b in zip(found, slopes, strict=True):
        close(a, b)
