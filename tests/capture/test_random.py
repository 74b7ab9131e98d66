"""Random operators under torch.compile: seeded by torch, counted by element, the same again where it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compile.beside_eager import compiled
from threads import threads

pytestmark = pytest.mark.filterwarnings("error:flambeau:RuntimeWarning")


def draw(x: Tensor) -> tuple[Tensor, ...]:
    return (F.dropout(x, 0.3), torch.rand_like(x), torch.randn(x.shape), torch.randint(1000, x.shape),
            torch.bernoulli(x.sigmoid()), x.clone().exponential_())


def seeded(fn: Callable[..., tuple[Tensor, ...]], *args: Tensor, seed: int = 5) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return fn(*args)


def test_draws_follow_the_seed_and_nothing_else() -> None:
    x = torch.randn(300, 257)
    c = compiled(draw)
    first = seeded(c, x)
    for a, b in zip(first, seeded(c, x), strict=True):
        assert torch.equal(a, b)
    for a, b, other in zip(first, c(x), seeded(c, x, seed=6), strict=True):
        assert not torch.equal(a, b), "the next call draws anew"
        assert not torch.equal(a, other)
    for n in (1, 2):
        with threads(n):
            for a, b in zip(first, seeded(c, x), strict=True):
                assert torch.equal(a, b), f"{n} threads"
    for a, b in zip(first, seeded(compiled(draw), x), strict=True):
        assert torch.equal(a, b), "compiled again"


def test_two_draws_of_one_call_are_independent() -> None:
    c = compiled(lambda: (torch.rand(20000), torch.rand(20000)))
    a, b = c()
    assert not torch.equal(a, b)
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.03


def test_distributions() -> None:
    x = torch.ones(100_000)
    dropped, uniform, normal, whole, coin, waits = seeded(compiled(draw), x)
    assert set(dropped.unique().tolist()) == {0.0, (x / 0.7)[0].item()}
    assert abs((dropped == 0).float().mean() - 0.3) < 0.01
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    assert whole.min() == 0 and whole.max() == 999
    assert abs(coin.mean() - x[0].sigmoid()) < 0.01
    assert waits.min() > 0 and abs(waits.mean() - 1) < 0.02


def test_backward_uses_the_mask_of_its_forward() -> None:
    x = torch.randn(64, 33, requires_grad=True)
    y = compiled(lambda x: F.dropout(x * 2, 0.5))(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.where(y == 0, 0.0, 4.0))
    y = compiled(lambda x: F.dropout(x, 0.5, training=False))(x)
    assert torch.equal(y, x)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(p: float) -> None:
    x = torch.randn(8, 9, requires_grad=True)
    y = compiled(lambda x: F.dropout(x, p))(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x * (1 - p)) and torch.equal(grad, torch.full_like(x, 1 - p))


def test_checkpoint_recomputes_the_same_mask() -> None:
    """Activation checkpointing runs the forward again in backward: dropout must drop the same elements."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout((x * w).tanh(), 0.5).sin(), x, use_reentrant=False)

    x, w = torch.randn(64, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    torch.manual_seed(3)
    y = compiled(f)(x, w)
    gx, gw = torch.autograd.grad(y.sum(), (x, w))
    inner = (x * w).tanh().detach()
    kept = y.detach() != 0
    slope = torch.where(kept, (inner * 2).cos() * 2 * (1 - inner * inner), 0.0)
    torch.testing.assert_close(y.detach(), torch.where(kept, (inner * 2).sin(), 0.0))
    torch.testing.assert_close(gx, slope * w)
    torch.testing.assert_close(gw, (slope * x).sum(0))


def test_eager_generators_are_left_in_step() -> None:
    """A compiled draw moves torch's generator, so that eager draws after it are not those before it."""
    c = compiled(lambda x: F.dropout(x, 0.5))
    torch.manual_seed(1)
    before = torch.rand(4)
    torch.manual_seed(1)
    c(torch.ones(4))
    assert not torch.equal(torch.rand(4), before)


def test_a_module_with_dropout_trains() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))
    c = compiled(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    x = torch.randn(256, 8)
    target = x.sum(1, keepdim=True)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(c(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    net.eval()
    assert torch.equal(c(x), c(x))
