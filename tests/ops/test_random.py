"""Random numbers: distributions, tails, ranges, independence, reproducibility."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from agreement import through

N = 200_000
Maker = Callable[[torch.Tensor], torch.Tensor]
Cdf = Callable[[torch.Tensor], torch.Tensor]

CONTINUOUS: dict[str, tuple[Maker, Cdf]] = {
    "rand": (torch.rand_like, lambda x: x),
    "uniform": (lambda t: t.clone().uniform_(-2, 3), lambda x: (x + 2) / 5),
    "randn": (torch.randn_like, torch.special.ndtr),
    "normal": (lambda t: torch.normal(t * 0 + 1, 2.0), lambda x: torch.special.ndtr((x - 1) / 2)),
    "log_normal": (lambda t: t.clone().log_normal_(0.5, 0.7),
                   lambda x: torch.special.ndtr((x.log() - 0.5) / 0.7)),
    "exponential": (lambda t: t.clone().exponential_(2.0), lambda x: -torch.expm1(-2 * x)),
    "cauchy": (lambda t: t.clone().cauchy_(1.0, 2.0), lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
}


def drawn(make: Maker, dtype: torch.dtype = torch.float32, n: int = N) -> torch.Tensor:
    torch.manual_seed(11)
    return through(make)(torch.zeros(n, dtype=dtype))


def distance(x: torch.Tensor, cdf: Cdf) -> float:
    """Kolmogorov and Smirnov's, in units in which 1.95 has a chance of one in a thousand."""
    p = cdf(x.double().sort().values)
    steps = torch.arange(x.numel() + 1, dtype=torch.float64) / x.numel()
    return float(torch.maximum(p - steps[:-1], steps[1:] - p).max() * math.sqrt(x.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_distributions(name: str, dtype: torch.dtype) -> None:
    make, cdf = CONTINUOUS[name]
    x = drawn(make, dtype)
    assert x.dtype is dtype and bool(x.isfinite().all())
    assert distance(x, cdf) < 1.95


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_floats_stay_below_one_and_fill_the_interval(dtype: torch.dtype) -> None:
    x = drawn(torch.rand_like, dtype)
    assert x.min() >= 0 and x.max() < 1
    digits = {torch.float16: 11, torch.bfloat16: 8}[dtype]
    assert x.unique().numel() > 2 * 2**digits  # near zero too
    assert abs(float(x.double().mean()) - 0.5) < 2.0**-digits + 3e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_uniform_numbers_stay_below_the_upper_end_and_fill_the_range(dtype: torch.dtype) -> None:
    for low, high in ((1, 2), (-2, -1), (-1, 0), (-100, 100)):
        x = drawn(lambda t, low=low, high=high: t.clone().uniform_(low, high), dtype)  # type: ignore[misc]
        assert x.min() >= low and x.max() < high
        assert abs(float(x.double().mean()) - (low + high) / 2) < 0.006 * (high - low)
    assert x.unique().numel() > {torch.bfloat16: 2000, torch.float16: 10000}.get(dtype, 0.9 * N)


def test_normal_tails() -> None:
    """As many beyond four sigma as there should be, and some that 24 bits could never reach."""
    x = drawn(torch.randn_like, n=4_000_000)
    beyond = int((x.abs() > 4).sum())
    expected = 4_000_000 * math.erfc(4 / math.sqrt(2))
    assert abs(beyond - expected) < 4 * math.sqrt(expected)


def test_doubles_have_all_their_bits() -> None:
    x = drawn(torch.rand_like, torch.float64)
    scaled = x * 2.0**53
    assert torch.equal(scaled, scaled.floor())
    assert abs(float((scaled % 2).mean()) - 0.5) < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_exponential_is_never_zero(dtype: torch.dtype) -> None:
    assert bool((drawn(lambda t: t.clone().exponential_(), dtype) > 0).all())


def test_coins() -> None:
    p = torch.linspace(0, 1, 5).repeat(40_000)
    torch.manual_seed(3)
    x = through(torch.bernoulli)(p).reshape(-1, 5).mean(0)
    torch.testing.assert_close(x, torch.linspace(0, 1, 5), atol=0.015, rtol=0)
    assert x[0] == 0 and x[4] == 1
    for dtype in (torch.float32, torch.int64, torch.bool):
        y = drawn(lambda t: t.clone().bernoulli_(0.3), dtype)
        assert y.dtype is dtype and abs(float(y.double().mean()) - 0.3) < 0.006


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_geometric_counts_from_one(dtype: torch.dtype) -> None:
    x = drawn(lambda t: t.clone().geometric_(0.3), dtype).double()
    assert x.min() == 1
    for k in (1, 2, 5):
        assert abs(float((x == k).double().mean()) - 0.3 * 0.7 ** (k - 1)) < 0.005


@pytest.mark.parametrize(("low", "high"), [(0, 10), (-7, 5), (0, 2**28 + 1), (-(2**40), 2**40),
                                           (0, 2**63 - 1), (-(2**63), 2**63 - 1), (-(2**62), 2**63 - 1)])
def test_integers_fill_their_range(low: int, high: int) -> None:
    x = drawn(lambda t: torch.randint(low, high, t.shape))
    assert x.dtype is torch.int64 and int(x.min()) >= low and int(x.max()) < high
    if high - low < 1000:
        counts = torch.bincount(x - low, minlength=high - low).double() / N
        assert float((counts * (high - low) - 1).abs().max()) < 0.05
    else:
        assert distance((x.double() - low) / (high - low), lambda u: u.clamp(0, 1)) < 1.95


def test_random_fills_the_whole_dtype() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(torch.uint8).random_(), x.to(torch.int64).random_(), x.to(torch.bool).random_(),
                x.to(torch.int32).random_(5), x.random_()]

    torch.manual_seed(5)
    byte, long, flag, small, real = through(fn)(torch.zeros(100_000))
    assert int(byte.min()) == 0 and int(byte.max()) == 255
    assert int(long.min()) >= 0 and int(long.max()) > 2**62
    assert abs(float(flag.double().mean()) - 0.5) < 0.01
    assert sorted(small.unique().tolist()) == [0, 1, 2, 3, 4]
    assert float(real.max()) > 2**23 and torch.equal(real, real.floor())


def test_two_draws_are_independent_and_runs_differ() -> None:
    f = through(lambda t: [torch.randn_like(t), torch.randn_like(t)])
    zeros = torch.zeros(N)
    torch.manual_seed(1)
    a, b = f(zeros)
    c, _ = f(zeros)
    for x, y in ((a, b), (a, c), (b, c)):
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 4 / math.sqrt(N)
    assert abs(float(torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1])) < 4 / math.sqrt(N)
    torch.manual_seed(1)
    again, _ = f(zeros)
    assert torch.equal(a, again)


def test_a_generator_of_ones_own_is_left_to_eager() -> None:
    """Its numbers are part of its contract."""
    g = torch.Generator()
    f = torch.compile(lambda x: x + torch.rand(4, generator=g), backend="flambeau")
    zeros = torch.zeros(4)
    first, second = f(zeros), f(zeros)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_dropout_drops_the_same_in_the_gradient(p: float) -> None:
    x = torch.rand(N, requires_grad=True)
    torch.manual_seed(0)
    y = through(lambda x: F.dropout(x, p, training=True))(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad * x, y)
    assert abs(float((y == 0).double().mean()) - p) < 0.005
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / (1 - p) if p < 1 else y[kept])


def test_dropout_is_nothing_in_evaluation() -> None:
    x = torch.randn(10)
    torch.testing.assert_close(through(lambda x: F.dropout(x, 0.5, training=False) + 0)(x), x)


def test_other_dropouts() -> None:
    torch.manual_seed(0)
    x = torch.ones(64, 32, 4, 4)
    planes = through(lambda x: F.dropout2d(x, 0.5))(x)
    assert set(planes.unique().tolist()) == {0.0, 2.0}
    assert bool(((planes == 0).all(-1).all(-1) | (planes == 2).all(-1).all(-1)).all())
    alpha = through(lambda x: F.alpha_dropout(x, 0.3, training=True))(torch.randn(N))
    assert abs(float(alpha.mean())) < 0.01 and abs(float(alpha.std()) - 1) < 0.01


def test_shapes_known_at_run_time() -> None:
    f = torch.compile(lambda x: torch.rand_like(x) + torch.randint(0, x.shape[0], x.shape),
                      backend="flambeau", dynamic=True)
    for n in (10, 1000):
        x = f(torch.zeros(n))
        assert x.shape == (n,) and x.min() >= 0 and x.max() < n
