"""Finds repeated parts of a sequence, to cut a long program so that equal parts are compiled once.

A program is a sequence of tokens; equal tokens are equal operators on equal kinds of operands. Its regions are
contiguous stretches, so no order ever changes, whatever the operators do to memory or to random numbers. The search is
greedy: of all stretches that occur several times without overlap, the one that saves the most work comes first, and the
rest is searched again. A repeated stretch may begin anywhere within its period, and is cut at the cheapest place:
`costs` gives the cost of a cut at each place, infinite where no cut is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WEIGHT = 10.0  # a region has at least this many operators
SHARE = 0.15  # share of all operators that a region must save
KEEP = 0.6  # share of the possible saving that must remain at a place with cheaper cuts
TRIED = 4  # candidates of one length whose places are compared
ABOUT = 1.05  # prices within this factor are equal
WORTH = 1.25  # how much more expensive cuts may be for one more saved instance
GAP = 4.0  # operators: the penalty for a gap that is too small to be a region
LOOKED_AT = 300  # stretches: those that might save most are examined
OFFSETS = 512  # offsets within a stretch that are compared
NEVER = float("inf")


@dataclass(frozen=True)
class Region:
    """Equal stretches of a sequence: [start, start + length) for each start."""

    starts: tuple[int, ...]
    length: int

    def spans(self) -> list[tuple[int, int]]:
        return [(s, s + self.length) for s in self.starts]


def find_regions(tokens: Sequence[int], weights: Sequence[float], costs: Sequence[float], count: int = 4
                 ) -> list[Region]:
    """The regions with at least `count` instances that do not overlap, those that save the most first.

    `costs[i]` is the cost of a cut before token i."""
    return _Search(tokens, weights, costs, count).run()


class _Search:
    def __init__(self, tokens: Sequence[int], weights: Sequence[float], costs: Sequence[float], count: int) -> None:
        self.count = count
        self.tokens: Ints = np.asarray(tokens, dtype=np.int64)
        self.weight: Floats = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
        self.costs: Floats = np.asarray(costs, dtype=np.float64)
        self.least = SHARE * float(self.weight[-1])

    def run(self) -> list[Region]:
        found: list[Region] = []
        rest = [(0, len(self.tokens))] if len(self.tokens) else []
        while (region := self.best(rest)) is not None:
            found.append(region)
            rest = list(without(rest, region.spans()))
        # A region may itself consist of repeated parts; these are then the regions.
        return [part for region in found for part in self.inside(region)]

    def inside(self, region: Region) -> list[Region]:
        start, length = region.starts[0], region.length
        least, self.least = self.least, 0.5 * self.between(start, start + length)
        inner = self.best([(start, start + length)])
        self.least = least
        if inner is None:
            return [region]
        return [Region(tuple(sorted(s - start + t for t in region.starts for s in inner.starts)), inner.length)]

    def between(self, start: int, stop: int) -> float:
        return float(self.weight[stop] - self.weight[start])

    def best(self, segments: Sequence[tuple[int, int]]) -> Region | None:
        """The region that saves the most, at the place where its cuts cost least."""
        candidates = sorted(self.candidates(segments), key=lambda c: (-self.worth(*c), c[1], c[2][0]))
        for k, (_, length, _) in enumerate(candidates):
            same = [c for c in candidates[k:] if c[1] == length][:TRIED]
            places = [p for saved, _, starts in same for p in self.places(starts, length, segments, saved)]
            if places:
                cheapest = min(price for price, _, _ in places)
                return max((p for p in places if p[0] <= cheapest * WORTH), key=lambda p: p[1])[2]
        return None

    @staticmethod
    def worth(saved: float, length: int, starts: list[int]) -> float:
        """The estimated benefit. Few instances count less, as single layers stay outside. Small gaps are extra
        calls."""
        gaps = [b - a - length for a, b in zip(starts, starts[1:])]
        count = len(starts)
        return saved * (count - 2) / (count - 1) - GAP * sum(0 < g < WEIGHT for g in gaps)

    # ---- the repeated stretches ------------------------------------------------------------------------

    def candidates(self, segments: Sequence[tuple[int, int]]) -> Iterator[tuple[float, int, list[int]]]:
        """(work saved, length, starts) of stretches that occur often enough."""
        if not segments:
            return
        # All segments as one text, separated by tokens that occur nowhere else.
        where = np.concatenate([np.append(np.arange(a, b), -1) for a, b in segments])
        text = np.where(where >= 0, self.tokens[where], 0)
        ends = np.flatnonzero(where < 0)
        text[ends] = int(self.tokens.max(initial=0)) + 1 + np.arange(len(ends))
        order, common = suffixes(text)
        often: list[tuple[float, int, Ints]] = []
        for length, left, right in intervals(common):
            if right - left >= self.count:
                starts = where[order[left:right]]
                first, last = int(starts.min()), int(starts.max())
                if (work := self.between(first, first + length)) >= WEIGHT:
                    often.append((min((right - left - 1) * work, self.between(first, last)), length, starts))
        often.sort(key=lambda x: (-x[0], x[1]))
        most = 0.0
        for _, length, starts in often[:LOOKED_AT]:
            starts = np.sort(starts)
            steps, times = np.unique(np.diff(starts), return_counts=True)
            near = steps[steps < length][np.argsort(-times[steps < length], kind="stable")[:2]]
            # In a run with a short period, all stretches overlap, and the period itself is the useful length.
            for size in {length, *near.tolist()}:
                chosen = apart(starts.tolist(), size)
                if len(chosen) < self.count:
                    continue
                work = self.between(chosen[0], chosen[0] + size)
                saved = (len(chosen) - 1) * work
                if work >= WEIGHT and saved >= max(self.least, KEEP * most):
                    most = max(most, saved)
                    yield saved, size, chosen

    # ---- the places of cuts ----------------------------------------------------------------------------

    def places(self, starts: list[int], length: int, segments: Sequence[tuple[int, int]],
               saved: float) -> Iterator[tuple[float, float, Region]]:
        """(cost for each instance, work saved, region) of a stretch's best place, shifted and trimmed."""
        for chosen in (starts, starts[:-1]):  # without the last instance, a periodic run can start at any offset
            if len(chosen) < self.count:
                continue
            steps = np.diff(chosen)
            step = int(steps.min())
            offsets = np.arange(length + self.reach(chosen, length, step, segments) + 1)
            at = np.asarray(chosen)[:, None] + offsets[None, :]
            price = self.costs[at].mean(axis=0)  # of a cut at this offset, averaged over the instances
            cheap = np.argsort(price, kind="stable")[:OFFSETS]
            cheap = np.sort(cheap[np.isfinite(price[cheap])])
            first, last = np.meshgrid(cheap, cheap, indexing="ij")
            alone = 1.0 - float((steps == step).sum()) / len(chosen)  # others share a cut
            total = price[first] + np.where(last - first == step, alone, 1.0) * price[last]
            work = self.weight[at[0]][last] - self.weight[at[0]][first]
            kept = (len(chosen) - 1) * work
            fits = (last - first <= step) & (last > first) & (work >= WEIGHT)
            fits &= kept >= max(KEEP * saved, self.least)
            if not fits.any():
                continue
            total = np.where(fits, total, NEVER)
            # Among places of nearly equal cost, take the one that saves the most.
            k = int(np.argmax(np.where(total <= total.min() * ABOUT, kept, -1.0)))
            a, b = int(first.flat[k]), int(last.flat[k])
            yield float(total.flat[k]), float(kept.flat[k]), Region(tuple(s + a for s in chosen), b - a)

    def reach(self, starts: list[int], length: int, step: int, segments: Sequence[tuple[int, int]]) -> int:
        """How many tokens beyond their ends all instances have in common, up to one period."""
        stops = [next(b for a, b in segments if a <= s < b) for s in starts]
        far = min(step, *(b - s - length for b, s in zip(stops, starts)))
        ahead = self.tokens[np.asarray(starts)[:, None] + length + np.arange(far)[None, :]]
        differ = np.flatnonzero((ahead != ahead[:1]).any(axis=0))
        return int(differ[0]) if len(differ) else far


# ---- stretches ---------------------------------------------------------------------------------------------


def without(segments: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of the segments outside of the spans."""
    for start, stop in segments:
        for a, b in sorted(spans):
            if start <= a and b <= stop:
                if a > start:
                    yield start, a
                start = b
        if stop > start:
            yield start, stop


def apart(starts: Sequence[int], length: int) -> list[int]:
    """A maximal choice of starts whose stretches do not overlap."""
    chosen: list[int] = []
    for s in starts:
        if not chosen or s >= chosen[-1] + length:
            chosen.append(s)
    return chosen


def suffixes(text: Ints) -> tuple[Ints, list[int]]:
    """The suffix array, and the length of each suffix's common prefix with the previous one."""
    n = len(text)
    rank = np.unique(text, return_inverse=True)[1].astype(np.int64)
    order, width = np.argsort(rank, kind="stable"), 1
    while n > 1:
        behind = np.full(n, -1, dtype=np.int64)
        behind[: n - width] = rank[width:]
        key = rank * (n + 1) + behind + 1
        order = np.argsort(key, kind="stable")
        steps = key[order][1:] != key[order][:-1]
        rank = np.empty(n, dtype=np.int64)
        rank[order] = np.concatenate(([0], np.cumsum(steps)))
        width *= 2
        if int(rank.max()) == n - 1 or width >= n:
            break
    # Kasai's algorithm: from one suffix to the next shorter one, the common prefix loses at most one token.
    common, same = [0] * n, 0
    words, ranks, sorted_ = text.tolist(), rank.tolist(), order.tolist()
    for i in range(n):
        if ranks[i] == 0:
            same = 0
            continue
        j = sorted_[ranks[i] - 1]
        while i + same < n and j + same < n and words[i + same] == words[j + same]:
            same += 1
        common[ranks[i]] = same
        same = max(same - 1, 0)
    return order, common


def intervals(common: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(length, left, right): the suffixes from left to right share that many tokens, and no neighbour does."""
    stack: list[tuple[int, int]] = []
    for i in range(1, len(common) + 1):
        here = common[i] if i < len(common) else 0
        left = i - 1
        while stack and stack[-1][0] > here:
            length, left = stack.pop()
            yield length, left, i
        if here and (not stack or stack[-1][0] < here):
            stack.append((here, left))
