"""Losses: every reduction, ignored and weighted classes, targets out of range, logarithms of zero."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from agreement import agree, through

REDUCTIONS = ["none", "mean", "sum"]


def test_distances_from_the_target() -> None:
    def fn(x, t):
        return [(F.mse_loss(x, t, reduction=r), F.l1_loss(x, t, reduction=r),
                 F.smooth_l1_loss(x, t, reduction=r, beta=0.7), F.huber_loss(x, t, reduction=r, delta=0.7),
                 F.soft_margin_loss(x, t.sign(), reduction=r), F.kl_div(x, t.exp(), reduction=r))
                for r in REDUCTIONS]

    agree(fn, torch.randn(5, 7, requires_grad=True), torch.randn(5, 7))


def test_binary_cross_entropy() -> None:
    def fn(p, x, t, w):
        return [(F.binary_cross_entropy(p, t, w, reduction=r), F.binary_cross_entropy(p, t, reduction=r),
                 F.binary_cross_entropy_with_logits(x, t, w, reduction=r, pos_weight=w[0]))
                for r in REDUCTIONS]

    p = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.25]], requires_grad=True)
    x = torch.tensor([[-200.0, 200.0, 0.0], [1.0, -1.0, 90.0]], requires_grad=True)
    agree(fn, p, x, torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.3]]), torch.rand(2, 3))


@pytest.mark.parametrize(("p", "t", "named"), [
    (2.0, 1.0, "input"), (float("nan"), 1.0, "input"), (0.5, -1.0, "target")])
def test_what_is_no_probability(p: float, t: float, named: str) -> None:
    compiled = torch.compile(F.binary_cross_entropy, backend="flambeau")
    given = torch.tensor([0.5, p]), torch.tensor([0.0, t])
    for call in (F.binary_cross_entropy, compiled):
        with pytest.raises(RuntimeError, match=f"all elements of {named} should be between 0 and 1"):
            call(*given)


@pytest.mark.parametrize("shape", [(5,), (6, 5), (2, 5, 3, 4)])
def test_class_likelihoods(shape: tuple[int, ...]) -> None:
    def fn(x, t, w):
        return [(F.nll_loss(x, t, w, ignore_index=2, reduction=r), F.cross_entropy(x, t, reduction=r),
                 F.cross_entropy(x, t, w, ignore_index=1, label_smoothing=0.1, reduction=r))
                for r in REDUCTIONS]

    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    agree(fn, torch.randn(*shape, requires_grad=True), target, torch.rand(5))


def test_nothing_counts() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    agree(lambda x, t: tuple(F.nll_loss(x, t, reduction=r) for r in REDUCTIONS), x, torch.full((3,), -100))


@pytest.mark.parametrize("bad", [5, -1])
def test_a_target_out_of_range_is_an_error(bad: int) -> None:
    with pytest.raises(IndexError):
        through(F.nll_loss)(torch.randn(3, 5), torch.tensor([0, bad, 1]))


def test_ignored_targets_may_be_anything() -> None:
    agree(lambda x, t: F.nll_loss(x, t, ignore_index=255), torch.randn(3, 5), torch.tensor([0, 255, 4]))


def test_margins() -> None:
    def fn(x, t, many):
        return (F.multi_margin_loss(x, t), F.multi_margin_loss(x, t, p=2, margin=0.5, reduction="sum"),
                F.multilabel_margin_loss(x, many, reduction="none"), F.multilabel_margin_loss(x, many))

    many = torch.tensor([[3, 0, 0, 3], [2, 2, 2, 2], [0, 1, 2, 1]])
    agree(fn, torch.randn(3, 4, requires_grad=True), torch.tensor([1, 3, 0]), many)


def test_broadcast_and_promotion() -> None:
    agree(lambda x, t: (F.mse_loss(x, t), F.smooth_l1_loss(x, t, reduction="none")), torch.randn(4, 5),
          torch.randn(4, 5, dtype=torch.float64))


def test_low_precision_sums_in_float32() -> None:
    x, t = torch.randn(300, 70).to(torch.bfloat16), torch.randn(300, 70).to(torch.bfloat16)
    got = through(lambda x, t: (F.mse_loss(x, t), F.huber_loss(x, t, reduction="sum")))(x, t)
    want = F.mse_loss(x.double(), t.double()), F.huber_loss(x.double(), t.double(), reduction="sum")
    torch.testing.assert_close(got, tuple(w.to(torch.bfloat16) for w in want))


def test_sizes_known_only_at_the_call() -> None:
    def fn(x, t, c):
        return F.mse_loss(x, t), F.binary_cross_entropy_with_logits(x, t.sigmoid()), F.cross_entropy(x, c)

    for n in (4, 7):
        classes = torch.randint(0, 6, (n,))
        agree(fn, torch.randn(n, 6, requires_grad=True), torch.randn(n, 6), classes, dynamic=True)
