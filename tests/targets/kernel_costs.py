"""Estimates the cost of a GPU kernel without running it: bytes, passes, occupancy, serial work.

    cost, = costs(kernel, Metal, SHAPE)
    cost.moved / cost.must        # 1.0: each byte that must move does so once

The model. Memory moves in lines. The points of a kernel run in the order of its groups. Data that is touched again is
still cached if everything touched in between fits into the cache (`CACHE`); otherwise it is moved again. Groups that
run concurrently (`at_once`) share the cache, and advance at about the same speed. Between passes of a kernel over its
rows the cache keeps rows that are short enough for those of all groups to fit. Of longer rows it keeps the part that
was read last, which helps a pass in the opposite direction. Values that work-items hold in registers are read once, and
so are elements in a line that the row itself reads before or after them. The addresses of a gather depend on data: it
counts as if each row were read once. Masked-out elements count as read.

The lower bound moves each byte once; for a matrix product it is what no order of its steps can avoid (`factors`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from flambeau.codegen.simt.columns import ColumnLoops
from flambeau.codegen.simt.contraction_tiles import Tiles
from flambeau.codegen.simt.dialect import LaunchDraft, Shape, SimtDialect
from flambeau.codegen.simt.kernel import write_points
from flambeau.codegen.simt.points import PointLoops, Points, PointScan, PointStart
from flambeau.codegen.simt.rows import RowLoops, outside
from flambeau.codegen.simt.scans import ColumnScan
from flambeau.codegen.simt.transposes import Transpose
from flambeau.ir.expr import Expr, conjuncts, loads, walk
from flambeau.ir.index import ZERO, Dyn, Index, Sym, about, as_index, volume
from flambeau.ir.lines import extent, reached, unclamped
from flambeau.ir.program import (
    AttentionKernel,
    ContractKernel,
    Item,
    Kernel,
    Launch,
    LoopKernel,
    Program,
    ScanKernel,
    ScatterKernel,
    TableKernel,
    buffers_read,
    exprs_of,
    reductions_of,
)
from flambeau.ir.tuning import POINTS

LINE = POINTS.line_bytes
LARGE = 1 << 62
CACHE = 768 << 10  # bytes: the second level of the smallest of Apple's desktop GPUs
CORES, CORE_THREADS, CORE_LOCAL = 8, 1024, 32 << 10  # of the smallest GPU: cores, threads and bytes of a core
BOUNDS: dict[str, Callable[[int], tuple[int, int]]] = {  # of an index: the first one, and the end
    "lt": lambda n: (0, n), "le": lambda n: (0, n + 1), "ge": lambda n: (n, LARGE), "gt": lambda n: (n + 1, LARGE),
    "eq": lambda n: (n, n + 1)}
UNKNOWN = 1 << 10  # elements: stands for an unknown size


@dataclass(frozen=True)
class Cost:
    """The cost of one launch."""

    must: int  # bytes: the lower bound, with each byte read or written once
    moved: int  # bytes
    passes: int  # over the data that is read most often
    groups: int
    threads: int  # per group
    local: int  # bytes of memory that a group shares
    alone: int  # the most elements that one work-item reduces serially

    @property
    def ratio(self) -> float:
        return self.moved / self.must if self.must else 1.0

    @property
    def occupancy(self) -> float:
        """The share of a core's threads that its shared memory allows to be resident."""
        return min(1.0, (CORE_LOCAL // max(self.local, 1)) * self.threads / CORE_THREADS)

    def __str__(self) -> str:
        return f"{self.moved:,} bytes ({self.ratio:.2f} x), {self.passes} pass{'es' * (self.passes != 1)}, " \
               f"{self.groups} x {self.threads} threads"


def program_costs(program: Program, language: type[SimtDialect], shape: Shape) -> Iterator[tuple[Kernel, Cost]]:
    """The kernels of a program with the costs of all their launches. Buffers that only their own kernel reads need not
    move."""
    read = Counter(name for step in program.steps for name in buffers_read(step))
    for step in program.steps:
        if isinstance(step, Launch) and not isinstance(
                kernel := program.kernels[step.kernel], (AttentionKernel, TableKernel)):
            # Several launches may share a kernel; its parameters have the names of the first launch's buffers.
            own = {p.name for p, name in zip(kernel.params, step.args, strict=True)
                   if program.places[name].place == "arena" and read[name] == 1}
            for cost in costs(kernel, language, shape, own):
                yield kernel, cost


def costs(kernel: Kernel, language: type[SimtDialect], shape: Shape, own: Collection[str] = ()) -> list[Cost]:
    """The costs of a kernel's launches. `own`: the buffers that no other kernel uses."""
    drafts = write_points(language(), kernel, shape)
    typical = dict(getattr(kernel, "typical", ()))
    out = []
    for draft in drafts:
        m = Model(kernel, draft, typical, own)
        out.append(Cost(m.must(), m.moved(), m.passes(), m.groups, m.group, m.local(), m.alone()))
    return out


@dataclass(frozen=True)
class Access:
    """An address that is read or written at every point of some loops."""

    name: str
    itemsize: int
    at: Index
    ends: bool = False  # accessed once per outer point, after its inner points
    rounds: tuple[tuple[Sym, int], ...] = ()  # loops that a mask restricts, with their allowed iterations

    def touches(self, loops: Iterable[Sym]) -> int:
        """Bytes of the lines that the access touches while these loops run and the others stand still."""
        mine = [s for s in loops if s in self.at.symbols()]
        bytes, most = reached(self.at, mine, lambda s: s.size.const) * self.step(mine), extent(self.at, mine)
        return bytes if most is None else max(self.itemsize, min(bytes, most * self.itemsize))

    def step(self, loops: Sequence[Sym]) -> int:
        """Bytes that each point of these loops touches in addition to the previous point."""
        near = [abs(c.const) for s in loops if (c := linear(self.at, s))]
        nowhere = any(isinstance(a, Dyn) for a in self.at.atoms())
        stride = min(near, default=LINE if nowhere else 1) * self.itemsize
        return max(self.itemsize, min(stride, LINE))

    def is_beside(self, other: Access, around: Iterable[Sym]) -> bool:
        """Whether both accesses move equally with these loops, and the other one covers this one or reaches its
        line."""
        if any(self.at.coefficient(s) is not other.at.coefficient(s) for s in around) or places(self.at) != \
                places(other.at):
            return False
        lo, hi = (unclamped(self.at) - unclamped(other.at)).bounds()
        near = LINE // self.itemsize
        return lo is not None and hi is not None and lo < near and hi > -near

    def apart(self, other: Access) -> float:
        """The share of this access that the other one does not touch."""
        left, whole = other.at - self.at, 1.0
        if not left.is_const:
            return 0.0
        rest = left.const
        steps = {s: abs(c.const) for s in self.at.symbols() if (c := linear(self.at, s))}
        for s in sorted(steps, key=lambda s: -steps[s]):
            by = max(-s.size.const, min(round(rest / steps[s]), s.size.const))
            rest -= by * steps[s]
            whole *= 1 - min(abs(by) / s.size.const, 1)
        return 1 - whole if rest == 0 else 1.0


def linear(at: Index, s: Sym) -> Index | None:
    """The stride of an address in this loop; None if it is zero or not constant."""
    c = at.coefficient(s)
    return c if c is not None and c.is_const and c.const else None


def places(at: Index) -> set[Dyn]:
    """The parts of an address that depend on data."""
    return {a for a in at.atoms() if isinstance(a, Dyn)}


class Model:
    def __init__(self, kernel: Kernel, draft: LaunchDraft, typical: Mapping[Sym, int], own: Collection[str]) -> None:
        self.k, self.w, self.typical, self.own = kernel, draft.writer, typical, own
        self.group = draft.group
        self.groups = -(-self.about(draft.items if isinstance(draft.items, Index) else as_index(1)) // draft.group)
        self.given = {e.attr[0] for e in loads(*kernel.everything())}  # buffers that it reads and did not write itself
        self.itemsizes = {p.name: p.dtype.itemsize for p in kernel.params}
        self.mapping: dict[Sym, Index] = {s: as_index(n) for s, n in typical.items()}
        order = self.order()
        made = [self.loop(v, k) for k, v in enumerate(order)]
        self.loops = [s for s in made if s.size.const > 1]
        self.inner = {*(kernel.inner if isinstance(kernel, LoopKernel) else kernel.depth
                        if isinstance(kernel, ContractKernel) else ())}
        self.inner_loops = {s for s, (v, _, _) in zip(made, order, strict=True) if v in self.inner}
        self.outer = [s for s, (_, _, inside) in zip(made, order, strict=True)
                      if s in self.loops and not inside and s not in self.inner_loops]  # the loops over groups
        self.windows = {v: self.window(v, hi - lo) for e in walk(*kernel.everything()) if e.op == "fold"
                        for v, lo, hi in e.attr.loops}

    # ---- loops, from the slowest to the fastest ----------------------------------------------------------

    def order(self) -> list[tuple[Sym, int, bool]]:
        """The loops as (variable, points per step, whether the loop counts the points inside a step)."""
        k, w = self.k, self.w
        if isinstance(k, ContractKernel):
            assert isinstance(w, Tiles)
            k = w.k
            # Groups that run concurrently are a part of a band, and go through the depth together.
            sides = [*self.spread(k.rows, w.tile * w.band), *self.spread(k.columns, w.tile * (w.at_once // w.band))]
            side_by_side = self.spread(w.bands.outer, w.bands.rows) if w.bands else []
            rest = [(v, 1) for v in k.batch if v not in dict(side_by_side)]
            return [*((v, n, False) for v, n in (*side_by_side, *rest, *sides)), *((v, 1, False) for v in k.depth),
                    *((v, n, True) for v, n in (*side_by_side, *sides))]
        if isinstance(w, Transpose):
            both = ((w.along, w.long), (w.across, w.high))
            rows = self.spread(w.bands.outer, w.bands.rows) if w.bands else []
            return [*((v, n, False) for v, n in rows), *((v, 1, False) for v in w.apart if v not in dict(rows)),
                    *((v, n, False) for v, n in both), *((v, n, True) for v, n in rows),
                    *((v, 1, False) for v in w.beside), *((v, n, True) for v, n in both)]
        if isinstance(w, Points) and w.bands is not None:
            rows, row = self.spread(w.bands.outer, w.bands.rows), self.spread(w.bands.inner, w.bands.chunk)
            along = [(v, 1, False) for v in (k.inner if isinstance(k, LoopKernel) else
                                             (k.axis,) if isinstance(k, ScanKernel) else ())]
            beside = [(v, n, True) for v, n in rows]
            # Groups that run concurrently go through their rows or columns together.
            together = isinstance(w, RowLoops) and w.bands.rows <= CORES * CORE_THREADS // self.group
            within = [*along, *beside] if together else [*beside, *along]
            return [*((v, n, False) for v, n in (*rows, *row)), *within, *((v, n, True) for v, n in row)]
        if isinstance(k, ScatterKernel):
            return [(v, 1, False) for v in (k.out_vars if isinstance(w, PointStart) else k.vars)]
        inner = k.inner if isinstance(k, LoopKernel) else (k.axis,)
        if isinstance(w, RowLoops) and not isinstance(w, ColumnLoops) or not k.outer:
            return [(v, 1, False) for v in (*k.outer, *inner)]
        # Neighbouring work-items go through their inner points in step.
        wide = w.wide if isinstance(w, ColumnLoops | ColumnScan) else \
            w.group if isinstance(w, PointLoops | PointScan) else 1
        last = self.spread([w.column] if isinstance(w, ColumnScan) else k.outer, wide)
        if isinstance(w, ColumnScan) and not w.others_first:  # concurrent groups go through columns together
            last = [*last, *self.spread(w.others, POINTS.groups)]
        return [*((v, 1, False) for v in k.outer if v not in dict(last)), *((v, n, False) for v, n in last),
                *((v, 1, False) for v in inner), *((v, n, True) for v, n in last)]

    def spread(self, vars: Sequence[Sym], points: int) -> list[tuple[Sym, int]]:
        """Distributes a number of points over variables, beginning with the last one."""
        out = []
        for v in reversed(vars):
            out.append((v, max(1, min(points, self.about(v.size)))))
            points = max(1, points // out[-1][1])
        return out[::-1]

    def loop(self, order: tuple[Sym, int, bool], number: int) -> Sym:
        v, at_once, inside = order
        size = self.about(v.size)
        rounds = max(-(-size // max(1, min(at_once, size))), 1)
        at_once = max(-(-size // rounds), 1)  # as if the last step were as large as the others
        s = Sym(f"L{number}", at_once if inside else rounds)
        here = as_index(s) * (1 if inside else at_once) if s.size.const > 1 else ZERO
        self.mapping[v] = self.mapping.get(v, ZERO) + here
        return s

    def about(self, size: Index) -> int:
        return about(size, self.typical, UNKNOWN)

    def window(self, v: Sym, length: Index) -> int:
        """The number of elements of a window, at a point in the middle."""
        middle = {s: as_index(s.size.const // 2) for s in self.loops}
        length = length.subs(self.mapping).subs(middle)
        return length.const if length.is_const else UNKNOWN if v.hi is None else v.hi + 1

    def access(self, name: str, at: Index, ends: bool = False) -> Access:
        for s in at.symbols():  # the loops over a window
            if s not in self.mapping:
                self.mapping[s] = as_index(Sym(f"W{len(self.mapping)}", self.windows.get(s, UNKNOWN)))
        return Access(name, self.itemsizes[name], at.subs(self.mapping), ends)

    def around(self, a: Access) -> list[Sym]:
        """All loops of an access, with those over windows innermost."""
        return [*self.loops, *sorted(a.at.symbols() - set(self.loops), key=lambda s: s.name)]

    # ---- memory --------------------------------------------------------------------------------------------

    def reads(self) -> Iterator[tuple[list[Access], float]]:
        """The reads of each pass over the points, and the share of them that is made."""
        k, w = self.k, self.w
        if isinstance(k, ContractKernel):
            yield self.accesses(loads(k.left, k.right)), 1.0
            yield self.accesses(loads(*exprs_of(k.items)), ends=True), 1.0  # after the last of the factors
            return
        if not isinstance(k, LoopKernel):
            exprs = k.everything() if not isinstance(k, ScatterKernel) else \
                [k.init] if isinstance(w, PointStart) else [k.value, k.mask, *(a.expr for a in places(k.address))]
            yield self.accesses(loads(*(e for e in exprs if e is not None))), 1.0
            return
        held = w.held if isinstance(w, RowLoops) else []
        yield self.accesses([*held, *loads(*(k.bounds or ()))]), 1.0
        # If registers hold only a part of a row, each pass after the first reads the rest again.
        beyond = max(0.0, 1 - w.at_once() / max(self.about(volume(k.inner)), 1)) if isinstance(w, RowLoops) else 1.0
        before, stored, made = set[Expr](), dict(k.stores), set[Expr]()
        for stage in k.stages:
            found = loads(*exprs_of(stage))
            # Inputs of values that registers hold, like those values, are read only for the elements beyond them.
            need = {*outside(exprs_of(stage), made)}
            spared = {*held} | {e for e in found if e not in need}
            along = [e for e in found if e.attr[1][0].symbols() & {*k.inner}]
            once = self.accesses(e for e in found if e not in spared and e not in along)
            yield [*self.accesses(e for e in along if e not in spared),
                   *self.not_just_read(once, self.accesses([*held, *along, *before]))], 1.0
            made |= need & {*w.made} if isinstance(w, RowLoops) else set()
            again = [*self.accesses(e for e in found if e in spared and e in before),
                     *(self.access(name, stored[name]) for name in sorted(k.read_back(stage)))]
            yield again, max(0.0, beyond - self.still_there(stage, again))
            before.update(found)

    def still_there(self, stage: Sequence[Item], again: Sequence[Access]) -> float:
        """The share of a row that a stage finds in the cache, because it runs from the row's end to its start."""
        k, w = self.k, self.w
        if not isinstance(k, LoopKernel) or not isinstance(w, RowLoops) or k.bounds is not None or \
                stage is k.stages[0] or reductions_of(stage):
            return 0.0
        names = {n for i in stage for n in i.names}
        moved = [*again, *(self.access(name, at) for name, at in k.stores if name in names)]
        each = self.of_a_group(moved)
        return CACHE / max(each * self.at_once, 1)

    @cached_property
    def at_once(self) -> int:
        """The number of groups that run concurrently."""
        return min(self.groups, max(POINTS.groups, CORES * CORE_THREADS // self.group))

    def not_just_read(self, found: Sequence[Access], rows: Sequence[Access]) -> list[Access]:
        """The accesses without those in, or in a line next to, the rows that a group reads then, if the cache holds
        these rows."""
        if self.of_a_group(rows) * self.at_once > CACHE:
            return [*found]
        return [a for a in found if not any(a.name == b.name and a.is_beside(b, self.outer) for b in rows)]

    def accesses(self, found: Iterable[Expr], ends: bool = False) -> list[Access]:
        masks: dict[Access, list[dict[Sym, int]]] = {}
        for e in found:
            masks.setdefault(self.access(e.attr[0], e.attr[1][0], ends), []).append(dict(self.rounds(e)))
        return [replace(a, rounds=tuple((s, sum(m[s] for m in of)) for s in of[0] if all(s in m for m in of)))
                for a, of in masks.items()]

    def rounds(self, e: Expr) -> Iterator[tuple[Sym, int]]:
        """The loops that a read's mask restricts by a bound on their variable, with the allowed iterations."""
        for s in self.loops if e.args else ():
            v = next(v for v, at in self.mapping.items() if s in at.symbols())
            lo, hi = 0, s.size.const
            for c in conjuncts(e.args[0]):
                if c.op in BOUNDS and [a.op for a in c.args] == ["index", "const"] and c.args[0].attr is as_index(v):
                    first, last = BOUNDS[c.op](c.args[1].attr)
                    lo, hi = max(lo, first), min(hi, last)
            if self.mapping[v] is as_index(s) and hi - lo < s.size.const:
                yield s, max(hi - lo, 0)

    @cached_property
    def every_read(self) -> list[tuple[list[Access], float]]:
        found = [(r, share) for r, share in self.reads() if r and share]
        every = dict.fromkeys(a for r, _ in found for a in r)
        held = isinstance(self.k, LoopKernel) and self.of_a_group([*every, *self.writes]) * self.at_once <= CACHE
        return [([*every], 1.0)] if len(found) > 1 and held else found

    def of_a_group(self, found: Iterable[Access]) -> int:
        """Bytes of everything that a group touches."""
        return sum(a.touches(s for s in self.around(a) if s not in self.outer) for a in found)

    @cached_property
    def writes(self) -> list[Access]:
        k = self.k
        if isinstance(k, ScatterKernel):
            return [self.access(k.name, k.init_address if isinstance(self.w, PointStart) else k.address)]
        return [self.access(name, at, self.inner.isdisjoint(at.symbols())) for name, at in k.stores]

    def joins(self) -> list[Access]:
        """The writes that first read the old value: those of a scatter that combines values."""
        k = self.k
        meet = isinstance(k, ScatterKernel) and not isinstance(self.w, PointStart) and k.mode != "set"
        return self.writes if meet else []

    def must(self) -> int:
        every = dict.fromkeys([*(a for r, _ in self.every_read for a in r if a.name in self.given), *self.joins()])
        writes = self.once(a for a in self.writes if a.name not in self.own)
        if not isinstance(self.k, ContractKernel):
            return self.once(every) + writes
        return max(self.once(a for a in every if not a.ends), self.factors()) + writes + \
            self.once(a for a in every if a.ends)

    def factors(self) -> int:
        """The bytes of the factors that any order of a matrix product must read with this cache (Hong and Kung, 1981;
        with these constants Smith and van de Geijn, 2017). Where windows overlap, an element takes part in
        correspondingly more products (Demmel and Dinh, 2018)."""
        assert isinstance(k := self.k, ContractKernel)
        size = k.left.dtype.itemsize
        products = prod(self.about(volume(v)) for v in (k.batch, k.rows, k.columns, k.depth))
        windows = max((self.overlap(e.attr[1][0]) for e in loads(k.left, k.right)), default=1.0)
        return int(2 * products * size / float(CACHE / size * windows) ** 0.5) - 2 * CACHE

    def overlap(self, at: Index) -> float:
        """The approximate number of windows that an element is in."""
        assert isinstance(self.k, ContractKernel)
        straight = [v for v in (*self.k.batch, *self.k.rows, *self.k.columns, *self.k.depth)
                    if (c := at.coefficient(v)) is not None and c.is_const and c.const]
        sizes = {v: self.about(v.size) for v in straight}
        return max(1.0, prod(sizes.values()) / max(reached(at, straight, lambda v: sizes[v]), 1))

    def once(self, found: Iterable[Access]) -> int:
        """Bytes of everything that these accesses touch, each counted once."""
        alike: dict[str, list[Access]] = {}
        for a in found:
            alike.setdefault(a.name, []).append(a)
        total = 0.0
        for those in alike.values():
            seen: list[Access] = []
            for a in sorted(those, key=lambda a: -a.touches(self.around(a))):
                total += a.touches(self.around(a)) * min((a.apart(b) for b in seen), default=1.0)
                seen.append(a)
        return round(total)

    def moved(self) -> int:
        *_, (last, _) = [((), 1.0), *self.every_read]
        written = [a for a in self.writes if not a.ends]  # writes at the end of a row take no room before it
        reads = sum(round(self.traffic(r, written) * share) for r, share in self.every_read)
        return reads + self.traffic(self.joins()) + self.traffic(self.writes, last)

    def traffic(self, found: Sequence[Access], beside: Sequence[Access] = ()) -> int:
        """Bytes that one pass moves: data is moved again if more than the cache holds was touched in between. The
        accesses `beside` take room in the cache, too."""
        total, around = 0.0, self.uncached([*found, *beside])
        seen: dict[tuple[str, tuple[Index | None, ...]], list[Access]] = {}
        for a in sorted(found, key=lambda a: -a.touches(self.around(a))):
            # Accesses that keep their distance in every iteration share their lines, whatever the cache holds.
            beside = seen.setdefault((a.name, tuple(map(a.at.coefficient, around))), [])
            total += a.touches(self.around(a)) * self.times(a, around) * min((a.apart(b) for b in beside), default=1.0)
            beside.append(a)
        return round(total)

    def uncached(self, found: Sequence[Access]) -> list[Sym]:
        """The outermost loops that touch more than the cache holds. One iteration of the last of them fits."""
        return next(self.loops[:k] for k in range(len(self.loops) + 1)
                    if sum(b.touches(self.around(b)[k:]) for b in found) <= CACHE or k == len(self.loops))

    def times(self, a: Access, uncached: Sequence[Sym]) -> float:
        """The number of times that the data of an access is moved."""
        times = 1.0
        for k, s in enumerate(uncached[:-1]):
            c = a.at.coefficient(s)
            if c is ZERO:
                rounds = min(dict(a.rounds).get(s, s.size.const), s.size.const)
                times *= 1 if a.ends and s in self.inner_loops else rounds
            elif c is not None and c.is_const and abs(c.const) * a.itemsize < LINE:
                near = min((abs(d.const) for x in self.around(a)[k + 1:] if (d := linear(a.at, x))), default=LINE)
                if near > abs(c.const):  # later iterations use the rest of a line
                    times *= min(s.size.const, LINE // (abs(c.const) * a.itemsize))
        return times

    # ---- the rest ------------------------------------------------------------------------------------------

    def passes(self) -> int:
        counts: dict[Access, int] = {}
        for r, _ in self.every_read:
            for a in r:
                if any(s in a.at.symbols() for s in self.loops):
                    counts[a] = counts.get(a, 0) + 1
        return max(counts.values(), default=1)

    def local(self) -> int:
        sizes = {name: dtype.itemsize for dtype, name in self.w.d.stored.items()}
        found = [(kind, names) for line in self.w.scopes[0].lines
                 for kind, names in re.findall(rf"^{self.w.d.local} (\w+) (.*);", line)]
        return sum(sizes[kind] * int(n) for kind, names in found for n in re.findall(r"\[(\d+)\]", names))

    def alone(self) -> int:
        k, w = self.k, self.w
        steps = max((prod(self.windows[v] for v, _, _ in e.attr.loops)
                     for e in walk(*k.everything()) if e.op == "fold"), default=0)
        if isinstance(k, LoopKernel) and reductions_of(k.items):
            shared = isinstance(w, RowLoops) and w.group > w.wide
            return max(steps, 0 if shared else UNKNOWN if k.bounds is not None else self.about(volume(k.inner)))
        if isinstance(k, ScanKernel) and isinstance(w, PointScan):
            return max(steps, self.about(k.axis.size))
        return steps
