"""Writes at computed places: order, accumulation, masks, corners that OpInfo does not sample."""

from __future__ import annotations

import pytest
import torch

import flambeau.debug
from agreement import agree, through

aten = torch.ops.aten


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


def test_the_last_write_wins() -> None:
    x, i = torch.zeros(3, 2), torch.tensor([1, 0, 1, 1, 0])
    source = torch.arange(10.0).reshape(5, 2)

    def fn(x, i, s):
        return x.index_put([i], s), x.index_copy(0, i, s), x.scatter(0, i[:, None].expand(-1, 2), s)

    for out in through(fn)(x, i, source):
        assert torch.equal(out, torch.tensor([[8.0, 9.0], [6.0, 7.0], [0.0, 0.0]]))


def test_index_put() -> None:
    def fn(x, v, i, j):
        a = x.index_put([i, j], v)
        b = aten.index_put(x, [None, i, None, j], v[0, 0])
        c = x.index_put([i], v[0, 0], accumulate=True)
        d = aten.index_put(x, [j, None, i], v, True)
        return a, b, c, d, aten._unsafe_index_put(x, [i, j - 2], v, True)

    agree(fn, leaf(3, 4, 3, 5), leaf(2, 2, 1, 1),
          torch.tensor([[2, 0], [1, 2]]), torch.tensor([1, -2]))


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_at_a_mask(accumulate: bool) -> None:
    def fn(x, m, v, many):
        return (x.index_put([m], v[0], accumulate), x.index_put([m[0]], v, accumulate),
                aten.index_put(x, [None, m[0]], v[0], accumulate), x.index_put([m], many, accumulate))

    m = torch.rand(5, 5) > 0.5
    m[0] = torch.tensor([True, False, True, True, False])
    agree(fn, torch.randn(5, 5), m, torch.randn(5), torch.randn(int(m.sum())))


def test_whole_slices() -> None:
    def fn(x, s, i):
        return (x.index_add(1, i, s, alpha=2), x.index_copy(1, i, s), x.index_fill(0, i[:2] - 2, 3.0),
                x[0, 0].index_add(0, i[0], s[0, 0]), x[0].index_add(0, i[1], s[0, :1]))

    agree(fn, leaf(3, 4), leaf(3, 3), torch.tensor([0, 3, 1]))


def test_integers_and_bools() -> None:
    def fn(x, b, i, s):
        return (x.index_add(0, i, s, alpha=3), x.scatter_add(0, i, s), x.scatter(0, i, 7, reduce="multiply"),
                x.scatter_reduce(0, i, s, "mean"), x.scatter_reduce(0, i, s, "amin", include_self=False),
                b.index_put([i], s > 2, accumulate=True), b.scatter(0, i, True), x.index_fill(0, i, -5),
                x.to(torch.uint8).index_add(0, i, s.to(torch.uint8) * 100))

    agree(fn, torch.arange(-3, 4), torch.tensor([True, False] * 3 + [False]), torch.tensor([1, 1, 6, 0]),
          torch.tensor([5, 0, 9, 2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_summed_in_float32(dtype: torch.dtype) -> None:
    """A thousand halves of one added to 2048 in half precision would stay 2048."""
    x = torch.tensor([2048.0, 0.0], dtype=dtype)
    i, s = torch.zeros(1000, dtype=torch.int64), torch.full((1000,), 0.5, dtype=dtype)

    def fn(x, i, s):
        return x.index_add(0, i, s), x.scatter_add(0, i, s), x.index_put([i], s, True)

    for y in through(fn)(x, i, s):
        assert torch.equal(y, torch.tensor([2548.0, 0.0], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_few_small_floats_are_put_as_in_eager(dtype: torch.dtype) -> None:
    """Eager's index_put rounds at each write: it need not widen all other elements. Its index_add does not."""
    x, i, s = torch.randn(64, 8).to(dtype), torch.tensor([3, 9, 3, 3]), torch.randn(4, 8).to(dtype)
    for fn, rounds in ((lambda x, i, s: x.index_put([i], s, True), True),
                       (lambda x, i, s: x.index_add(0, i, s), False)):
        torch.compiler.reset()
        with flambeau.debug.collect() as graphs:
            got = torch.compile(fn, backend="flambeau")(x, i, s)
        assert torch.equal(got, fn(x, i, s))
        assert any("float*" in t.text for g in graphs for t in g.texts) != rounds


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_reductions_with_nan_and_untouched_elements(reduce: str, include_self: bool) -> None:
    x, i = torch.tensor([1.5, -2.0, 0.5, 4.0]), torch.tensor([2, 0, 2, 0, 0])
    source = torch.tensor([3.0, float("nan"), -1.0, 2.0, 8.0])

    def fn(x, i, s):
        out = [x.scatter_reduce(0, i, s, reduce, include_self=include_self)]
        if reduce != "sum":
            out.append(x.index_reduce(0, i, s.nan_to_num(5.0), reduce, include_self=include_self))
        return out

    agree(fn, x, i, source)


def test_masked_scatter_and_put() -> None:
    def fn(x, m, s, i):
        return (x.masked_scatter(m, s), x.masked_scatter(m[0], s), x.put(i - 6, s[0, :3]),
                x.put(i, s[1, :3], True))

    agree(fn, leaf(4, 5), torch.rand(4, 5) > 0.5, leaf(5, 6), torch.tensor([3, 1, 3]))


def test_a_short_source_is_reported() -> None:
    compiled = through(lambda x, m, s: x.masked_scatter(m, s) * 2)
    with pytest.raises(RuntimeError, match="Number of elements of source < number of ones in mask"):
        compiled(torch.zeros(5), torch.ones(5, dtype=torch.bool), torch.randn(3))


def test_repeat_interleave_of_a_known_size() -> None:
    repeats = torch.tensor([2, 0, 1, 4, 0])
    agree(lambda x, r: x.repeat_interleave(r, dim=0, output_size=7) * 2, leaf(5, 2), repeats)


def test_run_time_sizes() -> None:
    for n in (4, 7):
        i = torch.randint(0, n, (n + 2,))
        agree(lambda x, i, s: (x.index_add(0, i, s), x.scatter_add(0, i[:, None].expand_as(s), s),
                               x.index_put([i], s[0])), leaf(n, 3), i, leaf(n + 2, 3), dynamic=True)
