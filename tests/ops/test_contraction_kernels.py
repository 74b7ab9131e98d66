"""Contractions as kernels of our own: in C++, and in OpenCL C in the shape for CPUs and in that for GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from agreement import agree, through
from flambeau.config import config
from flambeau.ir.program import Call, ContractKernel, Copy, Launch
from flambeau.pipeline import compile_graph
from opencl_forms import FORMS


@pytest.fixture(params=["cpu-alone", "interpreter", *FORMS])
def on(request: pytest.FixtureRequest) -> Iterator[str]:
    with config.override(target=request.param, contractions="own"):
        yield request.param


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """In double precision, so that the order of sums is not what a test is about."""
    return torch.randn(*shape, dtype=dtype)


def steps(fn, *args: torch.Tensor) -> list:
    """The kernels and calls of fn's program, in their order."""
    gm = make_fx(lambda *a: [fn(*a)], tracing_mode="fake")(*args)
    program = compile_graph(gm).compiled.program
    return [program.kernels[s.kernel] if isinstance(s, Launch) else s for s in program.steps]


def test_products_in_all_layouts(on: str) -> None:
    agree(lambda a, b, c: (a @ b, a.t()[:33] @ c[:, ::2], b.t() @ a.t(), (a @ b)[:, :7] @ c[:7]),
          random(70, 33), random(33, 45), random(70, 46))


def test_gradients(on: str) -> None:
    agree(lambda a, b: a @ b, random(70, 33).requires_grad_(), random(33, 45).requires_grad_())


def test_blocks_that_are_not_filled(on: str) -> None:
    agree(lambda a, b: a @ b, random(201, 261), random(261, 273))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_dtypes(on: str, dtype: torch.dtype) -> None:
    agree(lambda a, b: a @ b, random(19, 33, dtype=dtype), random(33, 21, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_wrap_around(on: str, dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    a = torch.randint(0, top, (19, 23), dtype=dtype)
    agree(lambda a: (a @ a.t(), torch.addmm(a[:, :19], a, a.t())), a)


def test_batches(on: str) -> None:
    agree(lambda a, b, c: (torch.bmm(a, b), torch.baddbmm(c, a, b, beta=0.5, alpha=2), torch.addbmm(c[0], a, b),
                           a @ b[:1].expand(3, 33, 45)),
          random(3, 20, 33), random(3, 33, 45), random(3, 20, 45))


def test_factors_that_are_the_same_along_a_dimension(on: str) -> None:
    one = torch.ones((), dtype=torch.float64)
    for fn, *args in ((lambda a, b: (a @ b, b.t() @ a.t(), a @ a[:9].t()), one.expand(20, 33), random(33, 45)),
                      (lambda a, b: (a @ b,), random(1, 33).expand(20, 33), random(33, 1).expand(33, 45)),
                      (lambda a, b: (a @ b,), one.expand(3, 20, 33), random(33, 45).expand(3, 33, 45))):
        torch.testing.assert_close(through(fn)(*args), fn(*args))


def test_nothing_to_sum_or_to_compute(on: str) -> None:
    agree(lambda a, b, c: (a @ b, torch.addmm(c, a, b, beta=3), a[:0] @ b, a @ b[:, :0]),
          random(5, 0), random(0, 7), random(5, 7))


@pytest.mark.parametrize("on", FORMS, indirect=True)  # threads of C++ share rows and columns alone
def test_sums_over_few_results_are_cut_into_pieces(on: str) -> None:
    a, b = random(9, 5003), random(5003, 11)
    agree(lambda a, b: a @ b, a, b)
    first, *_ = steps(lambda a, b: a @ b, a, b)
    assert isinstance(first, ContractKernel) and first.batch


def test_pieces_are_as_long_as_the_sizes_of_a_call_say(on: str) -> None:
    run = through(lambda a, b: (a @ b).relu(), dynamic=True)
    for m, k, n in (9, 5003, 11), (12, 5120, 10), (3, 70, 20), (5, 12001, 7):
        a, b = random(m, k), random(k, n)
        torch.testing.assert_close(run(a, b), (a @ b).relu())


def test_nan_and_infinity_reach_their_results_only(on: str) -> None:
    a, b = torch.randn(20, 30), torch.randn(30, 40)
    a[3, 4], b[7, 8], b[9, 10] = math.nan, math.inf, -math.inf
    agree(lambda a, b: a @ b, a, b)
    agree(lambda a, b, c: torch.addmm(c, a, b, beta=0), torch.randn(4, 5), torch.randn(5, 6),
          torch.full((6,), math.nan))


def test_what_comes_before_and_after_is_part_of_the_kernel(on: str) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x * 2, w.float(), b))

    x, w, b = torch.randn(4, 10, 33), torch.randn(45, 33, dtype=torch.bfloat16), torch.randn(45)
    kernel, = steps(layer, x, w, b)
    assert isinstance(kernel, ContractKernel) and len(kernel.params) == 4
    agree(layer, x, w, b)


def test_sizes_known_only_at_the_call(on: str) -> None:
    run = through(lambda a, b: (a @ b).relu(), dynamic=True)
    for m, k, n in (70, 33, 45), (7, 300, 20):
        a, b = random(m, k), random(k, n)
        torch.testing.assert_close(run(a, b), (a @ b).relu())


def test_few_rows_times_weights_along_the_depth() -> None:
    """On CPUs the weights are read where they are: rows of any number, depths that no vector divides, gaps, batches."""
    with config.override(target="cpu-alone", contractions="own"):
        for m, k, n in ((2, 100, 7), (3, 31, 1), (5, 2500, 33), (11, 1037, 70), (12, 128, 5)):
            x, w, b = random(m, k), random(n, 2 * k), random(n)
            agree(lambda x, w, b: F.linear(x.relu(), w, b).sin(), x, w[:, :k], b)
            agree(lambda x, w: w @ x.t(), x, w[:, k:])
            exact = F.linear(x, w[:, :k], b)
            found = through(lambda x, w, b: F.linear(x, w, b))(x.float(), w[:, :k].float(), b.float())
            assert (found - exact).abs().max() <= 1e-7 * k * exact.abs().max()
        agree(lambda x, w: x.float() @ w.mT, random(3, 4, 65, dtype=torch.bfloat16), torch.randn(3, 9, 65))
        x, w = torch.randn(4, 70), torch.randn(6, 70)
        x[1, 69], w[5, 3] = math.nan, math.inf
        agree(lambda x, w: F.linear(x, w), x, w)
        run = through(lambda x, w: F.linear(x, w), dynamic=True)
        for m in (3, 60, 1, 4):
            x, w = random(m, 133), random(21, 133)
            torch.testing.assert_close(run(x, w), x @ w.t())


def test_updates_in_place_unless_a_factor_is_updated(on: str) -> None:
    x, w = random(9, 12), random(12, 12)
    gm = make_fx(lambda x, w: [x.copy_(torch.addmm(x, x, w))], tracing_mode="fake")(x, w)
    other = make_fx(lambda x, a, w: [x.copy_(torch.addmm(x, a, w))], tracing_mode="fake")(x, x.clone(), w)
    for graph, args, copies in (gm, [x.clone(), w], 1), (other, [x.clone(), x, w], 0):
        y = args[0]
        run = compile_graph(graph)
        run(args)
        torch.testing.assert_close(y, x + x @ w)
        assert sum(isinstance(s, Copy) for s in run.compiled.program.steps) == copies


def test_thin_products_are_plain_reductions(on: str) -> None:
    agree(lambda a, b: (a[:1] @ b, a @ b[:, :1]), random(20, 33), random(33, 45))
    assert not any(isinstance(s, ContractKernel | Call)
                   for s in steps(lambda a, b: a @ b, torch.randn(1, 33), torch.randn(33, 45)))
