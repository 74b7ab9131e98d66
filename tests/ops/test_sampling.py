"""Grid sampling against eager: every mode, padding and alignment, both gradients, NaN in the grid."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from agreement import agree

PADDINGS = ("zeros", "border", "reflection")


def image_and_grid(image: tuple[int, ...], grid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A grid that reaches well beyond the image."""
    return torch.randn(image, requires_grad=True), (5 * (torch.rand(grid) - 0.5)).requires_grad_()


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_two_dimensions(mode: str) -> None:
    agree(lambda x, g: [F.grid_sample(x, g, mode, p, a) for p in PADDINGS for a in (False, True)],
          *image_and_grid((2, 3, 4, 5), (2, 3, 7, 2)))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_three_dimensions(mode: str) -> None:
    agree(lambda x, g: [F.grid_sample(x, g, mode, p, a) for p in PADDINGS for a in (False, True)],
          *image_and_grid((2, 2, 3, 4, 5), (2, 2, 3, 2, 3)))


def test_one_row() -> None:
    """Aligned, there is nothing to mirror it at."""
    agree(lambda x, g: [F.grid_sample(x, g, m, p, True) for m in ("bilinear", "bicubic") for p in PADDINGS],
          *image_and_grid((1, 2, 1, 3), (1, 2, 2, 2)))


def test_a_grid_of_one_point() -> None:
    agree(lambda t: (F.affine_grid(t, (2, 3, 1, 1), False), F.affine_grid(t, (2, 3, 1, 4), True)), torch.randn(2, 2, 3))


def test_no_number_in_the_grid() -> None:
    x, g = torch.randn(2, 2, 4, 5), 3 * torch.rand(2, 3, 4, 2) - 1.5
    g[0, 0, 0, 0] = g[0, 1, 0, 1] = g[1, 1, 1, 0] = g[1, 1, 1, 1] = math.nan
    g[1, 0, 0, 0], g[1, 0, 1, 1], g[1, 2, 2, 0] = math.inf, -math.inf, 1e20
    agree(lambda x, g: [F.grid_sample(x, g, m, p, a) for m in ("bilinear", "nearest", "bicubic")
                        for p in PADDINGS for a in (False, True)], x, g)
    y, h = torch.randn(1, 2, 3, 4, 5), 3 * torch.rand(1, 2, 3, 4, 3) - 1.5
    h[0, 0, 0, 0, 0] = h[0, 1, 1, 1, 2] = math.nan
    h[0, 0, 1, 0, 1] = math.inf
    agree(lambda y, h: [F.grid_sample(y, h, m, p, a) for m in ("bilinear", "nearest")
                        for p in PADDINGS for a in (False, True)], y, h)


def test_only_the_grid_has_a_gradient() -> None:
    x, g = image_and_grid((2, 3, 4, 5), (2, 3, 4, 2))
    agree(lambda x, g: F.grid_sample(x, g, align_corners=False), x.detach(), g)


def test_affine_grid() -> None:
    agree(lambda t, x: F.grid_sample(x, F.affine_grid(t, [2, 3, 6, 5], False), align_corners=False),
          torch.randn(2, 2, 3, requires_grad=True), torch.randn(2, 3, 4, 5, requires_grad=True))


def test_sizes_known_only_at_the_call() -> None:
    for n in (4, 7):
        x, g = image_and_grid((2, 3, n, 5), (2, n, 4, 2))
        agree(lambda x, g: F.grid_sample(x, g, "bilinear", "reflection", False), x, g, dynamic=True)
