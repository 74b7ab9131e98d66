"""Cumulative operators: NaNs and ties, precision over long rows, gradients, flips that cost nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch._functorch.aot_autograd import aot_function

import flambeau.debug
from agreement import agree, through
from flambeau.capture.decompositions import table
from flambeau.capture.kept_whole import whole_operators
from flambeau.ir.program import ScanKernel
from flambeau.pipeline import compile_graph

NAN, INF = math.nan, math.inf


def every_scan(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return x.cumsum(dim), x.cumprod(dim), *x.cummax(dim), *x.cummin(dim)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_every_dimension(dim: int) -> None:
    agree(lambda x: (*every_scan(x, dim), x.logcumsumexp(dim)), torch.randn(6, 7, 5, requires_grad=True))


def test_later_of_equals_and_latest_nan() -> None:
    x = torch.tensor([[1.0, 1.0, 0.0, 1.0, 2.0], [NAN, 3.0, NAN, 5.0, 1.0], [-INF, -INF, 1.0, INF, INF],
                      [0.0, NAN, 7.0, NAN, NAN]])
    agree(lambda x: (*every_scan(x, 1), *every_scan(x, 0)), x)
    agree(lambda x: every_scan(x, 1), torch.tensor([[3, 3, 1, 5, 5], [0, -1, -1, 0, 0]]))
    agree(lambda x: (*x.cummax(1), *x.cummin(1), x.cumsum(1)), torch.rand(3, 6) > 0.5)


def test_logcumsumexp_of_infinities() -> None:
    x = torch.tensor([[-INF, -INF, 1.0, 2.0], [INF, 1.0, INF, -INF], [NAN, 1.0, 2.0, 3.0],
                      [1.0, NAN, 2.0, 3.0], [1e3, 1e3, -1e3, 0.0], [-1e3, -INF, -999.0, -998.0]])
    agree(lambda x: (x.logcumsumexp(1), x.logcumsumexp(0)), x)


def test_dtypes() -> None:
    def fn(a, b, c):
        return (a.cumsum(0), a.cumsum(1, dtype=torch.float32), a.cumprod(0, dtype=torch.int16), b.cumsum(1),
                c.cumsum(0, dtype=torch.int32), c.cumprod(1, dtype=torch.float64))

    small = torch.randint(0, 9, (4, 5), dtype=torch.uint8)
    agree(fn, small, torch.rand(4, 5) > 0.5, 3 * torch.randn(4, 5))


def test_a_number_and_none() -> None:
    agree(lambda a, b: (*every_scan(a, 0), a.logcumsumexp(0), *every_scan(b, 1)), torch.tensor(2.0),
          torch.empty(3, 0))


def test_an_axis_of_one_element_is_no_scan() -> None:
    x = torch.randn(5, 1, 3, requires_grad=True)
    agree(lambda x: (*every_scan(x, 1), x.logcumsumexp(1)), x)
    with flambeau.debug.collect() as graphs:
        through(lambda x: every_scan(x, 1))(x.detach())
    assert not any(isinstance(k, ScanKernel) for g in graphs for k in g.program.kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_keep_their_digits(dtype: torch.dtype) -> None:
    x = torch.rand(2, 100_000).to(dtype)
    got = through(lambda x: (x.cumsum(1), x.logcumsumexp(1)))(x)
    torch.testing.assert_close(got, (x.double().cumsum(1).to(dtype), x.double().logcumsumexp(1).to(dtype)))


@pytest.mark.parametrize("dim", [0, 1])
def test_gradient_of_a_product_with_zeros(dim: int) -> None:
    x = torch.randn(6, 7)
    x[1, 2] = x[3, 1] = x[3, 5] = x[4, 0] = x[5, 6] = 0
    with whole_operators():
        agree(lambda x: x.cumprod(dim), x.requires_grad_())
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # before, eager's gradient mixes up the dtypes
            agree(lambda x: x.cumprod(dim, dtype=torch.float64), x)
        agree(lambda x: x.cumprod(0), torch.tensor(2.0, requires_grad=True))


def test_gradient_of_a_product_is_one_kernel() -> None:
    x = (1 + 0.01 * torch.randn(4, 70_000)).requires_grad_()
    kinds = []

    def compiler(gm: torch.fx.GraphModule, _: object) -> object:
        run = compile_graph(gm)
        kinds.append([type(k) for k in run.compiled.program.kernels])
        return run

    with whole_operators():
        fn = aot_function(lambda x: x.cumprod(1), fw_compiler=compiler, bw_compiler=compiler,
                          decompositions=table(False))
        grad, = torch.autograd.grad(fn(x), x, torch.ones_like(x))
    assert kinds == [[ScanKernel], [ScanKernel]]
    torch.testing.assert_close(grad, torch.autograd.grad(x.double().cumprod(1).sum(), x)[0], rtol=1e-4, atol=1e-5)


def test_a_reversed_scan_is_one_kernel() -> None:
    x = torch.randn(40, 50)
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: [x.flip(1).cumsum(1).flip(1)], table(False))(x)
    for n in gm.graph.nodes:
        if isinstance(n.meta.get("val"), torch.Tensor):
            n.meta["val"] = torch._subclasses.FakeTensorMode().from_tensor(torch.empty_strided(
                n.meta["val"].shape, n.meta["val"].stride()))
    run = compile_graph(gm)
    kernels = run.compiled.program.kernels
    assert sum(isinstance(k, ScanKernel) for k in kernels) == 1
    assert len(kernels) <= 2
    torch.testing.assert_close(run([x])[0], x.flip(1).cumsum(1).flip(1))
