"""Neighbours written out together: how often a block reads, and what comes out at every boundary."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flambeau.codegen.triton.dialect import CAPABILITIES
from flambeau.codegen.triton.kernel import render
from flambeau.ir import build
from flambeau.ir.nodes import Graph
from flambeau.ops.pooling import max_pool
from flambeau.schedule.plan import schedule

interpreted = pytest.mark.skipif(find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
                                 reason="TRITON_INTERPRET is not set")


def gradient_text(size: int) -> str:
    """The kernel of the gradient of max_pool3d, kernel 3, stride 2, padding 1."""
    out = [(size - 1) // 2 + 1] * 3
    g = Graph(capabilities=CAPABILITIES)
    with build.building(g):
        grad, x, indices = (g.add_input((2, 3, *shape), dtype) for shape, dtype in (
            (out, torch.float32), ([size] * 3, torch.float32), (out, torch.int64)))
        g.outputs = [max_pool(3)[1](grad, x, [3] * 3, [2] * 3, [1] * 3, [1] * 3, False, indices)]
    kernel, = schedule(g, CAPABILITIES, True).kernels
    return render(kernel, "k").text


def test_eight_elements_share_eight_windows() -> None:
    text = gradient_text(16)
    assert text.count("tl.load(") == 16  # index and gradient of each window
    assert text.count("tl.store(") == text.count("tl.join(") == 4  # neighbours in a row are stored together
    assert "//" not in re.sub(r"pid\d* //", "", text)  # even or odd is no question any more


def test_sizes_that_the_stride_does_not_divide() -> None:
    text = gradient_text(15)
    assert text.count("tl.load(") == 16 and text.count("tl.store(") == 8 and "tl.join(" not in text


def compiled(f: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="flambeau", options={"target": "interpreter"})


POOLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "max, odd": (lambda x: F.max_pool3d(x, 3, 2, 1), (1, 2, 5, 6, 7)),
    "max, even": (lambda x: F.max_pool2d(x, 3, 2, 1), (1, 2, 12, 70)),
    "max, dilated": (lambda x: F.max_pool2d(x, 2, 2, 1, dilation=3), (1, 2, 13, 14)),
    "max, four": (lambda x: F.max_pool2d(x, 5, 4, 1), (1, 2, 17, 16)),
    "max, ceil": (lambda x: F.max_pool2d(x, 3, 3, 1, ceil_mode=True), (1, 1, 13, 14)),
    "mean": (lambda x: F.avg_pool3d(x, 3, 2, 1), (1, 2, 6, 5, 8)),
    "mean without padding": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (1, 2, 9, 12)),
    "and on": (lambda x: F.max_pool2d(x.relu(), 3, 2, 1), (1, 2, 9, 12)),
    "there and back": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (1, 2, 8, 12)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (1, 2, 5, 7)),
}


@interpreted
@pytest.mark.parametrize("name", POOLS)
def test_values_and_gradients(name: str) -> None:
    f, shape = POOLS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (want, y), (got, z) = ((torch.autograd.grad((y := g(x)).sin().sum(), x), y) for g in (f, compiled(f)))
    torch.testing.assert_close((z, got), (y, want))


@interpreted
def test_unpooling_to_places_outside_of_the_own_cell() -> None:
    x = torch.randn(2, 3, 4, 5)
    places = torch.stack([torch.randperm(80)[:20] for _ in range(6)]).view(2, 3, 4, 5)
    want = F.max_unpool2d(x, places, 2, output_size=[8, 10])
    assert torch.equal(compiled(lambda x, i: F.max_unpool2d(x, i, 2, output_size=[8, 10]))(x, places), want)
    places[0, 0, 0, 0] = 80
    with pytest.raises(RuntimeError, match="invalid max index: 80"):
        compiled(lambda x, i: F.max_unpool2d(x, i, 2, output_size=[8, 10]))(x, places)
