"""torchvision's operators on the device: nms, roi_align and deform_conv2d, with gradients.

Kernels may be registered before a library defines its operators, so nothing waits for the import of torchvision. The
formulas are written with PyTorch's operators. Calls with the same arguments except for tensor contents share one graph,
compiled once, in which intermediates are fused where possible. Gradients are those of the formulas. The number of boxes
changes with every image, so boxes are padded to a power of two, and a few programs serve all images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flambeau.eager.one_call import build, described
from flambeau.eager.operator_forms import OperatorForm
from flambeau.errors import CompileError, UnsupportedError
from flambeau.runtime.launch_plan import Run
from flambeau.runtime.placement import flat
from flambeau.torch_compat.dispatch import DisableAutocast, disable_current_modes

from ..fallback import REASONS
from ..python_kernels import private

log = logging.getLogger(__name__)

LIBRARY = "torchvision"
MANY = 1 << 14  # boxes: for more than this, the table of pairs would take too much memory
LEAST = 16  # boxes: a program has room for at least this many
ROUNDS = 4  # of suppression, before a check on the host whether they were enough


# ---- boxes -----------------------------------------------------------------------------------------------


def nms(op: Any, boxes: Tensor, scores: Tensor, threshold: float) -> Any:
    """Drop a box if a kept box with a higher score overlaps it by more than the threshold.

    The first box is kept. Each round decides at least one more box, and usually all that do not depend on each other.
    """
    count = boxes.shape[0]
    if boxes.dim() != 2 or boxes.shape[1] != 4 or scores.shape != (count,) or not 0 < count <= MANY:
        return NotImplemented
    marked = filled(torch.cat((boxes, torch.ones_like(boxes[:, :1])), 1), 0)
    found = fused(op, pairs, marked, filled(scores, -math.inf), threshold)
    if found is NotImplemented:
        return found
    order, drops, kept = found
    changed = True
    while changed:
        kept, more = fused(op, suppressed, drops, kept, threshold)
        changed = bool(more.item())
    places, left = fused(op, compacted, order, kept, threshold)
    return places[:int(left.item())].clone()


def pairs(boxes: Tensor, scores: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """The order by score; a table of which box would drop which; and a flag for each box. Box 0 drops padding boxes."""
    order = scores.sort(stable=True, descending=True)[1]
    x1, y1, x2, y2, real = boxes.index_select(0, order).unbind(1)
    area = (x2 - x1) * (y2 - y1)
    width, height = ((torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp_min(0)
                     for low, high in ((x1, x2), (y1, y2)))
    shared = width * height
    number = torch.arange(boxes.shape[0], device=boxes.device)
    drops = (shared / (area[:, None] + area - shared) > threshold) & (number[:, None] < number)
    return order, drops | (number[:, None] == 0) & (real == 0), torch.ones_like(number, dtype=torch.bool)


def suppressed(drops: Tensor, kept: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Run some rounds of suppression; returns the kept boxes, and whether the last round changed anything."""
    before = kept
    for _ in range(ROUNDS):
        before, kept = kept, ~(drops & kept[:, None]).any(0)
    return kept, (kept != before).any()


def compacted(order: Tensor, kept: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The indices of the kept boxes, and their number. The extra place at the end receives all dropped ones."""
    number = kept.to(torch.int64).cumsum(0)
    place = torch.where(kept, number - 1, order.shape[0])
    return order.new_zeros(order.shape[0] + 1).scatter(0, place, order), number[-1]


def filled(x: Tensor, value: float) -> Tensor:
    """Pad the first dimension to a power of two."""
    size = max(LEAST, 1 << max(x.shape[0] - 1, 0).bit_length())
    out = x.new_full((size, *x.shape[1:]), value)
    out[:x.shape[0]].copy_(x)
    return out


# ---- regions ---------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def region_sizes(rois: Tensor, scale: float, aligned: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The start and the length of each region, along rows first and then columns."""
    ends = (wide(rois)[:, 1:] * scale - (0.5 if aligned else 0.0)).unbind(1)
    starts, lengths = [ends[1], ends[0]], [ends[3] - ends[1], ends[2] - ends[0]]
    return starts, lengths if aligned else [n.clamp_min(1) for n in lengths]


def roi_align(image: Tensor, rois: Tensor, scale: float, rows: int, columns: int, ratio: int, aligned: bool,
              samples: tuple[int, int]) -> Tensor:
    """The mean of bilinear samples in each bin of a region; `samples`: per axis, those of the largest bin."""
    starts, lengths = region_sizes(rois, scale, aligned)
    channel = torch.arange(image.shape[1], device=image.device)
    batch = rois[:, 0].to(torch.int64)
    axes, count = [], None
    for start, length, bins, most, size in zip(starts, lengths, (rows, columns), samples, image.shape[2:], strict=True):
        bin_size = length / bins
        number = torch.full_like(length, ratio) if ratio > 0 else torch.ceil(bin_size)
        place = torch.arange(most, device=image.device)
        at = start[:, None, None] + torch.arange(bins, device=image.device)[:, None] * bin_size[:, None, None] + (
            place + 0.5) * (bin_size / number)[:, None, None]
        counts = (at >= -1) & (at <= size) & (place < number[:, None, None])
        at = torch.where(counts, at.clamp(0, size - 1), 0)
        low = at.to(torch.int64)
        part = at - low
        axes.append([(low, torch.where(counts, 1 - part, 0)), ((low + 1).clamp_max(size - 1),
                                                               torch.where(counts, part, 0))])
        count = number if count is None else count * number
    total: Any = 0
    for y, wy in axes[0]:
        for x, wx in axes[1]:
            read = image[batch[:, None, None, None, None, None], channel[:, None, None, None, None],
                         y[:, None, :, None, :, None], x[:, None, None, :, None, :]]
            total = total + wide(read) * wy[:, None, :, None, :, None] * wx[:, None, None, :, None, :]
    assert count is not None
    return (total.sum((-1, -2)) / count.clamp_min(1)[:, None, None, None]).to(image.dtype)


def roi_align_backward(grad: Tensor, rois: Tensor, scale: float, rows: int, columns: int, batch: int, channels: int,
                       height: int, width: int, ratio: int, aligned: bool, samples: tuple[int, int]) -> Tensor:
    def forward(image: Tensor) -> Tensor:
        return roi_align(image, rois, scale, rows, columns, ratio, aligned, samples)

    return gradients(forward, grad, grad.new_zeros((batch, channels, height, width)))[0]


def gradients(forward: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(forward(*leaves), leaves, grad)


def most_samples(op: Any, args: tuple[Any, ...], rois: Tensor, *rest: Any) -> tuple[int, int]:
    """The number of samples per axis, rounded up to a power of two so that other regions can use the same kernel."""
    *_, ratio, _ = rest
    if ratio > 0:
        return ratio, ratio
    found = fused(op, region_samples, *args)
    most = (1, 1) if found is NotImplemented else found[0].tolist()
    height, width = (1 << max(int(n) - 1, 0).bit_length() for n in most)
    return height, width


def region_samples(*args: Any) -> Tensor:
    _, rois, scale, rows, columns, *_, aligned = args
    lengths = region_sizes(rois, scale, aligned)[1]
    return torch.stack([torch.ceil(n / bins).amax() for n, bins in zip(lengths, (rows, columns), strict=True)])


def align(op: Any, image: Tensor, rois: Tensor, *rest: Any) -> Any:
    if not rois.shape[0]:
        return NotImplemented
    args = (image, filled(rois, 0), *rest)
    out = fused(op, partial(roi_align, samples=most_samples(op, args, *args[1:])), *args)
    return out if out is NotImplemented else out[0][:rois.shape[0]].clone()


def align_backward(op: Any, grad: Tensor, rois: Tensor, *rest: Any) -> Any:
    if not rois.shape[0]:
        return NotImplemented
    args = (filled(grad, 0), filled(rois, 0), *rest)
    out = fused(op, partial(roi_align_backward, samples=most_samples(op, args, *args[1:])), *args)
    return only(out)


# ---- deformable convolutions -----------------------------------------------------------------------------


def deform_conv2d(image: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, stride_h: int,
                  stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int,
                  offset_groups: int, use_mask: bool) -> Tensor:
    """A convolution whose window is sampled bilinearly at individual offsets; the image is padded with zeros."""
    n, channels, height, width = image.shape
    window, (rows, columns), device = weight.shape[2:], offset.shape[2:], image.device
    taps = window[0] * window[1]
    moved = wide(offset).reshape(n, offset_groups, 1, taps, 2, rows, columns)
    tap = torch.arange(taps, device=device)
    steps = (tap // window[1] * dilation_h, tap % window[1] * dilation_w)
    points = (torch.arange(rows, device=device)[:, None] * stride_h - pad_h,
              torch.arange(columns, device=device) * stride_w - pad_w)
    at = [point + step[:, None, None] + moved[:, :, :, :, k] for k, (point, step) in enumerate(zip(points, steps))]
    inside = (at[0] > -1) & (at[0] < height) & (at[1] > -1) & (at[1] < width)
    axes = []
    for place, size in zip(at, (height, width)):
        low = torch.floor(place.detach())
        part = place - low
        axes.append([(k, torch.where((k >= 0) & (k < size), w, 0)) for k, w in ((low, 1 - part), (low + 1, part))])
    grouped = image.reshape(n, offset_groups, -1, height, width)
    lead = [torch.arange(size, device=device).reshape(-1, *(1,) * (5 - k))
            for k, size in enumerate((n, offset_groups, channels // offset_groups))]
    total: Any = 0
    for y, wy in axes[0]:
        for x, wx in axes[1]:
            places = (k.clamp(0, size - 1).to(torch.int64) for k, size in ((y, height), (x, width)))
            total = total + torch.where(inside, wide(grouped[(*lead, *places)]) * wy * wx, 0)
    if use_mask:
        total = total * wide(mask).reshape(n, offset_groups, 1, taps, rows, columns)
    read = total.to(image.dtype).reshape(n, groups, channels // groups * taps, rows * columns)
    out = weight.reshape(groups, -1, channels // groups * taps) @ read
    return out.reshape(n, -1, rows, columns) + bias[:, None, None]


def deform_conv2d_backward(grad: Tensor, image: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor,
                           *geometry: Any) -> tuple[Tensor, ...]:
    use_mask = geometry[-1]

    def forward(image: Tensor, weight: Tensor, offset: Tensor, *factor: Tensor) -> Tensor:
        return deform_conv2d(image, weight, offset, factor[0] if factor else mask, bias, *geometry)

    found = gradients(forward, grad, image, weight, offset, *((mask,) if use_mask else ()))
    return *found, *(() if use_mask else (torch.zeros_like(mask),)), grad.sum((0, 2, 3))


# ---- calls -----------------------------------------------------------------------------------------------


def fused(op: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on these arguments as one program; returns the results in a list."""
    tensors = [x for x in flat(args) if isinstance(x, Tensor)]
    key = function if not isinstance(function, partial) else (function.func, tuple(function.keywords.items()))
    try:
        run = program(op, key, described(args))
    except (UnsupportedError, CompileError) as error:
        REASONS[op.name()] = str(error)
        log.debug("%s has no program: %s", op, error)
        return NotImplemented
    return run(tensors)


@cache
def program(op: Any, key: Any, args: tuple[Any, ...]) -> Run:
    function = partial(key[0], **dict(key[1])) if isinstance(key, tuple) else key
    with disable_current_modes(), torch.no_grad(), DisableAutocast():
        return build(OperatorForm(op, function, "", ()), args).run


def only(out: Any) -> Any:
    return out if out is NotImplemented else out[0]


_KERNELS: dict[str, Callable[..., Any]] = {
    "nms": nms, "roi_align": align, "_roi_align_backward": align_backward,
    "deform_conv2d": lambda op, *args: only(fused(op, deform_conv2d, *args)),
    "_deform_conv2d_backward": lambda op, *args: fused(op, deform_conv2d_backward, *args),
}


def register_detection(otherwise: Callable[..., Any]) -> torch.library.Library:
    """Register the kernels. `otherwise(op, *args)` computes unsupported calls. The returned object keeps them
    registered."""
    library = torch.library.Library(LIBRARY, "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, private(_called(name, kernel, otherwise)), "PrivateUse1")
    return library


def _called(name: str, kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        op = getattr(getattr(torch.ops, LIBRARY), name).default
        tensors = [x for x in args if isinstance(x, Tensor)]
        suits = all(t.is_floating_point() and t.device == tensors[0].device for t in tensors)
        out = kernel(op, *args) if suits else NotImplemented
        out = otherwise(op, *args) if out is NotImplemented else out
        return tuple(out) if isinstance(out, list) else out

    return call
