"""Attention from kernels of our own, with its gradient; elsewhere it is a library call."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

import torch
import torch.nn.functional as F

from agreement import agree
from flambeau.config import config
from opencl_forms import FORMS, THREADS

# In float64 attention is left to the library before 2.13: torch's metadata is wrong there.
DTYPE = torch.float64 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else torch.float32


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, requires_grad=True)


@pytest.mark.parametrize("on", FORMS)
def test_causal(on: str) -> None:
    with config.override(target=on):
        agree(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
              *(random(2, 3, 9, 16).detach() for _ in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize("on", FORMS)
def test_gradients_with_sizes_known_only_at_the_call(on: str) -> None:
    with config.override(target=on):
        agree(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
              *(random(2, 3, 9, 16) for _ in range(3)), dynamic=True)


def test_a_mask_that_hides_a_row() -> None:
    mask = torch.randn(9, 11, dtype=DTYPE)
    mask[3] = -math.inf
    mask[4, 5:] = -math.inf
    with config.override(target=THREADS):
        agree(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.3), random(2, 3, 9, 16),
              random(2, 3, 11, 16), random(2, 3, 11, 16), mask)
