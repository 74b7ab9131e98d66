"""Convolutions as kernels of our own, with their gradients; elsewhere they are library calls."""

from __future__ import annotations

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

import torch
import torch.nn.functional as F

from agreement import agree, through
from flambeau.config import config
from opencl_forms import FORMS, THREADS

# function, its options, shapes of input and weight
CASES = {
    "padding": (F.conv2d, {"padding": 1}, (2, 3, 8, 9), (5, 3, 3, 3)),
    "stride": (F.conv2d, {"stride": 2, "padding": (1, 0)}, (2, 3, 8, 9), (5, 3, 3, 2)),
    "groups": (F.conv2d, {"groups": 2, "padding": 1}, (2, 4, 6, 7), (6, 2, 3, 3)),
    "dilation": (F.conv2d, {"dilation": (2, 1), "stride": (1, 2), "padding": (2, 1)}, (2, 3, 9, 9), (5, 3, 3, 3)),
    "dilation and stride": (F.conv2d, {"dilation": 2, "stride": 2, "padding": 2}, (2, 3, 9, 9), (5, 3, 3, 3)),
    "one by one": (F.conv2d, {}, (2, 30, 6, 7), (50, 30, 1, 1)),
    "each channel": (F.conv2d, {"groups": 4, "padding": 1}, (2, 4, 8, 9), (4, 1, 3, 3)),
    "line": (F.conv1d, {"stride": 2, "padding": 1}, (2, 3, 9), (5, 3, 3)),
    "volume": (F.conv3d, {"stride": (2, 1, 2), "padding": 1}, (2, 3, 4, 5, 6), (5, 3, 3, 2, 3)),
    "transposed": (F.conv_transpose2d, {"stride": 2, "padding": 1, "output_padding": 1}, (2, 3, 4, 5), (3, 4, 3, 3)),
    "transposed in groups": (F.conv_transpose1d, {"stride": 3, "output_padding": 2, "groups": 2, "dilation": 2},
                             (2, 4, 5), (4, 2, 3)),
    "nothing": (F.conv2d, {"padding": 1}, (0, 3, 8, 9), (5, 3, 3, 3)),
}
FIRST = ("padding", "stride", "transposed in groups")
PARAMS = [pytest.param(name, on, marks=() if name in FIRST else pytest.mark.slow, id=f"{name}-{on}")
          for name in CASES for on in FORMS]


@pytest.mark.parametrize(("name", "on"), PARAMS)
def test_convolutions_and_their_gradients(name: str, on: str) -> None:
    fn, options, *shapes = CASES[name]
    x, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    channels = w.shape[0] if "transpose" not in fn.__name__ else w.shape[1] * options.get("groups", 1)
    bias = torch.randn(channels, dtype=torch.float64, requires_grad=True)
    with config.override(target=on):
        agree(lambda x, w, b: fn(x, w, b, **options), x, w, bias)


@pytest.mark.parametrize("on", FORMS)
def test_outside_is_zero_whatever_the_input_is_computed_from(on: str) -> None:
    x, w = torch.randn(2, 3, 7, 20, dtype=torch.float64), torch.randn(5, 3, 3, 3, dtype=torch.float64)
    with config.override(target=on):
        agree(lambda x, w: F.conv2d(x + 1, w, None, 1, 1), x, w)


def test_lines_that_are_one_number() -> None:
    x = torch.randn(2, 3, 7, 1, dtype=torch.float64).expand(2, 3, 7, 20)
    w = torch.randn(5, 3, 3, 3, dtype=torch.float64)
    with config.override(target=THREADS):
        torch.testing.assert_close(through(lambda x, w: F.conv2d(x, w, None, 1, 1))(x, w), F.conv2d(x, w, None, 1, 1))


def test_channels_last() -> None:
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64).to(memory_format=torch.channels_last)
    with config.override(target=THREADS):
        run = through(lambda x, w: F.conv2d(x, w, None, 1, 1).relu())
        w = torch.randn(5, 3, 3, 3, dtype=torch.float64)
        ours, eager = run(x, w), F.conv2d(x, w, None, 1, 1).relu()
    torch.testing.assert_close(ours, eager)
    assert ours.stride() == eager.stride()


def test_half_precision_sums_in_float32() -> None:
    x, w = torch.randn(2, 40, 6, 6), torch.randn(5, 40, 3, 3)
    with config.override(target=THREADS):
        ours = through(lambda x, w: F.conv2d(x, w))(x.bfloat16(), w.bfloat16())
    wanted = F.conv2d(x.bfloat16().double(), w.bfloat16().double()).bfloat16()
    torch.testing.assert_close(ours, wanted, rtol=2 ** -7, atol=1e-6)
