"""Reductions where the samples of OpInfo do not look: NaNs, ties, empty inputs, numbers far from zero."""

from __future__ import annotations

import math

import pytest
import torch

from agreement import agree, through

NAN, INF = math.nan, math.inf


def test_integers_add_up_in_int64_unless_asked() -> None:
    def fn(a, b, c):
        return (a.sum(), a.prod(0), a.sum(1, dtype=torch.int8), b.sum(0), b.prod(),
                b.sum(dtype=torch.float32), c.sum(dtype=torch.int32),
                c.prod(1, keepdim=True, dtype=torch.float64))

    integers = torch.randint(-128, 127, (6, 7), dtype=torch.int8)
    agree(fn, integers, torch.rand(6, 7) > 0.2, 3 * torch.randn(6, 7))


def test_truth_of_bytes_is_a_byte() -> None:
    def fn(a, b):
        return (a.any(), a.all(1), a.any(0, keepdim=True), b.any(1), b.all(), torch.any(b, (0, 1)),
                torch.all(b, (1,)))

    numbers = torch.tensor([[0.0, NAN], [0.0, 0.0], [1.0, -INF]])
    agree(fn, torch.randint(0, 2, (4, 5), dtype=torch.uint8), numbers)


def test_first_of_equals_and_first_nan() -> None:
    def fn(x):
        return (x.max(1), x.min(0), x.argmax(), x.argmin(), x.argmax(0, keepdim=True), x.argmin(1), x.amax(0),
                x.amin((0, 1)), x.aminmax(dim=1), x.max(), x.min(), x.argmax(keepdim=True))

    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-INF] * 4, [2.0, 2.0, 5.0, 2.0], [INF, 1.0, INF, INF]])
    agree(fn, x)
    x[2, 1] = x[3, 3] = x[2, 3] = NAN
    agree(fn, x)
    agree(fn, torch.tensor([[4, 4, 1], [1, 4, 1], [0, 0, 0]]))
    agree(fn, x.to(torch.bfloat16))


def test_a_number_is_one_dimension() -> None:
    def fn(x):
        return (x.max(0), x.sum(-1), x.argmax(), x.mean(0), x.var(0, correction=0), x.prod(0), x.any(0),
                x.norm(3))

    agree(fn, torch.tensor(2.5, requires_grad=True))


def test_nothing_to_reduce() -> None:
    def fn(x):
        return (x.sum(), x.sum(1), x.prod(1), x.mean(1), x.any(), x.all(1), x.var(1), x.sum(0), x.amax(0),
                torch.linalg.vector_norm(x, 2, dim=1), x.logsumexp(1))

    agree(fn, torch.empty(3, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variance_far_from_zero(dtype: torch.dtype) -> None:
    """The mean is taken off first: E[x^2] - E[x]^2 would have no digit left."""
    x = (1000 + torch.randn(64, 333)).to(dtype)
    got = through(lambda x: (*torch.var_mean(x, 1), x.var(), x.std((0, 1), correction=2.5)))(x)
    wide = x.double()
    want = (*torch.var_mean(wide, 1), wide.var(), wide.std((0, 1), correction=2.5))
    torch.testing.assert_close(got, tuple(w.to(dtype) for w in want))


@pytest.mark.parametrize("axis", [0, 1])
def test_variance_errs_no_more_than_that_of_eager(axis: int) -> None:
    """On the CPU eager accumulates it in float64."""
    x = torch.randn(1100, 1000) + 3
    got, eager = through(lambda x: torch.std_mean(x, axis))(x), torch.std_mean(x, axis)
    for a, b, exact in zip(got, eager, torch.std_mean(x.double(), axis), strict=True):
        assert (a - exact).square().mean() <= 1.05 * (b - exact).square().mean()


def test_variance_without_freedom() -> None:
    def fn(x):
        return (x.var(1), x.var(1, correction=0), x.var(0, correction=5), x.std(0, correction=3.5),
                torch.std_mean(x, 1))

    agree(fn, torch.tensor([[1.0], [2.0], [4.0]]))
    agree(fn, torch.zeros(3, 1))


def test_logsumexp_of_infinities() -> None:
    x = torch.tensor([[-INF, -INF], [INF, 1.0], [NAN, 1.0], [INF, -INF], [1e3, 1e3], [-1e3, -1001.0]])
    agree(lambda x: (x.logsumexp(1), x.logsumexp((0, 1)), x.logsumexp(0, keepdim=True)), x)
    agree(lambda x: x.logsumexp(0), torch.arange(6).reshape(2, 3))


def test_norms() -> None:
    norm = torch.linalg.vector_norm

    def fn(x):
        return [(norm(x, p), norm(x, p, dim=(0, 2)), norm(x, p, dim=1, keepdim=True))
                for p in (0, 0.5, 1, 2, 3.5, -1, INF, -INF)] + [norm(x, dtype=torch.float64)]

    x = torch.randn(3, 4, 5)
    agree(fn, x.clone().requires_grad_())
    x[1, 2, 3] = NAN
    agree(fn, x)


def test_hash() -> None:
    def fn(a, b):
        return torch.hash_tensor(a), torch.hash_tensor(a, dim=0), torch.hash_tensor(b, dim=1, keepdim=True)

    agree(fn, torch.randn(7, 5), torch.randint(-100, 100, (3, 9), dtype=torch.int8))


def test_sizes_known_only_at_the_call() -> None:
    def fn(x, y):
        return x.mean(0), x.sum((0, 1)), x.amax(1), x.norm(), y.argmax(), y.var(1), y.std()

    for n in (5, 9):
        agree(fn, torch.randn(n, 12, requires_grad=True), torch.randn(n, 12), dynamic=True)


@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_norms_along_dimensions_of_one_element_counted_from_the_end(numerics: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 traces them: such a dimension stays."""
    norm = torch.ops.aten.linalg_vector_norm.default
    traced = norm.py_kernels[torch._C.DispatchKey.Meta]

    def kept(x: torch.Tensor, ord: float = 2, dim: list[int] | None = None, keepdim: bool = False, *,
             dtype: torch.dtype | None = None) -> torch.Tensor:
        keepdim |= dim is not None and all(d < 0 and x.shape[d] == 1 for d in dim)
        return traced(x, ord, dim, keepdim, dtype=dtype)

    monkeypatch.setitem(norm.py_kernels, torch._C.DispatchKey.Meta, kept)
    norm._dispatch_cache.clear()
    try:
        x = torch.randn(3, 2, 1)
        options = {"numerics": numerics}
        made = torch.compile(lambda x: x.norm(2, (-1,)) * 2, backend="flambeau", options=options)(x)
    finally:
        norm._dispatch_cache.clear()
    torch.testing.assert_close(made, x.norm(2, (-1,)) * 2)
    assert made.shape == (3, 2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_norm_of_one_element_is_its_size(dynamic: bool) -> None:
    norm = torch.linalg.vector_norm

    def fn(x):
        return [(norm(x, p, dim=1), norm(x, p, dim=(1, 2)), norm(x[:, :, :1], p, dim=(1, 2)))
                for p in (0, 1, 2, -41, 3e8)]

    compiled = torch.compile(fn, backend="flambeau", dynamic=dynamic)
    for x in (torch.randn(5, 3, 2), torch.tensor([0.1, -1e30, 1e-30, INF, float("nan"), 0, 2]).view(7, 1, 1)):
        torch.testing.assert_close(compiled(x), fn(x), equal_nan=True)
