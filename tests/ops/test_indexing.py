"""Reads at computed places: where the common shape stands, negative and wrong indices, run-time sizes."""

from __future__ import annotations

import pytest
import torch

from agreement import agree, through

aten = torch.ops.aten


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


def test_the_common_shape_stands_where_numpy_puts_it() -> None:
    i, j = torch.tensor([[2, 0], [1, -1]]), torch.tensor([1, -2])

    def fn(x, i, j):
        return (x[i], x[:, i, j], x[i, :, j], x[:, j, :, i], x[..., j], x[None, j, 1:, i],
                aten.index(x, [None, j[0]]), x[j, i.int(), j[:, None]], x[i, 0])

    agree(fn, leaf(3, 4, 5, 3), i, j)


def test_gather_and_its_kin() -> None:
    def fn(x, i):
        return (x.gather(1, i), x.gather(-2, i[:2, :3]), x.index_select(1, i[0]),
                x[0].index_select(-1, i[1, 1]), x[0, 0].index_select(0, i[2, 2]), x.take(i - 7),
                x[0, 0].gather(0, i[2, 2]),
                x.take_along_dim(i, 1), x.gather(0, i[:0]), aten._unsafe_index(x, [None, i[0]]))

    agree(fn, leaf(3, 4), torch.tensor([[1, 2, 0], [2, 1, 0], [1, 0, 0]]))


def test_run_time_sizes() -> None:
    for n in (4, 9):
        i = torch.randint(-n, n, (n + 1,))
        agree(lambda x, i: (x[i], x.gather(0, i.abs()[:, None] % x.shape[0]), x.take(i)), leaf(n, 3), i,
              dynamic=True)


WRONG = {
    "index": (lambda x, i: x[i] * 2, [4, -5]),
    "index_second": (lambda x, i: x[:, i] * 2, [3, -4]),
    "gather": (lambda x, i: x.gather(0, i[:, None].expand(-1, 3)) * 2, [4, -1]),
    "index_select": (lambda x, i: x.index_select(1, i) * 2, [3, -1]),
    "take": (lambda x, i: x.take(i) * 2, [12, -13]),
    "index_put": (lambda x, i: x.index_put([i], x[:2]) * 2, [4, -5]),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]) * 2, [4, -1]),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2]) * 2, [4, -1]),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0) * 2, [4, -5]),
    "scatter": (lambda x, i: x.scatter(0, i[:, None], x) * 2, [4, -1]),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[:, None], x) * 2, [4, -1]),
    "put": (lambda x, i: x.put(i, x[0, :2]) * 2, [12, -13]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_indices_are_reported(name: str) -> None:
    fn, wrong = WRONG[name]
    compiled = through(fn)
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x, torch.tensor([1, 0])), fn(x, torch.tensor([1, 0])))
    for bad in wrong:
        with pytest.raises((IndexError, RuntimeError)) as eager:
            fn(x, torch.tensor([0, bad]))
        with pytest.raises(eager.type, match="out of"):
            compiled(x, torch.tensor([0, bad]))


def test_masks_are_left_to_aten() -> None:
    """How many elements they choose is known only when they have run."""
    from flambeau.ir import build
    from flambeau.ir.nodes import Graph
    from flambeau.ops.indexing import index

    g = Graph()
    x, m = g.add_input([4], torch.float32), g.add_input([4], torch.bool)
    with build.building(g):
        assert index(x, [m]) is NotImplemented
