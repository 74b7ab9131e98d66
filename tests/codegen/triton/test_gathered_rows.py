"""Rows at computed positions, in Triton: grid sampling of many channels, and the sums in its gradient."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from flambeau.capture.decompositions import table
from flambeau.capture.graph import capture
from flambeau.codegen.triton.dialect import CAPABILITIES
from flambeau.codegen.triton.kernel import render
from flambeau.schedule.plan import schedule

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not set"),
]


def sampled(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, g, align_corners=False)


@pytest.mark.parametrize("channels", [3, 20, 64])
@pytest.mark.parametrize("sizes", [(4, 5), (3, 2, 4)])
def test_sampling_and_its_gradients(channels: int, sizes: tuple[int, ...]) -> None:
    """Few channels, a row that is one piece and not whole, a row of two pieces."""
    torch._dynamo.reset()
    image = torch.randn(2, channels, *sizes, requires_grad=True)
    grid = (2.6 * torch.rand(2, 3, *sizes[1:], len(sizes)) - 1.3).requires_grad_()
    compiled = torch.compile(sampled, backend="flambeau", options={"target": "interpreter"})
    weight = torch.randn(2, channels, 3, *sizes[1:])
    want, got = ([y, *torch.autograd.grad((y * weight).sum(), (image, grid))]
                 for y in (sampled(image, grid), compiled(image, grid)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_sizes_that_vary() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sampled, backend="flambeau", options={"target": "interpreter"}, dynamic=True)
    for n in (4, 7):
        image, grid = torch.randn(2, 20, n, n + 1), 2.6 * torch.rand(2, n, 5, 2) - 1.3
        torch.testing.assert_close(compiled(image, grid), sampled(image, grid), rtol=1e-4, atol=1e-4)


def texts(image: torch.Tensor, points: int = 5) -> list[str]:
    grid = torch.rand(2, points, 6, 2)
    graph = make_fx(lambda x, g: [sampled(x, g)], decomposition_table=table(False), tracing_mode="fake")(image, grid)
    program = schedule(capture(graph, CAPABILITIES, frozenset()).graph, CAPABILITIES)
    return [render(k, "k").text for k in program.kernels]


def test_the_image_is_laid_out_once() -> None:
    assert len(texts(torch.randn(2, 64, 4, 5))) == 2
    assert len(texts(torch.randn(2, 64, 4, 5).to(memory_format=torch.channels_last))) == 1


def test_or_not_at_all() -> None:
    """Too few channels, or too few points to pay for it."""
    assert len(texts(torch.randn(2, 4, 4, 5))) == 1
    assert len(texts(torch.randn(2, 64, 40, 50), points=1)) == 1


def test_taps_share_one_address() -> None:
    """The four corners are one place and four constant steps, which their reads add themselves."""
    gather = texts(torch.randn(2, 64, 4, 5))[1]
    reads = [line for line in gather.splitlines() if "tl.load(p1" in line]
    places = {line.split("tl.load(")[1].split(")")[0] for line in reads}
    assert len(reads) == 4 and len(places) == 1
