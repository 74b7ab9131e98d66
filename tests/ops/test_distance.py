"""Distances between rows in every p-norm, with gradients where rows coincide, batches, and nothing to do."""

from __future__ import annotations

import math

import torch

from agreement import agree

POWERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
DIRECT = "donot_use_mm_for_euclid_dist"


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def test_between_two_sets() -> None:
    agree(lambda a, b: [torch.cdist(a, b, p=p, compute_mode=DIRECT) for p in POWERS], rows(5, 4), rows(3, 4))


def test_within_a_set() -> None:
    agree(lambda a: [torch.pdist(a, p=p) for p in POWERS], rows(7, 3))


def test_of_two_tensors() -> None:
    agree(lambda a, b: [torch.dist(a, b, p) for p in POWERS[1:]], rows(4, 5), rows(5))
    agree(lambda a, b: torch.dist(a, b, 0), torch.randn(4, 5).round(), torch.randn(5).round())


def test_equal_rows_have_no_gradient() -> None:
    a = torch.randn(1, 4).expand(3, 4).clone().requires_grad_()
    agree(lambda a: [(torch.cdist(a, a, p=p), torch.pdist(a, p=p)) for p in (1.0, 1.5, 2.0, 3.0)], a)


def test_batches_broadcast() -> None:
    agree(lambda a, b: torch.cdist(a, b, p=1.0), rows(2, 1, 5, 3), rows(4, 6, 3))


def test_nothing_to_measure() -> None:
    agree(lambda a, b: (torch.cdist(a, b), torch.cdist(a[:, :0], a[:, :0]), torch.pdist(a[:1])), rows(4, 3),
          rows(0, 3))


def test_many_rows() -> None:
    """The k-th pair's rows come out of a square root: right up to the last pair of a large set."""
    agree(lambda a: torch.pdist(a, p=1.0), torch.randn(3000, 2))
