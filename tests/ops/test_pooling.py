"""Pooling against eager: every geometry, ties, NaN, no batch, integers, gathered gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from agreement import agree, through
from flambeau.targets.cpu.target import CpuTarget

aten = torch.ops.aten

# kernel, stride, padding, dilation, ceil_mode
WINDOWS = [
    ((2, 2), (), 0, 1, False),
    ((3, 3), (2, 2), (1, 1), 1, False),
    ((3, 2), (2, 1), (1, 0), (2, 1), True),
    ((2, 2), (3, 3), 0, 1, True),
    ((3, 3), (1, 1), (1, 1), (2, 3), False),
    ((4, 4), (3, 3), (2, 2), 1, True),
]


def plane(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_maximum(lead: tuple[int, ...]) -> None:
    agree(lambda x: [F.max_pool2d(x, k, s or None, p, d, c, return_indices=True)
                     for k, s, p, d, c in WINDOWS], plane(*lead, 9, 11))


def test_maximum_with_a_gathered_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a target whose workers may not scatter in order."""
    usual = CpuTarget.capabilities
    monkeypatch.setattr(CpuTarget, "capabilities", lambda self: replace(usual(self), ordered_scatter=False))
    agree(lambda x: [*(F.max_pool2d(x, k, s or None, p, d, c) for k, s, p, d, c in WINDOWS),
                     F.adaptive_max_pool2d(x, (4, 5))], plane(2, 3, 9, 11))


def test_maximum_of_ties_nan_and_nothing_greater() -> None:
    x = torch.randn(2, 8, 9)
    x[0, 2:5] = 1.0
    x[1, 3, 4], x[1, 4, 4] = math.nan, math.nan
    x[1, :2], x[0, 6:] = -math.inf, math.inf
    agree(lambda x: (F.max_pool2d(x, 3, 2, 1, return_indices=True),
                     F.adaptive_max_pool2d(x, (3, 4), return_indices=True)), x.requires_grad_())


def test_maximum_of_one_and_three_dimensions() -> None:
    agree(lambda a, b: (F.max_pool1d(a, 3, 2, 1, return_indices=True),
                        F.max_pool3d(b, (2, 3, 2), (2, 1, 2), (1, 1, 0), (1, 2, 1), True, True)),
          plane(2, 3, 11), plane(2, 2, 5, 7, 6))


def test_maximum_of_integers_and_low_precision() -> None:
    agree(lambda a, b: (F.max_pool2d(a, 3, 2, 1, return_indices=True),
                        F.max_pool2d(b, 3, 2, 1, return_indices=True)),
          torch.randint(-9, 9, (2, 3, 7, 7), dtype=torch.int32), torch.randn(2, 3, 7, 7).bfloat16())


def test_channels_last() -> None:
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    agree(lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 4)), x)


@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_mean(lead: tuple[int, ...]) -> None:
    def every(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.avg_pool2d(x, k, s or None, p, c, include, divisor)
                for k, s, p, d, c in WINDOWS if d == 1 for include in (True, False) for divisor in (None, 3)]

    agree(every, plane(*lead, 9, 11))


def test_mean_of_one_and_three_dimensions_and_integers() -> None:
    agree(lambda a, b, c: (F.avg_pool1d(a, 3, 2, 1, True, False),
                           F.avg_pool3d(b, (2, 3, 2), 2, (1, 1, 0), True),
                           F.avg_pool2d(c, 2), F.lp_pool2d(a, 2.0, 2)),
          plane(2, 3, 11), plane(2, 2, 5, 7, 6), torch.randint(-9, 9, (2, 6, 6)))


@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_adaptive(lead: tuple[int, ...]) -> None:
    sizes = [(3, 3), (9, 11), (1, 1), (4, 5), (12, 13), (3, 11)]
    agree(lambda x: [(F.adaptive_avg_pool2d(x, s), F.adaptive_max_pool2d(x, s, return_indices=True))
                     for s in sizes], plane(*lead, 9, 11))


def test_adaptive_of_one_and_three_dimensions() -> None:
    agree(lambda a, b: (F.adaptive_avg_pool1d(a, 4), F.adaptive_max_pool1d(a, 4, return_indices=True),
                        F.adaptive_avg_pool3d(b, (2, 3, 4)),
                        F.adaptive_max_pool3d(b, (2, 3, 4), return_indices=True)),
          plane(2, 3, 11), plane(2, 2, 5, 7, 6))


def test_sizes_known_only_at_the_call() -> None:
    for n in (8, 13):
        agree(lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1, True, False),
                         F.adaptive_max_pool2d(x, (3, 4))), plane(2, 3, n, n + 2), dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_places_of_maxima_that_are_the_least_value(dynamic: bool) -> None:
    """For a window with only -inf, the index is that of its first element, as in eager."""
    x = torch.randn(2, 3, 9, 11)
    x[torch.rand(x.shape) < 0.7] = -math.inf
    x[0] = -math.inf
    agree(lambda x, y: (F.adaptive_max_pool2d(x, (2, 3), return_indices=True),
                        F.adaptive_max_pool1d(x[0], 4, return_indices=True),
                        F.max_pool2d(y, 2, return_indices=True)),
          x.requires_grad_(), x.detach().clone(), dynamic=dynamic)


def test_unpooling() -> None:
    def there_and_back(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2),
                F.max_unpool3d(*F.max_pool3d(b, 2, return_indices=True), 2))

    agree(there_and_back, plane(2, 3, 8, 8), plane(2, 4, 6, 6))


def test_unpooling_to_no_place_is_an_error() -> None:
    run = through(lambda x, i: aten.max_unpool2d(x, i, [4, 4]))
    with pytest.raises(RuntimeError, match="Found an invalid max index: 16"):
        run(torch.randn(1, 2, 2), torch.tensor([[[0, 3], [8, 16]]]))


@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_fractional(lead: tuple[int, ...]) -> None:
    batch = lead[0] if len(lead) == 2 else 1
    agree(lambda a, b, u, v: (F.fractional_max_pool2d(a, (2, 3), (4, 5), None, True, u),
                              F.fractional_max_pool3d(b, 2, (3, 2, 1), None, True, v)),
          plane(*lead, 9, 11), plane(*lead, 6, 5, 4), torch.rand(batch, 3, 2), torch.rand(batch, 3, 3))
