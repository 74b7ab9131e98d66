"""The search for repeated stretches of a sequence: which are found, where they are cut, and that none overlap."""

from __future__ import annotations

import random

import pytest

from flambeau.schedule.repeats import NEVER, Region, find_regions, intervals, suffixes

A, B = list(range(100, 120)), list(range(200, 230))


def find(tokens: list[int], costs: list[float] | None = None) -> list[Region]:
    found = find_regions(tokens, [1.0] * len(tokens), costs or [1.0] * (len(tokens) + 1))
    covered: set[int] = set()
    for region in found:
        texts = {tuple(tokens[a:b]) for a, b in region.spans()}
        assert len(texts) == 1, "instances of a region are equal"
        for a, b in region.spans():
            assert covered.isdisjoint(range(a, b)), "regions do not overlap"
            covered.update(range(a, b))
        assert list(region.starts) == sorted(region.starts)
    return found


def test_a_run_of_layers() -> None:
    assert find([1, 2, *A * 12, 3]) == [Region(tuple(range(2, 242, 20)), 20)]


def test_nothing_repeats() -> None:
    assert find([]) == [] and find([1]) == [] and find(list(range(300))) == []
    assert find(A * 3) == []  # too few
    assert find([1, 2, 3] * 30)[0].length >= 10  # too small alone, but not together


def test_cuts_are_moved_to_cheap_places() -> None:
    tokens = [1, 2, *A * 12, 3]
    costs = [5.0] * (len(tokens) + 1)
    for k in range(12):
        costs[2 + 20 * k + 7] = 1.0
    assert find(tokens, costs) == [Region(tuple(range(9, 229, 20)), 20)]


def test_forbidden_places_are_not_cut() -> None:
    tokens = [1, 2, *A * 12, 3]
    costs = [NEVER if (i - 2) % 20 != 4 else 1.0 for i in range(len(tokens) + 1)]
    assert {(a - 2) % 20 for region in find(tokens, costs) for a in region.starts} == {4}
    assert find(tokens, [NEVER] * len(costs)) == []


def test_ends_are_trimmed_to_cheap_places() -> None:
    tokens = [x for k in range(6) for x in (*A, 1000 + k, 2000 + k)]
    costs = [9.0] * (len(tokens) + 1)
    for k in range(6):
        costs[22 * k + 2] = costs[22 * k + 18] = 1.0
    assert find(tokens, costs) == [Region(tuple(range(2, 132, 22)), 16)]


def test_two_kinds() -> None:
    order = "AABABBBABAAB"
    tokens = [x for k in order for x in (A if k == "A" else B)]
    assert sorted((len(r.starts), r.length) for r in find(tokens)) == [(6, 20), (6, 30)]
    assert [(len(r.starts), r.length) for r in find((A + B) * 6)] == [(6, 50)]


def test_no_crumbs_between_instances() -> None:
    """One layer differs in one operator: all of the others are regions as a whole, not all but that operator."""
    layers = [list(A) for _ in range(13)]
    layers[6][9] = 7
    region, = find([t for layer in layers for t in layer])
    assert region.length == 20 and len(region.starts) in (10, 11, 12)


def test_a_repetition_within_a_repetition() -> None:
    outer = [*A * 5, *B, *range(300, 400)]
    found = find(outer * 6)
    assert [(len(r.starts), r.length) for r in found][0] in ((30, 20), (6, len(outer)))
    assert [(len(r.starts), r.length) for r in find((A * 8 + [7]) * 4)] == [(32, 20)]


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences(seed: int) -> None:
    draw = random.Random(seed)
    words = [[draw.randrange(6) for _ in range(draw.randrange(4, 30))] for _ in range(3)]
    tokens = [t for _ in range(draw.randrange(1, 30)) for t in draw.choice(words)]
    costs = [draw.choice((1.0, 2.0, 50.0, NEVER)) for _ in range(len(tokens) + 1)]
    for region in find(tokens, costs):
        assert all(costs[a] < NEVER and costs[b] < NEVER for a, b in region.spans())


@pytest.mark.parametrize("seed", range(5))
def test_suffixes_and_what_they_share(seed: int) -> None:
    import numpy as np

    draw = random.Random(seed)
    text = [draw.randrange(3) for _ in range(draw.randrange(1, 60))]
    order, common = suffixes(np.asarray(text))
    assert order.tolist() == sorted(range(len(text)), key=lambda i: text[i:])
    for length, left, right in intervals(common):
        assert right - left >= 2 and len({tuple(text[i:i + length]) for i in order[left:right].tolist()}) == 1
