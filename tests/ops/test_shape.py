"""Joining, padding, rearranging, patches where OpInfo has no samples: corners, gradients, run-time sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from agreement import agree
from flambeau.ops.shape import MANY

aten = torch.ops.aten


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


def test_cat() -> None:
    empty = torch.empty(0)

    def fn(x, y, i, e):
        return (torch.cat([x, y, x[:0]], -2), torch.cat([x, e, y]), torch.cat([x.half(), i]),
                torch.cat([i, i > 0], 1), torch.cat([e, e]), torch.cat([x[:, k:k + 1] for k in (3, 0, 1)], 1),
                torch.stack([x, x * 2], -1), torch.block_diag(x, y[0], i, x[0, 0]))

    agree(fn, leaf(3, 4), leaf(2, 4), torch.arange(8).reshape(2, 4), empty)


def test_cat_of_run_time_sizes() -> None:
    for n in (3, 6):
        agree(lambda x, y: (torch.cat([x, y, x]).sin(), torch.stack([x, x])), leaf(n, 4), leaf(n + 1, 4),
              dynamic=True)


@pytest.mark.parametrize(("mode", "pads"), [
    ("reflect", [(2, 1), (0, 3), (3, 2, 1, 0), (1, 1, 0, 2, 1, 1)]),
    ("replicate", [(2, 1), (0, 5), (3, 2, 1, 0), (1, 1, 0, 2, 1, 1)]),
    ("circular", [(2, 1), (3, 2, 1, 0)]),
    ("constant", [(2, -1), (-1, -2), (3, 2, 1, -2), (0, 0, 1, 1)])])
def test_pads_and_their_gradients(mode: str, pads: list[tuple[int, ...]]) -> None:
    x = leaf(2, 3, 4, 5, 4)

    def fn(x):
        return [F.pad(x[:, :, 0, 0] if len(p) == 2 else x[:, :, 0] if len(p) == 4 else x, p, mode).exp()
                for p in pads]

    agree(fn, x)


def test_a_pad_of_one_point_and_of_whole_numbers() -> None:
    agree(lambda x: (F.pad(x, (2, 3), mode="replicate"), F.pad(x, (1, 2), value=7.5)), leaf(1, 2, 1))
    whole = torch.arange(24).reshape(2, 3, 4)
    agree(lambda x: (F.pad(x, (1, 1), mode="reflect"), F.pad(x, (1, 2), value=3)), whole)


def test_pads_of_run_time_sizes() -> None:
    for n in (4, 7):
        agree(lambda x: (F.pad(x, (2, 1), mode="reflect"), F.pad(x, (1, 2), mode="replicate"),
                         F.pad(x, (1, -1), value=2.0)), leaf(2, 3, n), dynamic=True)


def test_rearranging() -> None:
    def fn(x):
        return (x.roll(5), x.roll((-1, 4), (0, -1)), x.roll(7, 2).flip(0, 1), x.repeat(2, 1, 1, 3),
                torch.rot90(x, -1, (2, 0)), F.pixel_shuffle(x, 2), F.channel_shuffle(x[None], 2),
                x.tril(-1), x.triu(2), torch.diag_embed(x, -1, 0, -1), torch.trace(x[0]))

    agree(fn, leaf(4, 3, 5))


def test_trace_and_triangles_of_integers() -> None:
    agree(lambda x, b: (torch.trace(x), x.tril(), b.triu(), torch.trace(x.int())),
          torch.arange(12).reshape(3, 4), torch.ones(3, 3, dtype=torch.bool))


def test_roll_of_a_run_time_size() -> None:
    for n in (2, 5):
        agree(lambda x: (x.roll(3, 0) + 1, x.roll(-1, 0).flip(0) * 2), leaf(n, 3), dynamic=True)


@pytest.mark.parametrize(("kernel", "dilation", "padding", "stride"), [
    ((2, 3), (1, 1), (0, 0), (1, 1)), ((3, 2), (2, 1), (2, 1), (1, 2)), ((2, 2), (1, 2), (1, 0), (3, 2))])
def test_patches(kernel, dilation, padding, stride) -> None:
    def fn(x):
        columns = F.unfold(x, kernel, dilation, padding, stride)
        one = F.unfold(x[0], kernel, dilation, padding, stride)
        return columns, F.fold(columns, (6, 7), kernel, dilation, padding, stride), one

    agree(fn, leaf(2, 3, 6, 7))


def test_masked_fill_keeps_the_dtype() -> None:
    def fn(x, i, m, v):
        return x.masked_fill(m, 3), i.masked_fill(m, v), x[0].masked_fill(m, float("-inf"))

    agree(fn, leaf(4, 5), torch.arange(20).reshape(4, 5), torch.rand(4, 5) > 0.5,
          torch.tensor(7, dtype=torch.int32))


@pytest.mark.parametrize("count", [64, 65])
def test_many_tensors_are_joined(count: int) -> None:
    xs = [torch.arange(3.0 * (k % 4)).view(3, -1) + k for k in range(count)]
    left = () if count <= MANY else ("aten.cat.default", "aten.stack.default")
    agree(lambda *xs: (torch.cat([x * 2 for x in xs], 1), torch.stack([x[:, :0].sum() + k for k, x in enumerate(xs)])),
          *xs, externs=left)
