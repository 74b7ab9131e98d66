"""Embeddings against eager: bags of every mode, empty bags, padding, sample weights, bad indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from agreement import agree, through

WORDS = torch.tensor([1, 2, 2, 9, 0, 3, 2, 5])
BAGS = torch.tensor([0, 3, 3, 5])  # the second is empty
CLOSED = torch.tensor([0, 3, 3, 5, 8])


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(10, 4).to(dtype).requires_grad_()


def test_rows() -> None:
    i = torch.randint(0, 10, (3, 5))
    agree(lambda w, i: [F.embedding(i, w, p, scale_grad_by_freq=f)
                        for p in (None, 3, -1) for f in (False, True)], table(), i)
    agree(lambda w, i: (F.embedding(i.int(), w), F.embedding(i[0, 0], w), F.embedding(i[:0], w)), table(), i)


def test_rows_of_many_words_in_low_precision() -> None:
    """The gradient of a frequent word is summed wide and rounded once."""
    i = torch.zeros(1000, dtype=torch.int64)
    w = table(torch.bfloat16)
    out = through(lambda w, i: F.embedding(i, w))(w, i)
    grad, = torch.autograd.grad(out, w, torch.full_like(out, 0.01))
    assert grad[0, 0] == (torch.full((), 0.01).bfloat16().double() * 1000).bfloat16()


def test_rows_are_shortened() -> None:
    def shortened(w: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [torch.embedding_renorm_(w.clone(), i, 1.0, p) for p in (1.0, 2.0, 3.0)]

    agree(shortened, table().detach(), torch.randint(0, 10, (6,)))


def test_an_index_out_of_range_is_an_error() -> None:
    run = through(lambda w, i: F.embedding(i, w))
    for bad in (10, -1):
        with pytest.raises(IndexError):
            run(torch.randn(10, 4), torch.tensor([0, bad]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bags(mode: str, dtype: torch.dtype) -> None:
    def bags(w: torch.Tensor, i: torch.Tensor, opened: torch.Tensor, closed: torch.Tensor) -> list[Any]:
        return [F.embedding_bag(i.to(kind), w, (closed if last else opened).to(kind), mode=mode,
                                include_last_offset=last, padding_idx=pad)
                for kind in (torch.int64, torch.int32) for last in (False, True) for pad in (None, 2)]

    agree(bags, table(dtype), WORDS, BAGS, CLOSED)
    agree(bags, table(dtype).detach(), WORDS, BAGS, CLOSED)


def test_bags_of_equal_length() -> None:
    agree(lambda w, i: [F.embedding_bag(i.view(2, 4), w, mode=m) for m in ("sum", "mean", "max")],
          table(), WORDS)


def test_bags_with_a_weight_for_each_sample() -> None:
    agree(lambda w, s, i, o: [F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s, padding_idx=p)
                              for p in (None, 2)], table(), torch.randn(8, requires_grad=True), WORDS, BAGS)


def test_no_items_at_all() -> None:
    none = torch.empty(0, dtype=torch.int64)
    agree(lambda w, i, o: [F.embedding_bag(i, w, o, mode=m) for m in ("sum", "mean", "max")], table(), none,
          torch.tensor([0, 0]))


@pytest.mark.parametrize(("items", "offsets", "message"), [
    ([1, 10], [0], r"takes value 10 which is not in the valid range \[0, 10\)"),
    ([1, 2], [0, 3], "can not be greater")])
def test_a_bag_out_of_range_is_an_error(items: list[int], offsets: list[int], message: str) -> None:
    run = through(lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"))
    with pytest.raises(RuntimeError, match=message):
        run(torch.randn(10, 4), torch.tensor(items), torch.tensor(offsets))


def test_sizes_known_only_at_the_call() -> None:
    for n in (3, 8):
        agree(lambda w, i, o: [F.embedding_bag(i, w, o, mode=m) for m in ("sum", "mean", "max")],
              table(), WORDS[:n], BAGS[:2], dynamic=True)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("rows", [20, 2000])
@pytest.mark.parametrize("mode", ["sum", "weighted", "mean", "max", "rows"])
def test_gradients_of_words_that_repeat_are_closer_than_eagers(mode: str, rows: int) -> None:
    """Eager adds a row's gradients one by one in float32, in an order of its own."""

    def gradient(w: torch.Tensor, i: torch.Tensor, per: torch.Tensor) -> torch.Tensor:
        if mode == "rows":
            return torch.autograd.grad(F.embedding(i, w), w, per.outer(w[0].detach()))[0]
        out = F.embedding_bag(i, w, torch.arange(0, len(i), 8), mode="sum" if mode == "weighted" else mode,
                              per_sample_weights=per if mode == "weighted" else None)
        return torch.autograd.grad(out, w, out.detach() + per[::8, None])[0]

    torch.manual_seed(0)
    words, per = (torch.rand(4000) ** 3 * rows).long(), torch.rand(4000)
    w = torch.randn(rows, 4).requires_grad_()
    exact = gradient(w.detach().double().requires_grad_(), words, per.double())
    ours, eager = (error(f(w, words, per), exact) for f in (through(gradient), gradient))
    assert ours < 0.7 * eager


def test_weights_of_samples_are_taken_in_with_one_rounding() -> None:
    torch.manual_seed(0)
    w, i, per = torch.randn(500, 8), torch.randint(500, (40_000,)), torch.rand(40_000)

    def bags(w: torch.Tensor, i: torch.Tensor, per: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w, torch.arange(0, len(i), 16), mode="sum", per_sample_weights=per)

    def added(w: torch.Tensor, i: torch.Tensor, per: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(w).index_add(0, i[:4000], per[:4000, None] * w[0], alpha=0.3)

    for f in (bags, added):
        exact = f(w.double(), i, per.double())
        ours, eager = error(through(f)(w, i, per), exact), error(f(w, i, per), exact)
        assert ours <= 1.02 * eager, f.__name__
