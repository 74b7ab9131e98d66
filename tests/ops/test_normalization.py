"""Normalisation: means far from zero, running statistics, low precision, missing weights, dynamic sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from agreement import agree, through
from flambeau.config import config

aten = torch.ops.aten


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


@pytest.mark.parametrize("inner", [(6,), (5, 6), (4, 5, 6)])
def test_layer_norm(inner: tuple[int, ...]) -> None:
    agree(lambda x, w, b: (F.layer_norm(x, inner, w, b), F.layer_norm(x, inner), F.layer_norm(x, inner, w)),
          leaf(4, 5, 6), leaf(*inner), leaf(*inner))


def test_rms_norm() -> None:
    agree(lambda x, w: (F.rms_norm(x, (6,), w), F.rms_norm(x, (5, 6), eps=1e-3)), leaf(4, 5, 6), leaf(6))


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5, 6)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_moves_its_running_statistics(shape: tuple[int, ...], training: bool) -> None:
    def fn(x, w, b, mean, var):
        y = F.batch_norm(x, mean, var, w, b, training, momentum=0.3)
        return y, mean.clone(), var.clone()

    agree(fn, leaf(*shape), leaf(3), leaf(3), torch.randn(3), torch.rand(3) + 0.5)


def test_batch_norm_without_statistics_or_weights() -> None:
    agree(lambda x, m, v: (F.batch_norm(x, None, None, training=True), F.batch_norm(x, m, v)), leaf(4, 3, 7),
          torch.randn(3), torch.rand(3) + 0.5)
    agree(lambda x, w, b: (F.instance_norm(x, weight=w, bias=b), F.instance_norm(x)), leaf(4, 3, 7), leaf(3),
          leaf(3))


def test_statistics_that_are_kept() -> None:
    """The forms that only a captured graph has, called as they are."""
    def fn(x, w, b, mean, var):
        return (*aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.3, 1e-5),
                *aten._native_batch_norm_legit_functional(x, w, b, mean, var, False, 0.3, 1e-5),
                *aten._batch_norm_with_update_functional(x, w, b, mean, var, 0.3, 1e-5),
                *aten._native_batch_norm_legit_no_training(x, w, b, mean, var, 0.3, 1e-5),
                *aten.native_layer_norm(x, [5], None, None, 1e-5),
                *aten.native_group_norm(x, w, b, 4, 3, 5, 3, 1e-5))

    agree(fn, torch.randn(4, 3, 5), torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5)


def test_group_norm() -> None:
    # Groups of ten at least: two values that happen to be near each other make a gradient of nothing but rounding.
    def fn(x, w, b):
        return tuple(F.group_norm(x, g, w, b) for g in (1, 2, 6)) + (F.group_norm(x[:, :, 0], 3),)

    agree(fn, leaf(3, 6, 4, 5), leaf(6), leaf(6))
    agree(lambda x: F.group_norm(x, 1), torch.empty(0, 2))


def test_weight_norm() -> None:
    agree(lambda v, g, h: (torch._weight_norm(v, g, 0), torch._weight_norm(v, h, 2)), leaf(4, 5, 3),
          leaf(4, 1, 1), leaf(1, 1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_far_from_zero(dtype: torch.dtype) -> None:
    def fn(x):
        return F.layer_norm(x, (20,)), F.batch_norm(x, None, None, training=True), F.group_norm(x, 2)

    x = (100 + torch.randn(8, 6, 20)).to(dtype)
    # The mean itself is rounded near 100, in steps of 100 * 2^-24, where the deviations are about 1.
    rounding = {"rtol": 1.3e-6, "atol": 2e-5} if dtype is torch.float32 else {}
    torch.testing.assert_close(through(fn)(x), tuple(y.to(dtype) for y in fn(x.double())), **rounding)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_statistics_of_one_pass(order: torch.memory_format) -> None:
    """As GPUs take them: means far from zero, a spike where the pass begins, and more points than one piece has."""
    x = torch.randn(4, 6, 40, 30) * torch.logspace(-3, 3, 6).view(6, 1, 1)
    x += torch.tensor([1.0, 30.0, 0.0, -1e3, 0.0, 0.0]).view(6, 1, 1)
    x[0, 2, 0, 0] = 1e4
    x = x.contiguous(memory_format=order)

    def fn(x):
        return torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)

    with config.override(target="interpreter"):
        _, mean, rstd = through(fn)(x)
    _, middle, scale = fn(x.double())
    # A mean is rounded near its own size, which in the second channel is 2,000 deviations.
    assert ((mean - middle).abs() <= 3e-6 * (middle.abs() + 1 / scale)).all()
    torch.testing.assert_close(rstd, scale.float(), rtol=5e-5, atol=0)


def test_half_precision_with_float32_weights() -> None:
    x = torch.randn(4, 6, 5).to(torch.bfloat16)
    w, b = torch.randn(6), torch.randn(6)

    def fn(x, w, b):
        return F.batch_norm(x, None, None, w, b, True), F.group_norm(x, 3, w, b)

    want = fn(x.double(), w.double(), b.double())
    torch.testing.assert_close(through(fn)(x, w, b), tuple(y.to(torch.bfloat16) for y in want))


def test_sizes_known_only_at_the_call() -> None:
    def fn(x, w):
        return F.layer_norm(x, (6,), w), F.batch_norm(x, None, None, training=True), F.group_norm(x, 2)

    for n in (3, 5):
        agree(fn, leaf(n, 4, 6), leaf(6), dynamic=True)
