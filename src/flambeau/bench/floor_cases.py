"""Operators that are limited by memory bandwidth, in sizes that are large enough for a GPU.

Every case has the bytes it moves: each input read once, each output written once. Inputs that an operator takes but
need not read are left out, and so are those of less than a percent, such as the offsets of bags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Tensors = tuple[Tensor, ...]
SUM, MAX = 0, 2  # modes of embedding_bag
FORWARD, GRADIENT = "forward", "gradient"


@dataclass(frozen=True)
class Sizes:
    square: tuple[int, int]
    flat: int
    volume: tuple[int, ...]
    image: tuple[int, ...]
    table: tuple[int, int]  # of the embedding bags
    bags: tuple[int, int]  # the number, and the length of each
    rows: tuple[int, int]  # of index_add_


SIZES = {
    "full": Sizes((8192, 8192), 1 << 26, (8, 64, 32, 64, 64), (64, 64, 224, 224), (1_000_000, 128), (262_144, 8),
                  (1 << 20, 128)),
    "odd": Sizes((8191, 4099), 8191 * 4099, (7, 65, 31, 63, 65), (63, 65, 223, 225), (999_983, 127), (262_143, 7),
                 (999_983, 127)),
    "small": Sizes((181, 251), 50_000, (1, 4, 8, 24, 32), (1, 8, 56, 56), (1000, 64), (128, 4), (500, 96)),
    "tiny": Sizes((37, 29), 1001, (1, 2, 5, 6, 7), (1, 2, 11, 13), (50, 16), (12, 8), (40, 16)),
}


@dataclass(frozen=True)
class Draw:
    """A source of random inputs of one size, dtype and device; `strided`: not in the order of their dimensions."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    strided: bool = False
    clock: str = "cuda"  # how calls are timed

    def normal(self, *shape: int) -> Tensor:
        return self.laid(torch.randn(shape, device=self.device).to(self.dtype))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self.laid((torch.rand(shape, device=self.device) * (high - low) + low).to(self.dtype))

    def laid(self, x: Tensor) -> Tensor:
        """Returns x in a strided layout if asked for: transposed, channels last, or every other element of a longer
        tensor."""
        if not self.strided:
            return x
        if x.dim() == 1:
            return torch.stack((x, x), 1)[:, 0]
        return x.movedim(1, -1).contiguous().movedim(-1, 1)

    def index(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), device=self.device)


Make = Callable[[Draw], Tensors]
Moved = Callable[[Tensors, Tensors], int]


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def everything(inputs: Tensors, outputs: Tensors) -> int:
    return size_of(*inputs, *outputs)


def without(*unread: int) -> Moved:
    """Counts all bytes except those of the inputs at these positions."""
    return lambda inputs, outputs: size_of(*(t for k, t in enumerate(inputs) if k not in unread), *outputs)


def only_written(inputs: Tensors, outputs: Tensors) -> int:
    return size_of(*outputs)


@dataclass(frozen=True)
class Case:
    """A case. `operator` is ATen's name. An in-place operator changes its first input, which `run` returns."""

    name: str
    group: str
    operator: str
    make: Make
    run: Callable[..., Any]
    moved: Moved = everything
    direction: str = FORWARD
    random: bool = False
    in_place: bool = False


# ---- scans, rows, activations --------------------------------------------------------------------------------


def square(draw: Draw) -> Tensors:
    return (draw.normal(*draw.sizes.square),)


def near_one(draw: Draw) -> Tensors:
    """Draws numbers near one, for products, which would overflow otherwise."""
    return (draw.uniform(0.98, 1.02, *draw.sizes.square),)


def flat(draw: Draw) -> Tensors:
    return (draw.normal(draw.sizes.flat),)


def scan(name: str, axis: int, make: Make, where: str) -> Case:
    return Case(f"{name} {where}", "scan", name, make, lambda x: getattr(torch, name)(x, axis))


def elementwise(name: str, function: Callable[..., Tensor]) -> Case:
    return Case(name, "activation", name, square, function)


# ---- pooling ---------------------------------------------------------------------------------------------------


def volume(draw: Draw) -> Tensors:
    return (draw.normal(*draw.sizes.volume),)


def image(draw: Draw) -> Tensors:
    return (draw.normal(*draw.sizes.image),)


def max_pool(x: Tensor, kernel: int, stride: int, padding: int) -> Tensors:
    rank = x.dim() - 2
    return getattr(aten, f"max_pool{rank}d_with_indices")(x, [kernel] * rank, [stride] * rank, [padding] * rank)


def max_pool_gradient(gradient: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    rank = x.dim() - 2
    return getattr(aten, f"max_pool{rank}d_with_indices_backward")(
        gradient, x, [3] * rank, [2] * rank, [1] * rank, [1] * rank, False, indices)


def pooled(make: Make) -> Make:
    """Draws the gradient of a pooling's result, its input and its indices."""
    def drawn(draw: Draw) -> Tensors:
        (x,) = make(draw)
        result, indices = max_pool(x, 3, 2, 1)
        return draw.normal(*result.shape), x, indices
    return drawn


def halved(draw: Draw) -> Tensors:
    """Draws a volume pooled by two, the indices, and the volume for its shape."""
    (x,) = volume(draw)
    return *max_pool(x, 2, 2, 0), x


# ---- sampling --------------------------------------------------------------------------------------------------


def random_grid(draw: Draw) -> Tensors:
    (x,) = volume(draw)
    return x, draw.uniform(-1, 1, x.shape[0], *x.shape[2:], 3)


def smooth_grid(draw: Draw) -> Tensors:
    """Draws an affine warp: neighbours read neighbours."""
    (x,) = volume(draw)
    warp = torch.tensor([[0.9, 0.1, 0.0, 0.05], [-0.1, 0.9, 0.0, 0.0], [0.0, 0.05, 0.95, 0.0]], device=draw.device)
    return x, F.affine_grid(warp.expand(x.shape[0], 3, 4), list(x.shape), align_corners=False).to(draw.dtype)


def with_gradient(make: Make) -> Make:
    """Draws a gradient with the shape of the first input, followed by the inputs."""
    def drawn(draw: Draw) -> Tensors:
        inputs = make(draw)
        return draw.normal(*inputs[0].shape), *inputs
    return drawn


# ---- embedding bags and rows -------------------------------------------------------------------------------------


def bags(draw: Draw) -> Tensors:
    """Draws the table, indices, offsets and weights."""
    (rows, dim), (count, length) = draw.sizes.table, draw.sizes.bags
    total = count * length
    return (draw.normal(rows, dim), draw.index(rows, total), torch.arange(0, total, length, device=draw.device),
            draw.uniform(0, 1, total))


def bag(mode: int) -> Callable[..., Tensor]:
    """Returns the operator, weighted if it is a sum: there are no weighted maxima."""
    def run(table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return aten._embedding_bag(table, indices, offsets, False, mode, False, weights if mode == SUM else None)[0]
    return run


def looked_up(inputs: Tensors, outputs: Tensors) -> int:
    """Counts a row of the table for every index."""
    table, indices = inputs[:2]
    return indices.numel() * size_of(table[0]) + size_of(indices, *outputs)


def bag_gradient_inputs(mode: int) -> Make:
    def drawn(draw: Draw) -> Tensors:
        table, indices, offsets, weights = bags(draw)
        count, length = draw.sizes.bags
        result, _, lengths, chosen = aten._embedding_bag(table, indices, offsets, False, mode)
        # Not every device returns which bag an index is in, but the gradient needs it.
        bag_of = torch.arange(count, device=draw.device).repeat_interleave(length)
        return draw.normal(*result.shape), indices, bag_of, lengths, chosen, weights, table
    return drawn


def bag_gradient(mode: int) -> Callable[..., Tensor]:
    def run(gradient: Tensor, indices: Tensor, bag_of: Tensor, lengths: Tensor, chosen: Tensor, weights: Tensor,
            table: Tensor) -> Tensor:
        return aten._embedding_bag_dense_backward(gradient, indices, bag_of, lengths, chosen, table.shape[0], False,
                                                  mode, weights if mode == SUM else None)
    return run


def gradient_per_index(inputs: Tensors, outputs: Tensors) -> int:
    """Counts the gradient, its row once more for every index, and the indices."""
    gradient, indices = inputs[:2]
    return indices.numel() * size_of(gradient[0]) + size_of(gradient, indices, *outputs)


def gradient_and_choice(inputs: Tensors, outputs: Tensors) -> int:
    """Counts the gradient and the row that each of its elements is for, which fits into 32 bits."""
    gradient = inputs[0]
    return size_of(gradient, *outputs) + 4 * gradient.numel()


def rows(draw: Draw) -> Tensors:
    count, dim = draw.sizes.rows
    return draw.normal(count, dim), draw.index(count, count), draw.normal(count, dim)


# ---- the table ---------------------------------------------------------------------------------------------------


CASES: tuple[Case, ...] = (
    *(scan(name, axis, near_one if name == "cumprod" else square, f"dim {axis}")
      for name in ("cumsum", "cumprod", "logcumsumexp", "cummax") for axis in (0, 1)),
    *(scan(name, 0, flat, "one row") for name in ("cumsum", "logcumsumexp", "cummax")),

    *(case for name, make in (("max_pool3d", volume), ("max_pool2d", image)) for case in (
        Case(name, "pooling", f"{name}_with_indices", make, lambda x: max_pool(x, 3, 2, 1)),
        Case(name, "pooling", f"{name}_with_indices_backward", pooled(make), max_pool_gradient, without(1), GRADIENT))),
    Case("avg_pool3d", "pooling", "avg_pool3d", volume, lambda x: aten.avg_pool3d(x, [3] * 3, [2] * 3, [1] * 3)),
    Case("avg_pool3d", "pooling", "avg_pool3d_backward", lambda draw: pooled(volume)(draw)[:2],
         lambda gradient, x: aten.avg_pool3d_backward(gradient, x, [3] * 3, [2] * 3, [1] * 3, False, True, None),
         without(1), GRADIENT),
    Case("max_unpool3d", "pooling", "max_unpool3d", halved,
         lambda x, indices, whole: aten.max_unpool3d(x, indices, whole.shape[2:], [2] * 3, [0] * 3), without(2)),

    *(case for kind, make in (("random", random_grid), ("smooth", smooth_grid)) for case in (
        Case(f"grid_sampler_3d {kind}", "sampling", "grid_sampler_3d", make,
             lambda x, grid: aten.grid_sampler_3d(x, grid, 0, 0, False)),
        Case(f"grid_sampler_3d {kind}", "sampling", "grid_sampler_3d_backward", with_gradient(make),
             lambda gradient, x, grid: aten.grid_sampler_3d_backward(gradient, x, grid, 0, 0, False, [True, True]),
             direction=GRADIENT))),

    *(Case(f"embedding_bag {name}", "embedding", "_embedding_bag", bags, bag(mode), looked_up)
      for name, mode in (("weighted sum", SUM), ("max", MAX))),
    *(Case(f"embedding_bag {name}", "embedding", "_embedding_bag_dense_backward", bag_gradient_inputs(mode),
           bag_gradient(mode), moved, GRADIENT)
      for name, mode, moved in (("weighted sum", SUM, gradient_per_index), ("max", MAX, gradient_and_choice))),
    Case("index_add_", "indexing", "index_add_", rows, lambda x, index, source: x.index_add_(0, index, source),
         without(1), in_place=True),

    Case("native_dropout", "random", "native_dropout", square, lambda x: aten.native_dropout(x, 0.3, True),
         random=True),
    Case("exponential_", "random", "exponential_", square, lambda x: x.exponential_(1.0), only_written, random=True,
         in_place=True),

    Case("softmax", "rows", "_softmax", square, lambda x: x.softmax(1)),
    Case("layer_norm", "rows", "native_layer_norm", square, lambda x: F.layer_norm(x, x.shape[1:])),

    elementwise("hardswish", F.hardswish),
    elementwise("softshrink", F.softshrink),
    elementwise("expm1", torch.expm1),
    Case("hardswish", "activation", "hardswish_backward", with_gradient(square), aten.hardswish_backward,
         direction=GRADIENT),
)


def chosen(only: str | None = None, directions: Iterable[str] = (FORWARD, GRADIENT)) -> list[Case]:
    """Returns the cases of these directions whose group or name contains one of the parts of `only`, separated by
    commas."""
    parts = only.split(",") if only else [""]
    return [case for case in CASES if case.direction in directions
            and any(part in f"{case.group}/{case.name} {case.direction}" for part in parts)]
