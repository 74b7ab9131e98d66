"""Scatters in a fixed order, for machines whose threads write in any order: if results have to be deterministic, or if
there is no atomic for the combine (such as the minimum of 64-bit integers).

A stable sort brings the points that write the same element together, in the order of the source. The first point of
such a run does the work of all: it starts from the element's old value, combines one value after the other with it, and
writes once, so that the element becomes ((start + first) + second) + ..., as on one thread. If values replace each
other, only the last point of a run writes. A run of a million should not be serial, though: if a run is longer than
STRETCH, the stretches after the first are summed in parallel, each in order, and then combined one after the other.

A variable that is an index of the target by itself is not sorted: rows are sorted once for all of their columns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from flambeau.ir import build
from flambeau.ir.capabilities import Capabilities, rounds
from flambeau.ir.dtypes import DType, highest, lowest
from flambeau.ir.expr import Expr, binary, cast, computed, const, index_value, loads, masked, where
from flambeau.ir.index import ONE, Index, Sym, as_index, ceildiv, product, unflat
from flambeau.ir.nodes import Combine, Graph, Scatter, Value, as_indices, dim_vars, narrow
from flambeau.ir.scalar import floordiv, fold_over, maximum, minimum
from flambeau.ir.sort import sort

Place = tuple[Index, ...]
STRETCH = 512  # values that one point combines one by one
AHEAD = 4  # values whose loads are in flight at once


def order_scatters(graph: Graph, caps: Capabilities) -> None:
    """Rewrite the scatters whose results depend on the order of their points, and those without an atomic."""
    if caps.ordered_scatter:
        return
    nodes, graph.nodes = graph.nodes, []
    for n in nodes:
        fixed = isinstance(n, Scatter) and caps.deterministic and depends_on_order(n)
        if isinstance(n, Scatter) and (fixed or needs_order(n, caps)):
            with build.building(graph, n.origin):
                n = alone(n) if not meeting(n) else Runs(n).written_once() if fixed else Runs(n).joined_at_the_end()
        graph.nodes.append(n)


def depends_on_order(n: Scatter) -> bool:
    if n.mode == "set":  # one value for all points is the same from any of them
        return not n.unique and bool(meeting(n)) and (bool(loads(n.value)) or not n.value.symbols().isdisjoint(n.vars))
    return rounds(n.mode, n.value.dtype)


def needs_order(n: Scatter, caps: Capabilities) -> bool:
    return n.mode != "set" and not n.unique and not caps.swaps(n.mode, n.value.dtype)


def alone(n: Scatter) -> Scatter:
    """A scatter whose points do not meet, with plain writes: each point combines its value with the old element."""
    start = n.init if n.mask is None else masked(n.init, n.mask)
    old = start.subs(dict(zip(n.out_vars, n.target, strict=True)))
    return replace(n, mode="set", value=binary(n.mode, old, n.value), unique=True)


def meeting(n: Scatter) -> list[Sym]:
    """The variables along which points may meet: all but those that are by themselves one index of the target, and
    occur nowhere else in the target or the mask."""
    inside = frozenset() if n.mask is None else n.mask.symbols()
    free = {v for k, t in enumerate(n.target) if isinstance(v := t.atom(), Sym) and v not in inside
            and not any(v in other.symbols() for j, other in enumerate(n.target) if j != k)}
    return [v for v in n.vars if v not in free and v.size is not ONE]


class Runs:
    """The points of a scatter, sorted by where they go."""

    def __init__(self, n: Scatter) -> None:
        self.n = n
        self.met = meeting(n)
        self.left = [v for v in n.vars if v not in self.met]
        self.sizes = [v.size for v in self.met]
        self.count = product(self.sizes)
        # The indices of the target that decide the run: all except the variables that are not sorted.
        self.places = [k for k, t in enumerate(n.target) if t.atom() not in self.left]
        self.extents = [n.out_vars[k].size for k in self.places]
        self.end = product(self.extents)  # the key of masked points
        self.keys, self.order = self.sort()

    def sort(self) -> tuple[Value, Value]:
        n, dtype = self.n, narrow(self.end + 1)  # keys of half the width are sorted in half the time
        ones = {v: as_index(0) for v in self.left}

        def key(i: Place) -> Expr:
            at = as_index(0)
            for k, size in zip(self.places, self.extents, strict=True):
                at = at * size + n.target[k]
            point = {**ones, **dict(zip(self.met, i, strict=True))}
            e = index_value(at, dtype).subs(point)
            return e if n.mask is None else where(n.mask.subs(point), e, index_value(self.end, dtype))

        keys = build.pointwise(self.sizes, key, laid=True)
        line = keys.view((self.count,), lambda i: unflat(i[0], self.sizes))
        return sort(line, 0)

    def written_once(self) -> Scatter:
        """The same scatter with one point for each element that is written."""
        n = self.n
        vars = dim_vars((self.count, *(v.size for v in self.left)))
        p, *others = as_indices(vars)
        rest = dict(zip(self.left, others, strict=True))
        target = self.target(p, rest)
        if n.mode == "set":
            writes = self.counts(p, self.is_last(p))
            value = masked(n.value.subs({**self.point(p), **rest}), writes)
        else:
            ends = self.edges(last=True)
            length = self.lengths(ends, p)
            writes = length > 0
            start = masked(n.init, writes).subs(dict(zip(n.out_vars, target, strict=True)))
            value = self.joined(self.stretch(start, p, rest, length), p, rest, length, ends)
        return Scatter(n.names, n.out_vars, n.init, vars, target, value, "set", writes, True, origin=n.origin,
                       inlined=n.inlined)

    def joined_at_the_end(self) -> Scatter:
        """The same if the order does not matter: one scan combines the values along their runs, and the last point of a
        run writes the result."""
        n = self.n
        sizes = (self.count, *(v.size for v in self.left))

        def element(i: Place) -> tuple[Expr, Expr]:
            rest = dict(zip(self.left, i[1:], strict=True))
            return where(self.is_first(i[0]), const(1, torch.int32), 0), n.value.subs({**self.point(i[0]), **rest})

        run = build.scan(sizes, 0, in_runs(n.mode, n.value.dtype), element)[1]
        vars = dim_vars(sizes)
        p, *others = as_indices(vars)
        target = self.target(p, dict(zip(self.left, others, strict=True)))
        writes = self.counts(p, self.is_last(p))
        start = masked(n.init, writes).subs(dict(zip(n.out_vars, target, strict=True)))
        value = binary(n.mode, start, run.load((p, *others)))
        return Scatter(n.names, n.out_vars, n.init, vars, target, value, "set", writes, True, origin=n.origin,
                       inlined=n.inlined)

    def target(self, p: Index, rest: dict[Sym, Index]) -> tuple[Index, ...]:
        """The element that the point at p writes."""
        out = [t.subs(rest) for t in self.n.target]
        key = computed(cast(self.keys.load((p,)), torch.int64), 0, most(self.end))
        for k, i in zip(self.places, unflat(key, self.extents), strict=True):
            out[k] = i
        return tuple(out)

    # ---- the values of a run ---------------------------------------------------------------------------

    def lengths(self, ends: Value, p: Index) -> Expr:
        """The number of points of a run, at its first point; zero at the others. Stored, because it is read often."""
        dtype = ends.dtype
        kept = build.pointwise((self.count,), lambda i: where(
            self.counts(i[0], self.is_first(i[0])), ends.load(i) - index_value(i[0], dtype), 0), laid=True)
        return cast(kept.load((p,)), torch.int64)

    def joined(self, first: Expr, p: Index, rest: dict[Sym, Index], length: Expr, ends: Value) -> Expr:
        """The first stretch of a run, combined with all others."""
        if (high := self.count.bounds()[1]) is not None and high <= STRETCH:
            return first
        parts, others = self.parts(ends), [rest[v] for v in self.left]
        end = computed(floordiv(length + (STRETCH - 1), STRETCH), 0, most(parts.shape[0] + 2))
        return fold_over([(1, end)], (first,), lambda w, taken: (
            binary(self.n.mode, taken[0], parts.load(((p + w[0] * STRETCH) // STRETCH, *others))),))[0]

    def stretch(self, start: Expr, p: Index, rest: dict[Sym, Index], length: Expr) -> Expr:
        """The start combined with the values from p on, one after the other: `length` of them, at most STRETCH."""
        length = minimum(length, STRETCH)

        def step(w: Place, taken: tuple[Expr, ...]) -> tuple[Expr]:
            out = taken[0]
            for k in range(AHEAD):
                at = w[0] * AHEAD + k
                there = index_value(at) < length
                value = masked(self.n.value.subs({**self.point(p + at), **rest}), there)
                out = where(there, binary(self.n.mode, out, value), out)
            return (out,)

        steps = computed(floordiv(length + (AHEAD - 1), AHEAD), 0, ceildiv(STRETCH, AHEAD).const)
        return fold_over([(0, steps)], (start,), step)[0]

    def parts(self, ends: Value) -> Value:
        """Element k is the sum of the stretch that begins at a position from STRETCH * k up to STRETCH * (k + 1).

        Not counting the first stretches of runs, there is at most one, and it belongs to the run of the first of these
        positions: a run that begins at a later one has its second stretch STRETCH positions later, in another block.
        """
        n, starts = self.n, self.edges(last=False)

        def body(i: Place) -> Expr:
            at = i[0] * STRETCH
            first, end = (cast(v.load((at,)), torch.int64) for v in (starts, ends))
            skipped = floordiv(index_value(at) - first + (STRETCH - 1), STRETCH) * STRETCH
            p = computed(first + skipped, 0, most(self.count + STRETCH))
            rest = dict(zip(self.left, i[1:], strict=True))
            length = where(self.counts(at, skipped > 0), maximum(end - index_value(p), 0), 0)
            return self.stretch(const({"add": 0, "mul": 1}[n.mode], n.value.dtype), p, rest, length)

        return build.pointwise((ceildiv(self.count, STRETCH), *(v.size for v in self.left)), body, laid=True)

    def edges(self, last: bool) -> Value:
        """For each point, the position of the first point of its run; with `last`, one past its last point."""
        dtype = narrow(self.count + 1)

        def body(i: Place) -> Expr:
            if last:
                return where(self.is_last(i[0]), index_value(i[0] + 1, dtype), index_value(self.count, dtype))
            return where(self.is_first(i[0]), index_value(i[0], dtype), 0)

        combine = build.simple_combine("min" if last else "max", dtype)
        return build.scan((self.count,), 0, combine, body, reverse=last)[0]

    # ---- single points -----------------------------------------------------------------------------------

    def point(self, p: Index) -> dict[Sym, Index]:
        """The source position of the point that the sort moved to p."""
        at = computed(self.order.load((p,)), 0, most(self.count))
        return dict(zip(self.met, unflat(at, self.sizes), strict=True))

    def counts(self, p: Index, holds: Expr) -> Expr:
        """Whether `holds`, and the point at p is not masked."""
        if self.n.mask is None:
            return holds
        return holds & (cast(self.keys.load((p,)), torch.int64) < index_value(self.end))

    def is_first(self, p: Index) -> Expr:
        inner = index_value(p) > 0
        return ~inner | binary("ne", self.keys.load((p - 1,), inner), self.keys.load((p,)))

    def is_last(self, p: Index) -> Expr:
        inner = index_value(p + 1) < index_value(self.count)
        return ~inner | binary("ne", self.keys.load((p + 1,), inner), self.keys.load((p,)))


@cache
def in_runs(mode: str, dtype: DType) -> Combine:
    """A combine for scans that starts again at the beginning of each run."""

    def fn(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> tuple[Expr, ...]:
        begins = binary("ne", b[0], 0)
        return a[0] | b[0], where(begins, b[1], binary(mode, a[1], b[1]))

    start = {"add": 0, "mul": 1, "min": highest(dtype), "max": lowest(dtype)}[mode]
    return build.make_combine(f"{mode} in runs", (torch.int32, dtype), (0, start), fn)


def most(size: Index) -> int | None:
    """The greatest index below a size, if it is known."""
    high = size.bounds()[1]
    return None if high is None else max(high - 1, 0)
