"""Attention in Triton: a program owns a block of rows, loops over blocks of columns, and keeps scores in registers.

The sum of a row is kept relative to its largest score so far (an online softmax, to the base of two), so that every
score is computed once. Score and mask are expressions, written over the tile of a block. There are two kinds of blocks
of columns, with a loop each: whole blocks, in which the mask holds everywhere and is not computed, and the others. The
kind of a block follows from where the mask begins and ends (`Limit`), or from lists in memory: the caller's, or our own
(`attention_lists.py`). Blocks in which the mask holds nowhere are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from flambeau.ir.attention import Listed
from flambeau.ir.expr import Expr, loads
from flambeau.ir.index import ONE, Index, Sym, as_index, flat, volume
from flambeau.ir.program import AttentionKernel, sites_of
from flambeau.ir.tuning import UNSCALED, AttentionTile, Scale, attention_tile

from ..blocks import NARROWED, BlockWriter, PartDraft, count_text, power, width_of
from ..dialect import ROUGH, TRITON

LEAST = 16  # the smallest side of a tile that tensor cores accept


@dataclass(frozen=True)
class Piece:
    """A range of a head's elements that is one side of a tile: its length is a power of two, and `masked` says that the
    last elements may lie beyond the head."""

    start: int
    length: int
    masked: bool


def pieces(size: Index, about: int, divided: bool) -> list[Piece]:
    """Splits a head into tile sides: one piece, or two if `divided` allows it and fewer elements are padding then.

    Only a dimension that is summed over may be split: on Hopper, Triton 3.6 gives wrong sums where one factor in
    registers is multiplied into two accumulators outside of a pipelined loop.
    """
    n = size.const if size.is_const else about
    whole = max(LEAST, power(n))
    first = whole // 2
    second = max(LEAST, power(n - first)) if n > first else whole
    sizes = [first, second] if divided and size.is_const and first >= LEAST and first + second < whole else [whole]
    starts = [0, first][: len(sizes)]
    return [Piece(at, length, not size.is_const or at + length > n) for at, length in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class Side:
    """One side of a tile: its variable, the text of its first value, its length, and whether points beyond its end are
    masked."""

    var: Sym
    start: str
    length: int
    masked: bool = False


@dataclass(frozen=True)
class Walk:
    """A loop over blocks of the other side: its header, and the lines that compute where a block begins (`at`)."""

    header: str
    found: Sequence[str] | Callable[[], None] = ()
    ends: bool = False  # the last block may reach beyond the last element
    asks: bool = False  # the mask has to be computed in these blocks
    vars: tuple[Sym, ...] = ()


class AttentionBlocks(BlockWriter):
    """The base of all attention kernels. A program owns one block of the side `own` and loops over blocks of the side
    `other`."""

    def __init__(self, k: AttentionKernel, scale: Scale = UNSCALED, part: int = 0) -> None:
        n = k.node
        nests = (*n.batch, n.group, n.row, n.column), (n.row, n.depth), (n.column, n.width)
        places = [*k.stores, *((name, at) for name, _, at in k.cleared)]
        super().__init__(k.params, k.sizes, width_of(k, k.everything(), places, *nests[1:], n.batch), part)
        self.k, self.n, self.sites = k, n, sites_of(k)
        self.kind = n.query.dtype
        self.d = ROUGH if self.kind.itemsize <= 2 else TRITON
        self.deep = pieces(n.depth.size, k.about(n.depth.size, 64), k.role == "out")
        self.broad = pieces(n.width.size, k.about(n.width.size, 64), False)
        head = max(sum(p.length for p in side) for side in (self.deep, self.broad))
        self.t = attention_tile(k.role, head, self.kind.itemsize, n.keep is not None, scale.tile)
        if n.lists is not None:
            self.t = within(self.t, n.lists.high, n.lists.wide)
        self.by_rows = k.role in ("out", "queries")
        self.own, self.other = (n.row, n.column) if self.by_rows else (n.column, n.row)
        self.length, self.step = (self.t.high, self.t.wide) if self.by_rows else (self.t.wide, self.t.high)

    # ---- the program -----------------------------------------------------------------------------------

    def open(self, *batch: Sym) -> str:
        """Writes which block a program owns and for which point of the batch; returns the grid. Programs that read the
        same biases of scores are neighbours."""
        across = [e.symbols() for e in loads(self.n.score) if {self.n.row, self.n.column} <= e.symbols()]
        batch = tuple(v for v in batch if v.size is not ONE)
        alike = tuple(v for v in batch if across and not any(v in found for found in across))
        outside, inside = tuple(v for v in batch if v not in alike), self.index(volume(alike))
        count = count_text(self.own.size, self.length, self.index)
        self.line(f"pid = tl.program_id(0){self.widened()}")
        self.decompose(f"(pid % {inside})", alike)
        at = f"pid // {inside} % {count}"
        if self.by_rows and any(x.step for x in self.k.below):  # rows with the most columns first
            at = f"{count} - 1 - {at}"
        self.line(f"block = {at}")
        self.decompose(f"(pid // ({inside} * {count}))", outside)
        self.line(f"first = block * {self.length}")
        self.side(self.own, "first", 0, self.length)
        grid = [count_text(self.own.size, self.length, self.host), self.host(volume(batch))]
        return " * ".join(grid)

    def widened(self) -> str:
        return "" if self.width is NARROWED else f".to({self.width.kind})"

    def decompose(self, flat: str, vars: Sequence[Sym]) -> None:
        if vars:
            super().decompose(flat, vars)

    def side(self, v: Sym, start: str, axis: int, length: int, masked: bool = True) -> None:
        """Defines a variable along an axis of the tile of scores, and its mask."""
        self.axes[v] = axis
        self.blocks = [self.length, self.step]
        self.line(f"{self.sym(v)} = {start} + {self.arange(axis)}")
        self.masks.pop(axis, None)
        if masked and not divides(length, v.size):
            self.masks[axis] = self.fresh("m")
            self.line(f"{self.masks[axis]} = {self.sym(v)} < {self.index(v.size)}")

    @contextmanager
    def tile(self, *sides: Side) -> Iterator[dict[Sym, Index]]:
        """Opens a tile whose sides have fresh variables; yields the mapping from the original variables to these."""
        blocks, masks = self.blocks, self.masks
        self.blocks, self.masks = [s.length for s in sides], {}
        mapping: dict[Sym, Index] = {}
        for axis, s in enumerate(sides):
            v = Sym(self.fresh(f"{s.var.name}_"), s.var.size)
            mapping[s.var] = as_index(v)
            self.axes[v] = axis
            self.scopes[-1].vars.add(v)
            start = "" if s.start == "0" else f"{s.start} + "
            self.line(f"{self.sym(v)} = {start}{self.arange(axis)}")
            if s.masked:
                self.masks[axis] = self.fresh("m")
                self.line(f"{self.masks[axis]} = {self.sym(v)} < {self.index(s.var.size)}")
        yield mapping
        self.blocks, self.masks = blocks, masks

    def factor(self, e: Expr, long: Side, head: Sym, parts: Sequence[Piece]) -> list[str]:
        """Loads or computes a factor; returns the names of its tiles, one for each piece of the head."""
        names = []
        for p in parts:
            with self.tile(long, Side(head, str(p.start), p.length, p.masked)) as mapping:
                read = e.subs(mapping)
                plain = read.op == "load" and not read.args
                text = self.load(read.attr[0], read.attr[1][0], (), "0") if plain else self.value(read)
                # axes that the value does not vary along (expanded, or of size one)
                alike = self.full() - self.axes_of(read)
                text = self.spread(text, self.full()) if alike else text
                # a load already gives zeros beyond the sides that it reads
                holds = self.inside(alike if plain else self.full())
                text = f"tl.where({holds}, {text}, 0)" if holds else text
                names.append(self.fresh("x"))
                self.line(f"{names[-1]} = {text}")
        return names

    def written(self, name: str, address: Index, texts: Sequence[str], long: Side, head: Sym, parts: Sequence[Piece]
                ) -> None:
        """Stores tiles, one for each piece of a head: the counterpart of `factor`."""
        for p, text in zip(parts, texts, strict=True):
            with self.tile(long, Side(head, str(p.start), p.length, p.masked)) as mapping:
                kind = self.d.types[self.dtypes[name]]
                self.store(name, address.subs(mapping), f"tl.cast({text}, {kind})", self.full())

    def dot(self, a: Sequence[str], b: Sequence[str], into: str = "") -> str:
        """Writes the sum of products over pieces; returns its name. A product in float32 takes three tensor core
        products (tf32x3), as in the kernels of libraries."""
        how = f', input_precision="{"tf32" if self.n.tf32 else "tf32x3"}"' if self.kind is torch.float32 else ""
        for x, y in zip(a, b, strict=True):
            name = self.fresh("dot")
            self.line(f"{name} = tl.dot({x}, {y}{f', {into}' if into else ''}{how}, "
                      f"out_dtype={self.d.types[self.n.dtype]})")
            into = name
        return into

    def zeros(self, name: str, *shape: int, value: str = "0") -> str:
        self.line(f"{name} = tl.full([{', '.join(map(str, shape))}], {value}, {self.d.types[self.n.dtype]})")
        return name

    # ---- which blocks are visited ----------------------------------------------------------------------

    def walks(self) -> list[Walk]:
        """Returns the loops over the other side's blocks: whole blocks first, then those that compute the mask."""
        lists, ends = self.n.lists, not divides(self.step, self.other.size)
        if lists is not None:
            part, whole = (lists.part, lists.whole) if self.by_rows else (lists.part_by_column, lists.whole_by_column)
            return [self.listed(x, x is part) for x in (whole, part) if x is not None]
        if self.has_lists:
            return self.own_lists()
        size = self.index(self.other.size)
        if not self.k.below and not self.k.since:
            if self.k.rest is not None:
                return [Walk(self.range("0", size), ends=ends, asks=True)]
            inside = f"{size} // {self.step} * {self.step}"
            return [Walk(self.range("0", inside)), *([Walk(self.range(inside, size), ends=True)] if ends else [])]
        self.spans()
        if self.k.rest is not None:
            return [Walk(self.range("lo", "hi"), ends=ends, asks=True)]
        # The blocks in which the mask is computed may lie on both sides of the whole ones.
        found = "at = tl.where(step < whole_lo - lo, lo + step, whole_hi + step - (whole_lo - lo))"
        return [Walk(self.range("whole_lo", "whole_hi")),
                Walk(self.range("0", "whole_lo - lo + hi - whole_hi", "step"), (found,), ends, True)]

    def range(self, first: str, last: str, name: str = "at") -> str:
        return f"for {name} in range({first}, {last}, {self.step}):"

    def spans(self) -> None:
        """Writes the range of blocks to visit (lo to hi), and within it the range where the mask holds everywhere
        (whole_lo to whole_hi). All four are multiples of a block."""
        size, step = self.index(self.other.size), self.step
        self.line(f"last = first + {self.length - 1}")
        start = "first * 0"  # zero, in the type of indices
        lo, hi, whole_lo, whole_hi = [start], [f"{start} + {size}"], [start], [f"{start} + {size}"]
        gone: list[str] = []  # conditions under which no block is visited
        asked: list[str] = []  # conditions under which every block computes the mask
        for x, least, most, whole_least, whole_most in [
                *((x, lo, hi, whole_lo, whole_hi) for x in self.k.below),
                *((x, hi, lo, whole_hi, whole_lo) for x in self.k.since)]:
            is_below, limit = least is lo, self.index(x.offset)
            near, far = ("first", "last") if is_below else ("last", "first")
            if self.by_rows:
                most.append(f"{far} + {limit}" if x.step else f"{start} + {limit}")
                whole_most.append(f"{near} + {limit}" if x.step else f"{start} + {limit}")
            elif x.step:
                least.append(f"{near} - {limit} + 1")
                whole_least.append(f"{far} - {limit} + 1")
            else:
                sign = ">=" if is_below else "<"
                gone.append(f"{near} {sign} {limit}")
                asked.append(f"{far} {sign} {limit}")
        self.line(f"lo = {extreme('maximum', lo)} // {step} * {step}")
        self.line(f"hi = tl.maximum(({extreme('minimum', hi)} + {step - 1}) // {step} * {step}, lo)")
        for holds in gone:
            self.line(f"hi = tl.where({holds}, lo, hi)")
        self.line(f"whole_lo = tl.minimum(({extreme('maximum', whole_lo)} + {step - 1}) // {step} * {step}, hi)")
        self.line(f"whole_hi = tl.maximum({extreme('minimum', whole_hi)}, 0) // {step} * {step}")
        self.line("whole_hi = tl.minimum(tl.maximum(whole_hi, whole_lo), hi)")
        for holds in asked:
            self.line(f"whole_hi = tl.where({holds}, whole_lo, whole_hi)")

    def listed(self, x: Listed, asks: bool) -> Walk:
        """Returns the loop over blocks that the caller lists. One block of the caller may be several of ours."""
        lists = self.n.lists
        assert lists is not None
        own, other = (lists.high, lists.wide) if self.by_rows else (lists.wide, lists.high)
        each = other // self.step
        self.scopes[-1].vars.add(x.at)
        self.line(f"{self.sym(x.at)} = first // {own}")

        def found() -> None:
            self.line(f"{self.sym(x.step)} = step // {each}")
            self.line(f"at = tl.cast({self.value(x.block)}, first.dtype) * {other} + step % {each} * {self.step}")

        return Walk(f"for step in range(0, tl.cast({self.value(x.count)}, tl.int32) * {each}):", found,
                    not divides(self.step, self.other.size), asks, (x.step,))

    @property
    def has_lists(self) -> bool:
        """Whether an earlier launch lists the blocks for this kernel, which pays where the mask may leave some out."""
        k, t = self.k, self.t
        some = any(k.about(v.size, t.listed * side) >= t.listed * side
                   for v, side in ((self.own, self.length), (self.other, self.step)))
        return k.rest is not None and self.n.lists is None and some

    def list_vars(self) -> tuple[Sym, ...]:
        """The variables of the batch for whose points there are separate lists: those that the mask depends on."""
        known = frozenset[Sym]().union(*(x.offset.symbols() for x in (*self.k.below, *self.k.since)))
        known |= self.k.rest.symbols() if self.k.rest is not None else frozenset()
        return tuple(v for v in (*self.n.batch, self.n.group) if v in known)

    def list_sizes(self, text: Callable[[Index], str]) -> tuple[str, str, str]:
        """Returns the number of lists for each point of the batch, the most entries of a list, and the number of all
        lists."""
        own, other = count_text(self.own.size, self.length, text), count_text(self.other.size, self.step, text)
        return own, other, f"{text(volume(self.list_vars()))} * {own}"

    def own_lists(self) -> list[Walk]:
        """Returns the loops over our own lists. A list begins with two counts; blocks with a mask follow from its start
        on, whole blocks are stored backwards from its end."""
        own, other, _ = self.list_sizes(self.index)
        at = self.fresh("list")
        self.line(f"{at} = work.to(tl.pointer_type(tl.int32)) + "
                  f"({self.index(flat(self.list_vars()))} * {own} + block) * ({other} + 2)")
        ends = not divides(self.step, self.other.size)
        entries = {False: f"{at} + ({other} + 1) - step", True: f"{at} + 2 + step"}
        return [Walk(f"for step in range(0, tl.load({at} + {int(not asks)})):",
                     (f"at = tl.load({entries[asks]}).to(first.dtype) * {self.step}",), ends and asks, asks)
                for asks in (False, True)]

    @contextmanager
    def walk(self, w: Walk) -> Iterator[Side]:
        """Opens the loop; yields the current block of the other side as a side of a tile."""
        with self.scope(w.header, (self.other, *w.vars), footer=""):
            if callable(w.found):
                w.found()
            else:
                self.scopes[-1].lines += w.found
            self.side(self.other, "at", 1, self.step, w.ends)
            yield Side(self.other, "at", self.step, 1 in self.masks)
            self.masks.pop(1, None)

    # ---- scores ----------------------------------------------------------------------------------------

    def scored(self, product: str) -> None:
        """Makes expressions that follow see the product of this block."""
        self.scopes[-1].known[self.n.product] = product
        self.loop_axes = self.full()

    def linear(self) -> str | None:
        """Returns the factor if the score is only the product times a positive constant; None otherwise."""
        e = self.n.score
        if e.op == "mul" and e.args[0] is self.n.product and e.args[1].op == "const" and e.args[1].attr > 0:
            return self.value(e.args[1])
        return None

    def conditions(self, w: Walk) -> str:
        """Returns the condition under which points of a block count; empty if all of them do."""
        holds = [self.masks[1]] if 1 in self.masks else []
        if w.asks:
            row, column = self.sym(self.n.row), self.sym(self.n.column)
            for sign, found in (("<", self.k.below), (">=", self.k.since)):
                holds += [f"({column} {sign} {f'{row} + ' if x.step else ''}{self.index(x.offset)})" for x in found]
            holds += [] if self.k.rest is None else [self.value(self.k.rest)]
        return " & ".join(holds)

    def draft(self, grid: str) -> PartDraft:
        return PartDraft(self, grid, self.t.warps, stages=self.t.stages)


class OutBlocks(AttentionBlocks):
    """The forward kernel: the result, and the logarithms of the rows' sums."""

    def render(self) -> PartDraft:
        n, t = self.n, self.t
        grid = self.open(*n.batch, n.group)
        rows = Side(n.row, "first", t.high, 0 in self.masks)
        queries = self.factor(n.query, rows, n.depth, self.deep)
        sums = [self.zeros(f"sums{i}", t.high, p.length) for i, p in enumerate(self.broad)]
        self.zeros("top", t.high, value='float("-inf")')
        self.zeros("total", t.high)
        for w in self.walks():
            with self.walk(w) as columns:
                self.block(w, columns, queries, sums)
        self.finish(rows, sums)
        return self.draft(grid)

    def block(self, w: Walk, columns: Side, queries: Sequence[str], sums: Sequence[str]) -> None:
        n = self.n
        keys = self.factor(n.key, columns, n.depth, self.deep)
        s = self.dot(queries, [f"tl.trans({x})" for x in keys])
        self.scored(s)
        holds, factor = self.conditions(w), self.linear()
        if factor is None or holds:
            x = self.fresh("x")
            score = self.spread(self.value(n.score), self.full())
            hidden = 'float("-inf")'
            self.line(f"{x} = {f'tl.where({holds}, {score}, {hidden})' if holds else score}")
            self.line(f"higher = tl.maximum(top, tl.max({x}, 1))")
            self.line('base = tl.where(higher == float("-inf"), 0, higher)')  # for rows that are hidden so far
            self.line(f"p = tl.exp2({x} - base[:, None])")
            self.line("fade = tl.exp2(top - base)")
        else:
            self.line(f"higher = tl.maximum(top, tl.max({s}, 1) * {factor})")
            self.line(f"p = tl.exp2(fl.fma({s}, {factor}, -higher[:, None]))")
            self.line("fade = tl.exp2(top - higher)")
        self.line("total = total * fade + tl.sum(p, 1)")
        if n.keep is not None:
            self.line(f"p = p * {self.value(n.keep)}")
        values = self.factor(n.value, columns, n.width, self.broad)
        self.line(f"p_kind = tl.cast(p, {self.d.types[self.kind]})")
        for name, v in zip(sums, values, strict=True):
            self.line(f"{name} = {name} * fade[:, None]")
            self.line(f"{name} = {self.dot(['p_kind'], [v], name)}")
        self.line("top = higher")

    def finish(self, rows: Side, sums: Sequence[str]) -> None:
        n, places = self.n, dict(self.k.stores)
        out, logs, tops = n.names
        if out in places:
            self.line("share = 1 / tl.where(total == 0, 1, total)")
            self.written(out, places[out], [f"{x} * share[:, None]" for x in sums], rows, n.width, self.broad)
        if logs in places:
            self.store(logs, places[logs], "(top + tl.log2(total))[:, None]", frozenset((0,)))
        if tops in places:
            self.store(tops, places[tops], "top[:, None]", frozenset((0,)))


def within(t: AttentionTile, high: int, wide: int) -> AttentionTile:
    """Shrinks a tile so that its sides divide those of the caller's blocks."""
    high, wide = math.gcd(t.high, high), math.gcd(t.wide, wide)
    return t if (high, wide) == (t.high, t.wide) else replace(t, high=high, wide=wide, warps=min(t.warps, 4))


def divides(length: int, size: Index) -> bool:
    return size.is_const and size.const % length == 0


def extreme(function: str, texts: Sequence[str]) -> str:
    out = texts[0]
    for text in texts[1:]:
        out = f"tl.{function}({out}, {text})"
    return out
