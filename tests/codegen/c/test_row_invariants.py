"""What many rows share is found once for a block of points: in maps, in reductions of columns, before scatters."""

from __future__ import annotations

import pytest
import torch

from codegen.programs import built
from flambeau.ir import build
from flambeau.ir.expr import cast, computed, const, index_value, where
from flambeau.ir.nodes import Value
from flambeau.ir.scalar import exp, floor, sin
from threads import threads

POINTS = (1, 64, 700)


def sampled(x: Value, at: Value, i: tuple):  # type: ignore[no-untyped-def, type-arg]
    """x at a real position, zero outside, times a weight that is expensive to compute."""
    place = floor(sin(at.load((i[-1],))) * 12)
    inside = (place >= 0) & (place < x.shape[1].const)
    j = computed(cast(place, torch.int32), 0, x.shape[1].const - 1)
    return where(inside, x.load((i[0], j), inside), 0) * exp(at.load((i[-1],)))


def expected(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    place = (at.sin() * 12).floor().long()
    inside = (place >= 0) & (place < x.shape[1])
    return torch.where(inside, x[:, place.clamp(0, x.shape[1] - 1)], 0) * at.exp()


@pytest.mark.parametrize("points", POINTS)
def test_rows_of_a_map(points: int) -> None:
    x, at = torch.randn(5, 9), torch.randn(points)
    b = built(lambda x, at: [build.pointwise((x.shape[0], at.shape[0]), lambda i: sampled(x, at, i))], x, at)
    torch.testing.assert_close(b(x, at)[0], expected(x, at))
    if points > 8:
        text, = b.texts
        assert text.index("fl::exp") < text.rindex("for (int64_t")  # before the loop over rows


@pytest.mark.parametrize("points", POINTS)
def test_rows_of_a_reduction(points: int) -> None:
    x, at = torch.randn(5, 9), torch.randn(points)
    total = build.simple_combine("sum", torch.float32)
    b = built(lambda x, at: build.reduce((x.shape[0], at.shape[0]), [0], total, lambda i: sampled(x, at, i)), x, at)
    torch.testing.assert_close(b(x, at)[0], expected(x, at).sum(0))


@pytest.mark.parametrize("points", [1, 64, 5000])
def test_scatters_find_their_places_first(points: int) -> None:
    at, g = torch.randn(points), torch.randn(20, points)

    def make(at: Value, g: Value) -> list[Value]:
        def tap(j: tuple):  # type: ignore[no-untyped-def, type-arg]
            return floor(sin(at.load((j[1],))) * 12) + index_value(j[2], torch.float32)

        return [build.scatter(
            (g.shape[0], 9), lambda _: const(0, torch.float32), (*g.shape, 2),
            lambda j: (j[0], computed(cast(tap(j), torch.int32), 0, 8)),
            lambda j: g.load(j[:2]) * exp(at.load((j[1],))), "add", lambda j: (tap(j) >= 0) & (tap(j) < 9))]

    b = built(make, at, g)
    out, = b(at, g)
    exact = torch.zeros(20, 9, dtype=torch.float64)
    for k in range(2):
        place = (at.sin() * 12).floor().long() + k
        inside = (place >= 0) & (place < 9)
        exact.index_add_(1, place[inside], (g.double() * at.double().exp())[:, inside])
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    with threads(1):
        assert torch.equal(b(at, g)[0], out)
