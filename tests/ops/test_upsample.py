"""Upsampling against eager: sizes and scale factors, up and down, aligned or not, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_function, make_boxed_func

from agreement import agree, through
from flambeau.capture.decompositions import table
from flambeau.capture.kept_whole import whole_operators

# (input, the arguments that say the output)
RESIZES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((4, 5), {"scale_factor": 2.0}),
    ((4, 5), {"size": (8, 10)}),
    ((5, 7), {"scale_factor": 1.5}),
    ((5, 7), {"scale_factor": (1.7, 0.6)}),
    ((5, 7), {"size": (5, 7)}),
    ((6, 9), {"size": (3, 3)}),
    ((5, 7), {"size": (1, 4)}),
    ((1, 3), {"size": (4, 41)}),
    ((3, 3), {"scale_factor": 3.0}),
]


def whole(fn: Callable[..., Any], *args: torch.Tensor, **options: Any) -> None:
    with whole_operators():
        agree(fn, *args, **options)


def every_resize(mode: str, dtype: torch.dtype, **options: Any) -> None:
    """Weights in float64: an order of summation then makes no difference that counts."""
    whole(lambda *xs: [F.interpolate(x, mode=mode, **how, **options) for x, (_, how) in zip(xs, RESIZES)],
          *(torch.randn(2, 3, *size, dtype=dtype, requires_grad=True) for size, _ in RESIZES))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest(mode: str) -> None:
    every_resize(mode, torch.float32)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align", [False, True])
def test_linear_and_cubic(mode: str, align: bool) -> None:
    every_resize(mode, torch.float64, align_corners=align)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased(mode: str) -> None:
    every_resize(mode, torch.float64, antialias=True)


def test_one_and_three_dimensions() -> None:
    def resize(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        modes = [("nearest", None), ("nearest-exact", None), ("linear", False), ("linear", True)]
        volume = {"linear": "trilinear"}
        return [r for mode, align in modes for r in (
            F.interpolate(a, size=9, mode=mode, align_corners=align),
            F.interpolate(b, scale_factor=(2, 1.5, 0.5), mode=volume.get(mode, mode), align_corners=align))]

    whole(resize, torch.randn(2, 3, 5, requires_grad=True), torch.randn(1, 2, 3, 4, 6, requires_grad=True))


def test_the_given_factor_goes_before_the_sizes() -> None:
    """With a factor of 1.9, five become nine; the step is 1/1.9 and not 5/9."""
    whole(lambda x: (F.interpolate(x, scale_factor=1.9, mode="bilinear"),
                     F.interpolate(x, scale_factor=1.9, mode="bilinear", recompute_scale_factor=True),
                     F.interpolate(x, scale_factor=1.9)), torch.randn(1, 2, 5, 5, requires_grad=True))


def test_low_precision_is_rounded_once() -> None:
    x = torch.randn(2, 3, 5, 7).bfloat16()
    with whole_operators():
        got = through(lambda x: F.interpolate(x, size=(8, 9), mode="bicubic"))(x)
    want = F.interpolate(x.double(), size=(8, 9), mode="bicubic").bfloat16()
    torch.testing.assert_close(got, want)


def test_bytes() -> None:
    """In fixed point, to the last bit."""
    sizes = ((9, 10), (3, 4))

    def resized(x: torch.Tensor) -> list[torch.Tensor]:
        plain = [F.interpolate(x, size, mode=m) for m in ("nearest", "nearest-exact") for size in sizes]
        smooth = [F.interpolate(x, size, mode=m, align_corners=c, antialias=a) for m in ("bilinear", "bicubic")
                  for size in sizes for c, a in ((False, False), (True, False), (False, True))]
        return plain + smooth

    whole(resized, torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8))


def test_sizes_known_only_at_the_call() -> None:
    for n in (4, 7):
        whole(lambda x: [F.interpolate(x, None, 2.0, mode=m) for m in ("nearest", "bilinear")],
              torch.randn(2, 3, n, 5, requires_grad=True), dynamic=True)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_whose_gradient_is_whose_at_sizes_known_only_at_the_call(mode: str) -> None:
    """Products of positions and scales round to either side of whole numbers: 41 / 123 and 49 / 5 do."""
    resized = torch.compile(lambda x, n: F.interpolate(x, n, mode=mode), backend="flambeau", dynamic=True)
    for n, m in ((5, 49), (49, 5), (41, 123), (123, 41), (83, 82), (3, 3)):
        x = torch.randn(2, 3, n, n + 1, dtype=torch.float64, requires_grad=True)
        eager = F.interpolate(x, (m, m + 2), mode=mode)
        g = torch.randn_like(eager)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, g)[0] for y in (resized(x, (m, m + 2)), eager)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_operators_stay_whole(dynamic: bool) -> None:
    """Torch would write upsampling as a dozen gathers, and its gradient as scatters."""
    seen: list[str] = []

    def compiler(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        names = [str(n.target) for n in gm.graph.nodes]
        seen.extend(n for n in names if "upsample" in n or "index" in n)
        return make_boxed_func(gm.forward)

    double = aot_function(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), fw_compiler=compiler,
                          bw_compiler=compiler, decompositions=table(False), dynamic=dynamic)
    with whole_operators():
        double(torch.randn(1, 2, 4, 4, requires_grad=True)).sum().backward()
    assert seen == ["aten.upsample_bilinear2d.default", "aten.upsample_bilinear2d_backward.default"]
