"""Common eager calls, which `flambeau warm` makes to compile their programs ahead of time.

Each row is a part of a model, forward and backward, or the steps of optimizers. The sizes cover the different classes:
a batch of several and a batch of one, as in training and decoding. Other sizes of a class need no other program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = ((3, 20), (2, 33), (1, 1))  # batch, length
LARGE = ((24, 1000), (25, 1003))  # large enough for `accelerate` to consider
WIDTH, HEADS, WORDS = 48, 4, 97


class Place(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    sizes: tuple[tuple[int, int], ...]


def learned(made: Tensor) -> None:
    made.float().square().mean().backward()


def data(place: Place, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=place.dtype, device=place.device, requires_grad=True)


def for_sizes(call: Callable[[Place, int, int], None]) -> Callable[[Place], None]:
    def all_of_them(place: Place) -> None:
        for batch, length in place.sizes:
            call(place, batch, length)

    return all_of_them


def arithmetic(place: Place, batch: int, length: int) -> None:
    x, y, row = (data(place, *shape) for shape in ((batch, length, WIDTH), (batch, length, WIDTH), (WIDTH,)))
    learned((x + y) * row - y / (x * x + 1.5))
    learned(torch.where(x > 0, x, -y).clamp(-1, 1) * 0.5 + 2)
    with torch.no_grad():
        x.mul_(0.5).add_(y).sub_(row)
        x.transpose(0, 1).contiguous(), torch.cat([x, y], 1), torch.stack([x, y])


def activations(place: Place, batch: int, length: int) -> None:
    x = data(place, batch, length, WIDTH)
    for function in (torch.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, torch.exp, torch.sqrt, torch.rsqrt):
        learned(function(x))


def reductions(place: Place, batch: int, length: int) -> None:
    x = data(place, batch, length, WIDTH)
    for made in (x.sum(-1), x.mean((0, 1)), x.sum(), x.amax(-1), x.softmax(-1), x.log_softmax(-1), x.var(-1)):
        learned(made)
    x.argmax(-1), x.cumsum(1)


def norms(place: Place, batch: int, length: int) -> None:
    x, weight = data(place, batch, length, WIDTH), data(place, WIDTH)
    learned(F.layer_norm(x, (WIDTH,), weight, weight))
    learned(F.rms_norm(x, (WIDTH,), weight))


def products(place: Place, batch: int, length: int) -> None:
    x, weight, bias = data(place, batch, length, WIDTH), data(place, 2 * WIDTH, WIDTH), data(place, 2 * WIDTH)
    learned(F.linear(x, weight, bias))
    learned(F.linear(x, weight))
    learned(x @ x.transpose(1, 2))


def attention(place: Place, batch: int, length: int) -> None:
    x = data(place, batch, length, 3, HEADS, WIDTH // HEADS)
    q, k, v = x.permute(2, 0, 3, 1, 4)
    for causal in (False, True):
        made = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        learned(made.transpose(1, 2).reshape(batch, length, WIDTH))


def words(place: Place, batch: int, length: int) -> None:
    table = data(place, WORDS, WIDTH)
    index = torch.zeros(batch, length, dtype=torch.int64, device=place.device)
    made = F.embedding(index, table) + F.embedding(torch.arange(length, device=place.device), table)
    F.cross_entropy((made @ table.t()).flatten(0, 1), index.flatten()).backward()


def images(place: Place, batch: int, length: int) -> None:
    side = min(length, 60) + 4
    x, weight, bias = data(place, batch, 4, side, side), data(place, 6, 4, 3, 3), data(place, 6)
    made = F.conv2d(x, weight, bias, padding=1)
    learned(F.max_pool2d(F.batch_norm(made, None, None, bias, bias, training=True).relu(), 2))
    learned(F.adaptive_avg_pool2d(F.avg_pool2d(made.detach().requires_grad_(), 2), 1))


def optimizers(place: Place) -> None:
    kinds: tuple[Callable[..., torch.optim.Optimizer], ...] = (
        partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam, torch.optim.AdamW)
    for kind in kinds:
        shapes = (WIDTH, WIDTH), (WIDTH,), (5, WIDTH)
        weights = [nn.Parameter(data(place, *shape).detach().clone()) for shape in shapes]
        steps = kind(weights, lr=1e-3)
        for _ in range(3):
            for w in weights:
                w.grad = torch.ones_like(w)
            nn.utils.clip_grad_norm_(weights, 1.0)
            steps.step()


USUAL: dict[str, Callable[[Place], None]] = {
    **{call.__name__: for_sizes(call) for call in (
        arithmetic, activations, reductions, norms, products, attention, words, images)},
    "optimizers": optimizers,
}
REPLACED = ("activations", "reductions", "norms", "words", "images", "optimizers")  # calls that `accelerate` replaces
