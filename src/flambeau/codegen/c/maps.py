"""Maps in C: vector loops along the contiguous variable, or tiles if two variables are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flambeau.ir.expr import Expr, rewrite, walk
from flambeau.ir.index import ONE, Sym, as_index, is_positive, volume
from flambeau.ir.program import Item, exprs_of
from flambeau.ir.tuning import CPU

from ..dialect import APART, LANES
from .loop_splitting import affordable, pieces
from .loops import LoopWriter, offset_items
from .row_invariants import best_shared, shared_values


class MapWriter(LoopWriter[None]):
    def render(self) -> list[str]:
        {"points": self.points, "lines": self.lines, "chunks": self.lines, "tiles": self.tiles,
         "flat tiles": self.tiles}[self.k.form.name]()
        return self.scopes[0].lines

    def points(self) -> None:
        """Writes a map in which no variable is contiguous."""
        k = self.k
        with self.nest(k.outer, self.parallel(k.outer, self.cost, len(k.outer)) if k.outer else None):
            for i in k.items:
                self.map_item(i)

    def lines(self) -> None:
        """Writes vector loops along the contiguous variable."""
        k, v, items = self.k, self.k.vector, self.k.items
        assert v is not None
        others = tuple(x for x in k.outer if x is not v)
        shared = best_shared(exprs_of(items), others, v)
        if shared is not None:
            self.rows_that_share(others, shared, v, items)
            return
        if k.form.name == "chunks":
            self.chunked(others, v, items)
            return
        if is_positive(volume(others)):  # if there are no rows, eager does not check the index either
            items = self.settled(items, v)
        exprs = exprs_of(items)
        for w in others:
            parts = pieces(exprs, w)
            if len(parts) > 1 and affordable(exprs, w, parts):
                for a, b in parts:
                    with self.inside(w, a, b):
                        self.vectors(others, v, items)
                return
        self.vectors(others, v, items)

    def rows_that_share(self, others: tuple[Sym, ...], c: Sym, v: Sym, items: Sequence[Item]) -> None:
        """For each block of points, computes the values that are the same for all c first, and then loops over c."""
        items = offset_items(items, (c,), v)
        values = shared_values(exprs_of(items), (c,), v)
        if not values:  # what seemed shared was an offset
            self.vectors(others, v, items)
            return
        room = CPU.shared_bytes // sum(e.dtype.itemsize for e in values) // 64 * 64
        width = max(CPU.shared_least, min(CPU.shared_most, room))
        block = Sym(f"{v.name}s", v.size)
        start, end = self.sym(block), self.fresh("e")
        outer = tuple(x for x in others if x is not c)
        how = self.parallel(self.k.outer, self.cost, len(outer) + 1)
        with self.nest(outer, how, (block, self.extent(v), str(width))):
            self.line(f"const {self.d.long} {end} = {self.fl}imin({start} + {width}, {self.extent(v)});")
            known = self.side_by_side(values, v, start, end, width)
            with self.loop(c, "0", self.extent(c)), self.loop(v, start, end, how=LANES) as s:
                s.known.update(known)
                for i in items:
                    self.map_item(i)

    def settled(self, items: list[Item], v: Sym) -> list[Item]:
        """Checks indices that are the same in every row once, before all rows; returns the items without the checks."""
        loops = frozenset(self.k.outer)
        again = [e for e in walk(*exprs_of(items))
                 if e.op == "check" and len(e.args) == 1 and e.symbols() & loops == {v}]
        if not again:
            return items
        with self.loop(v, "0", self.extent(v), how=LANES):
            for e in again:
                self.value(e)
        self.line("if (bad) return bad;")
        memo: dict[Expr, Expr] = {}

        def trusted(e: Expr) -> Expr:
            return e.args[0] if e in again else e

        return [replace(i, exprs=tuple(rewrite(e, trusted, None, memo) for e in i.exprs)) for i in items]

    def vectors(self, others: tuple[Sym, ...], v: Sym, items: Sequence[Item]) -> None:
        k = self.k
        with self.nest(others, self.parallel(k.outer, self.cost, len(others))):
            self.prefetch(exprs_of(items), others[-1], v)
            self.vector_loop(v, "0", self.extent(v), items)

    def chunked(self, others: tuple[Sym, ...], v: Sym, items: Sequence[Item]) -> None:
        """Divides the contiguous variable itself, because there are few or no outer points."""
        part = Sym(f"{v.name}b", v.size)
        step = CPU.chunk
        how = self.parallel(self.k.outer, self.cost, len(others) + 1)
        if not how:
            with self.nest(others):
                self.vector_loop(v, "0", self.extent(v), items)
            return
        with self.nest(others, how, (part, self.extent(v), str(step))):
            end = self.fresh("e")
            self.line(f"const {self.d.long} {end} = {self.fl}imin({self.sym(part)} + {step}, {self.extent(v)});")
            self.vector_loop(v, self.sym(part), end, items)

    def tiles(self) -> None:
        """Walks two variables, each contiguous in some access, in tiles that fit the first-level cache.

        Data that is contiguous along the second one is transposed in a small array first: lines a power of two apart
        compete for the same place in the cache, so each of them is read and written as a whole."""
        v, t = self.k.vector, self.k.tile
        assert v is not None and t is not None
        others = tuple(x for x in self.k.outer if x is not v and x is not t)
        tb, vb = Sym(f"{t.name}b", t.size), Sym(f"{v.name}b", v.size)
        how = self.parallel(self.k.outer, self.cost, len(others) + 2)
        short = v.size.const if self.k.form.name == "flat tiles" else 0
        transposed = {e: self.fresh("transposed")
                      for e in (self.k.reads_apart() if short else self.k.transposed_reads())}
        side = short or (CPU.transpose_side if transposed else CPU.transpose_side // 2)
        moved = sum(e.dtype.itemsize for e in transposed)
        high = max(CPU.transpose_bytes // moved, 1) if transposed else side
        if short and moved:
            high = min(high, max(CPU.shared_bytes // (moved * short), 1))
        line = short or side + CPU.transpose_gap
        with self.nest(others, how, (tb, self.extent(t), str(high)), (vb, self.extent(v), str(side))):
            ends = {}
            for b, x, n in ((tb, t, high), (vb, v, side)):
                ends[x] = self.end_of(self.sym(b), n, x.size)
            place = f"[({self.sym(t)} - {self.sym(tb)}) * {line} + {self.sym(v)} - {self.sym(vb)}]"
            for e, array in transposed.items():
                self.line(f"alignas(64) {self.d.types[e.dtype]} {array}[{high * line}];")
                across = e.attr[1][0].coefficient(t) is ONE
                (x, xb), (y, yb) = ((v, vb), (t, tb)) if across else ((t, tb), (v, vb))
                with self.loop(x, self.sym(xb), ends[x]), \
                        self.loop(y, self.sym(yb), ends[y], how=APART if across else LANES):
                    self.line(f"{array}{place} = {self.value(e)};")
            if short:  # all else walks the two as one, and so does the array
                both = Sym(f"{t.name}{v.name}", high * short)
                self.narrowed = {t: as_index(tb) + as_index(both) // short, v: as_index(both) % short}
                with self.loop(both, "0", f"({ends[t]} - {self.sym(tb)}) * {short}", how=LANES) as scope:
                    scope.known.update({e.subs(self.narrowed): f"{array}[{self.sym(both)}]"
                                        for e, array in transposed.items()})
                    for i in self.k.items:
                        self.map_item(i)
                self.narrowed = {}
                return
            with self.loop(t, self.sym(tb), ends[t]), \
                    self.loop(v, self.sym(vb), ends[v], how=LANES) as scope:
                scope.known.update({e: array + place for e, array in transposed.items()})
                for i in self.k.items:
                    self.map_item(i)
