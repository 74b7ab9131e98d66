"""Scatters in C: writes to computed indices, in an order that does not depend on the threads.

Threads divide the variables that are indices of the target by themselves (their points never meet). Where whole rows
are written, each thread owns a range of the target's rows and skips the others. There are no atomics; the order of
writes to one element is always that of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from flambeau.ir.dtypes import opmath
from flambeau.ir.expr import Expr, cast, cost_of, index_value, loads, where
from flambeau.ir.index import Dyn, Index, Sym, as_index, volume
from flambeau.ir.program import ScatterKernel
from flambeau.ir.tuning import CPU

from ..dialect import LANES, TEAM, Dialect
from .nest import NestWriter
from .row_invariants import number


class ScatterWriter(NestWriter):
    def __init__(self, dialect: Dialect, kernel: ScatterKernel) -> None:
        super().__init__(dialect, kernel)
        self.k = kernel
        self.cost = cost_of([kernel.value])

    def render(self) -> list[str]:
        k = self.k
        free = [v for v in k.vars if v in k.free]
        bound = [v for v in k.vars if v not in k.free]
        # The last free variable walks the target's rows if it is the last of the source.
        rows = free[-1:] if free and k.vars[-1] is free[-1] else []
        outer = [v for v in free if v not in rows]
        parts = volume(outer)
        whole = bool(rows) and not self.moves_with(rows[0])
        many = outer and (not rows or not parts.is_const or parts.const >= CPU.scatter_parts)
        part = self.part_of(outer) if many else None
        if part is not None:  # a part that was just filled is still in the cache when it is written to
            how = self.parallel(k.vars, self.cost, len(outer)) or self.parallel(k.out_vars, 1, len(outer))
            with self.nest(outer, how):
                self.start_of(outer, part)
                self.deep([*bound, *rows])
            return self.scopes[0].lines
        self.start()
        if not self.parallel(k.vars, self.cost, 1):
            with self.scope("{"):
                self.deep(k.vars)
        elif many:
            with self.nest(outer, self.parallel(k.vars, self.cost, len(outer))):
                self.deep([*bound, *rows])
        elif whole and k.owner is not None:
            self.owned([*outer, *bound], rows)
        elif rows:
            self.divided([*outer, *bound], rows[0])
        else:  # Skipping the elements of other threads takes as long as writing them.
            with self.scope("{"):
                self.deep(bound)
        return self.scopes[0].lines

    def part_of(self, outer: Sequence[Sym]) -> Index | None:
        """The number of consecutive elements that belong to each point of the outer variables, if these make up the
        whole target; else None."""
        k = self.k
        if k.init is None or len(k.out_vars) != 1 or k.init_address is not as_index(k.out_vars[0]):
            return None
        steps = {v: k.address.coefficient(v) for v in outer}
        total = k.out_vars[0].size
        for v in outer:
            step = steps[v]
            if step is None or step * v.size is not total:
                return None
            total = step
        return total

    def start_of(self, outer: Sequence[Sym], part: Index) -> None:
        k = self.k
        assert k.init is not None
        j = Sym(f"{k.out_vars[0].name}j", part)
        at = sum((c * v for v in outer if (c := k.address.coefficient(v)) is not None), as_index(j))
        with self.loop(j, "0", self.extent(j), how=LANES):
            self.store(k.name, at, self.value(k.init.subs({k.out_vars[0]: at})))

    def moves_with(self, v: Sym) -> bool:
        """Whether the elements along v go to places that data decide, one by one."""
        return any(isinstance(a, Dyn) and v in a.symbols() for a in self.k.address.atoms())

    def start(self) -> None:
        k = self.k
        if k.init is None:
            return
        if not k.out_vars:
            with self.scope("{"):
                self.store(k.name, k.init_address, self.value(k.init))
            return
        *outer, last = k.out_vars
        how = self.parallel(k.out_vars, cost_of([k.init]), len(outer) or 1)
        begin, end = "0", self.extent(last)
        block: list[tuple[Sym, str, str]] = []
        if how and not outer:
            part = Sym(f"{last.name}b", last.size)
            block = [(part, end, str(CPU.scatter_start))]
            begin, end = self.sym(part), f"{self.fl}imin({self.sym(part)} + {CPU.scatter_start}, {end})"
        with self.nest(outer, how, *block), self.loop(last, begin, end, how=LANES):
            self.store(k.name, k.init_address, self.value(k.init))

    def deep(self, vars: Sequence[Sym], lo: str = "0", hi: str = "") -> None:
        """Loops over vars, over the last one from lo to hi."""
        if not vars:
            self.write()
            return
        v, rest = vars[0], vars[1:]
        if not hi and self.is_expensive(v, rest):
            self.prepared(v, rest)
            return
        if rest:
            with self.loop(v, "0", self.extent(v)):
                self.deep(rest, lo, hi)
            return
        # If every element jumps, vectors of addresses are slower than writing one element after the other.
        lanes = LANES if v in self.k.free and not self.moves_with(v) else None
        with self.loop(v, lo, hi or self.extent(v), how=lanes):
            self.write()

    def is_expensive(self, v: Sym, taps: Sequence[Sym]) -> bool:
        """Whether finding places and values takes longer than writing them, for few elements at each point of v."""
        k = self.k
        count = volume(taps)
        known = number(self.offset(v, taps)) is not None and all(e.attr[0] != k.name for e in loads(k.value))
        few = count.is_const and count.const <= CPU.scatter_taps and not (v.size.is_const
                                                              and v.size.const < CPU.scatter_points)
        return known and few and k.free.isdisjoint((v, *taps)) and cost_of(self.exprs()) >= CPU.scatter_work

    def exprs(self) -> list[Expr]:
        k = self.k
        return [k.value, index_value(k.address), *(() if k.mask is None else (k.mask,))]

    def offset(self, v: Sym, taps: Sequence[Sym]) -> Index:
        """The part of the address that changes with the point and its taps."""
        parts = {v, *taps}
        return Index(tuple((m, c) for m, c in self.k.address.terms if any(a.symbols() & parts for a in m)), 0)

    def prepared(self, v: Sym, taps: Sequence[Sym]) -> None:
        """Computes the places and values of a block of points in vectors, then writes them one after the other."""
        k = self.k
        offset = self.offset(v, taps)
        points: list[dict[Sym, Index]] = [{}]
        for t in taps:
            points = [{**p, t: as_index(j)} for p in points for j in range(t.size.const)]
        room = CPU.shared_bytes // len(points) // (4 + k.value.dtype.itemsize) // 64 * 64
        width = max(CPU.scatter_points, min(CPU.scatter_most, room))
        block = Sym(f"{v.name}s", v.size)
        start, end, place, value = self.sym(block), *(self.fresh(x) for x in ("e", "at", "val"))
        name, here = self.sym(v), f"[{self.sym(v)} - {start}]"
        last = self.extent(v)
        with self.scope(f"for ({self.d.long} {start} = 0; {start} < {last}; {start} += {width}) {{", (block,)):
            self.line(f"const {self.d.long} {end} = {self.fl}imin({start} + {width}, {last});")
            self.line(f"alignas(64) int32_t {place}[{len(points)}][{width}];")
            self.line(f"alignas(64) {self.d.types[k.value.dtype]} {value}[{len(points)}][{width}];")
            with self.loop(v, start, end, how=LANES):
                for j, p in enumerate(points):
                    at = number(offset.subs(p))
                    assert at is not None
                    at = at if k.mask is None else where(k.mask.subs(p), at, -1)
                    self.line(f"{place}[{j}]{here} = {self.value(at)};")
                    self.line(f"{value}[{j}]{here} = {self.value(k.value.subs(p))};")
            tap = self.fresh("tap")
            with self.scope(f"for ({self.d.long} {name} = {start}; {name} < {end}; ++{name}) "
                            f"for (int {tap} = 0; {tap} < {len(points)}; ++{tap}) {{", (v,)):
                at_ = f"{place}[{tap}]{here}"
                self.join(f"{self.index(k.address - offset)} + {at_}", f"{value}[{tap}]{here}",
                          None if k.mask is None else f"{at_} >= 0")

    def divided(self, bound: Sequence[Sym], v: Sym) -> None:
        """Every thread takes a range of the columns, in whole cache lines."""
        line = max(1, CPU.cache_line // self.k.value.dtype.itemsize)
        with self.scope("{", how=TEAM):
            lo, hi = self.share(f"({self.extent(v)} + {line - 1}) / {line}")
            end = self.fresh("e")
            self.line(f"const {self.d.long} {end} = {self.fl}imin({hi} * {line}, {self.extent(v)});")
            self.deep([*bound, v], f"{lo} * {line}", end)

    def share(self, count: str) -> tuple[str, str]:
        """This thread's share of `count` things: the first, and the end."""
        me, all_, lo, hi = (self.fresh(x) for x in ("me", "all", "lo", "hi"))
        self.line(f"const {self.d.long} {me} = {self.fl}thread(), {all_} = {self.fl}threads();")
        self.line(f"const {self.d.long} {lo} = {count} * {me} / {all_}, {hi} = {count} * ({me} + 1) / {all_};")
        return lo, hi

    def owned(self, bound: Sequence[Sym], rows: Sequence[Sym]) -> None:
        """Every thread reads every target index and writes the rows in its own range."""
        k = self.k
        assert k.owner is not None and k.owners is not None
        owner = k.owner

        def write_own() -> None:
            at = self.index(owner)
            with self.scope(f"if ({at} >= {lo} && {at} < {hi}) {{"):
                self.deep(rows)

        with self.scope("{", how=TEAM):
            lo, hi = self.share(self.index(k.owners))
            self.nested(bound, write_own)

    def write(self) -> None:
        k = self.k
        mask = None if k.mask is None else self.value(k.mask)
        factors = self.factors(k.value) if k.mode == "add" else None
        if factors is None:
            text = self.value(k.value)
            self.join(self.index(k.address), text, mask)
            return
        at = self.index(k.address)
        place = f"{self.short[k.name]}[{at}]"
        with nullcontext() if mask is None else self.scope(f"if ({mask}) {{"), self.accessed(k.name, at):
            self.line(f"{place} = {self.plus(place, factors)};")

    def join(self, address: str, text: str, mask: str | None) -> None:
        if mask is not None:
            with self.scope(f"if ({mask}) {{"):
                self.join(address, text, None)
            return
        k = self.k
        place = f"{self.short[k.name]}[{address}]"
        if k.mode != "set":
            dtype = k.value.dtype
            wide = opmath(dtype)  # small floats join in float32 and round at each write, as ATen's do
            held = f"((bool){place})" if dtype is torch.bool else place  # bools are stored as bytes
            old, new = (cast(self.raw(t, dtype), wide) for t in (held, text))
            with self.accessed(k.name, address):
                self.line(f"{place} = {self.value(cast(Expr(k.mode, wide, (old, new)), dtype))};")
            return
        with self.accessed(k.name, address):
            self.line(f"{place} = {text};")
