"""What becomes one kernel, and what must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.codegen.c.kernel import render
from flambeau.ir.index import as_index
from flambeau.ir.program import LoopKernel
from flambeau.schedule.fusion.fuse import positions, refine
from schedule.programs import calls, launches, program, programs


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def gelu_block(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(x @ w + b) + r


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, training=True))


# name: (function, arguments, most kernels forward, most kernels backward)
ONE_KERNEL: dict[str, tuple[Callable[..., Any], list[Tensor], int, int]] = {
    "pointwise chain": (lambda x: ((x.exp() + 1).log() * x).tanh().sigmoid(), [leaf(64, 100)], 1, 1),
    "softmax": (lambda x: x.softmax(-1), [leaf(64, 100)], 1, 1),
    "softmax over columns": (lambda x: x.softmax(0), [leaf(64, 100)], 1, 1),
    "scaled and masked softmax": (lambda x: (x * 0.125).masked_fill(x > 2, -1e9).softmax(-1), [leaf(4, 64, 64)], 1, 1),
    "log softmax": (lambda x: x.log_softmax(-1), [leaf(64, 100)], 1, 1),
    "cross entropy": (F.cross_entropy, [leaf(64, 100), torch.zeros(64, dtype=torch.int64)], 3, 2),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (100,), w, b), [leaf(64, 100), leaf(100), leaf(100)], 1, 2),
    "residual and layer norm": (lambda x, y, w, b: F.layer_norm(x + y, (100,), w, b),
                                [leaf(64, 100), leaf(64, 100), leaf(100), leaf(100)], 1, 2),
    "rms norm": (rms_norm, [leaf(64, 100), leaf(100)], 1, 2),
    "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [leaf(8, 16, 6, 6), leaf(16), leaf(16)], 2, 5),
    "batch norm and relu": (batch_norm, [leaf(8, 16, 6, 6), leaf(16), leaf(16)], 2, 2),
    "bias, gelu, residual": (gelu_block, [leaf(32, 16), leaf(16, 24), leaf(24), leaf(32, 24)], 1, 2),
    "swiglu": (lambda a, b: F.silu(a) * b, [leaf(64, 100), leaf(64, 100)], 1, 1),
    "several results": (lambda x: (x.sin(), x.cos(), x.sum(1), x.amax(1), (x * 2).sum()), [leaf(64, 100)], 2, 2),
    "mean and variance": (lambda x: torch.var_mean(x, 1), [leaf(64, 100)], 1, 1),
    "mean squared error": (F.mse_loss, [leaf(64, 100), leaf(64, 100)], 1, 1),
    "views between": (lambda x: (x.view(8, 8, 100) * 2).reshape(64, 100).exp().view(-1), [leaf(64, 100)], 1, 1),
    "split heads": (lambda x: (x.view(4, 16, 5, 20).transpose(1, 2) * 2).contiguous(), [leaf(64, 100)], 1, 1),
    "rotary": (lambda x, c, s: x * c + torch.cat((-x[..., 50:], x[..., :50]), -1) * s,
               [leaf(64, 100), torch.randn(64, 100), torch.randn(64, 100)], 1, 2),
    "dropout": (lambda x: F.dropout(x.relu(), 0.5) + x, [leaf(64, 100)], 2, 1),
    "optimizer": (lambda p, g, m: (m.mul(0.9).add(g), p - 0.1 * m.mul(0.9).add(g)),
                  [torch.randn(500), torch.randn(500), torch.randn(500)], 1, 0),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_kernels_of(name: str) -> None:
    fn, args, forward, backward = ONE_KERNEL[name]
    made = programs(fn, *args)
    for p, most, which in zip(made, (forward, backward), ("forward", "backward"), strict=False):
        found = launches(p)
        assert len(found) <= most, f"{which}: {[k.origins for k in found]}"
        assert not [c for c in calls(p) if "mm" not in c], calls(p)


def test_equal_layers_share_kernels() -> None:
    def f(x: Tensor, *ws: Tensor) -> Tensor:
        for w in ws:
            x = F.gelu(F.layer_norm(x @ w, (32,)))
        return x

    p = program(f, torch.randn(16, 32), *(torch.randn(32, 32) for _ in range(5)))
    texts = {render(k, "k").text for k in launches(p)}
    assert len(launches(p)) == 5 and len(texts) == 1


# ---- what must not -------------------------------------------------------------------------------------


def test_a_transposed_read_of_what_the_group_writes_is_another_kernel() -> None:
    """Element (i, j) needs element (j, i), which another point of the same loop computes."""
    p = program(lambda x: (y := x.exp() * x.sin() * x.cos(), y + y.t())[1], torch.randn(64, 64))
    assert len(launches(p)) == 2


def test_a_shifted_read_is_another_kernel() -> None:
    p = program(lambda x: (y := x.exp() * x.sin() * x.cos(), y + y.roll(1, 0))[1], torch.randn(64, 64))
    assert len(launches(p)) == 2


def test_other_points_are_other_kernels() -> None:
    p = program(lambda x, y: (x.exp(), y.exp()), torch.randn(64, 100), torch.randn(64, 101))
    assert len(launches(p)) == 2


def test_a_reduction_over_other_axes_is_another_kernel() -> None:
    p = program(lambda x: (x.sum(0), x.sum(1)), torch.randn(64, 100))
    assert len(launches(p)) == 2


def test_a_reduction_of_the_whole_between_two_maps_splits_them_or_stages_them() -> None:
    """Every element needs the sum of all: the second map cannot run before the last point of the first."""
    p = program(lambda x: x / x.sum(), torch.randn(64, 100))
    for k in launches(p):
        assert isinstance(k, LoopKernel)
        for a, b in zip(k.stages, k.stages[1:], strict=False):
            assert a != b
    assert len(launches(p)) <= 2


def test_nothing_moves_across_a_call_that_it_depends_on() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.exp()
        q = torch.linalg.qr(y).R
        return y * q + x

    p = program(f, torch.randn(16, 16))
    order = [type(s).__name__ for s in p.steps]
    assert order == ["Launch", "Call", "Launch"]


# ---- regrouping dimensions -----------------------------------------------------------------------------


def idx(*sizes: int) -> tuple[Any, ...]:
    return tuple(map(as_index, sizes))


@pytest.mark.parametrize(("a", "b", "fine"), [
    ((6, 4), (6, 4), (6, 4)), ((24,), (6, 4), (6, 4)), ((6, 4), (2, 3, 4), (2, 3, 4)), ((6, 4), (2, 12), (2, 3, 4)),
    ((6, 4), (4, 6), None), ((6, 4), (5, 5), None), ((6, 4), (6, 5), None), ((0, 4), (4, 0), None), ((), (), ()),
    ((8, 9, 10), (72, 10), (8, 9, 10)), ((8, 9, 10), (8, 90), (8, 9, 10)), ((12, 12), (9, 16), None),
])
def test_refine(a: tuple[int, ...], b: tuple[int, ...], fine: tuple[int, ...] | None) -> None:
    expected = None if fine is None else idx(*fine)
    assert refine(idx(*a), idx(*b)) == expected
    assert refine(idx(*b), idx(*a)) == expected
    if expected is not None:
        for sizes in (a, b):
            spots = positions(idx(*sizes), expected)
            assert spots is not None and [p for s in spots for p in s] == list(range(len(expected)))
