"""Contractions on GPUs: a group computes a tile of the result, and shares its inputs in local memory.

For each stretch of the depth, the work-items of a group load both factors into local memory, whatever expressions they
are. Then each work-item computes some rows and columns of the tile, which it keeps in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt

import torch

from flambeau.ir.expr import Expr
from flambeau.ir.index import Index, Sym, ceildiv, volume
from flambeau.ir.lines import is_deep, joined
from flambeau.ir.program import ContractKernel
from flambeau.ir.tuning import POINTS

from ..c.contractions.writer import ContractWriter
from ..dialect import UNROLLED
from .dialect import LaunchDraft, Shape, SimtDialect, SimtWriter
from .group_order import Bands, bands


def band(high: int, wide: int, groups: int) -> int:
    """The number of rows of tiles in a band that minimises the total reads of the groups that run at once."""
    def reads(rows: int) -> int:
        return high * -(-wide // (groups // rows)) + wide * -(-high // rows)

    return min(range(1, groups + 1), key=reads)


def tiles_of(k: ContractKernel, tile: int) -> tuple[Index, Index]:
    """The height and width of a product in tiles."""
    high, wide = (ceildiv(volume(vars), tile) for vars in (k.rows, k.columns))
    return high, wide


def batch_bands(k: ContractKernel, tile: int) -> Bands | None:
    high, wide = tiles_of(k, tile)
    return None if k.ragged is not None or k.reductions else bands(k, k.batch, 1, high * wide)


def apart_by_lines(k: ContractKernel, tile: int) -> ContractKernel:
    """The kernel with the slowest variable of its rows or columns moved to the batch, if tiles that differ in it share
    cache lines: products of a batch can be walked side by side."""
    by_row = replace(k, batch=(*k.batch, *k.rows[:1]), rows=k.rows[1:])
    by_column = replace(k, batch=(*k.batch, *k.columns[:1]), columns=k.columns[1:])
    for more in (by_row, by_column):
        b = batch_bands(more, tile) if more.rows and more.columns else None
        if b is not None and more.batch[-1] in b.outer:
            return apart_by_lines(more, tile)
    return k


class Tiles(SimtWriter, ContractWriter):
    sum = "sums[s]"  # a work-item's sum number s

    def __init__(self, dialect: SimtDialect, kernel: ContractKernel, shape: Shape) -> None:
        self.side = isqrt(shape.group)  # work-items
        self.group = self.side * self.side
        self.tile = POINTS.product_each * self.side
        kernel = apart_by_lines(kernel, self.tile)
        super().__init__(dialect, kernel)
        self.row = self.tile + 1  # padded: neighbours are in different banks, whichever way they are written
        self.tiles = tiles_of(kernel, self.tile)
        self.bands = batch_bands(kernel, self.tile)
        self.at_once = max(POINTS.groups // (self.bands.rows if self.bands else 1), 1)  # groups of one product
        high, wide = (max(-(-kernel.about(volume(vars), POINTS.groups * self.tile) // self.tile), 1)
                      for vars in (kernel.rows, kernel.columns))
        self.band = band(high, wide, self.at_once)

    def write(self) -> LaunchDraft:
        k, long, tile = self.k, self.d.long, self.tile
        (high, wide), b = self.tiles, self.bands
        blocks = high * wide * volume(k.batch)
        rows, columns, depth = (self.length(vars) for vars in (k.rows, k.columns, k.depth))
        size = POINTS.product_depth * self.row
        self.line(f"{self.d.local} {self.kind} lefts[{size}], rights[{size}];")
        turn = b.turn(f"({self.d.types[torch.int64]}){self.d.group}", self.index) if b else self.d.group
        self.line(f"const {long} me = {self.d.lane}, block = {turn};")
        self.line(f"const {long} mine_r = me / {self.side}, mine_c = me % {self.side};")
        with self.scope(f"if (block < {self.index(blocks)}) {{" if b else "{", k.batch):
            # Tiles are walked in bands of some rows, column by column within a band.
            band, tiles = self.band, self.index(high * wide)
            self.line(f"const {long} item = block / {tiles}, place = block % {tiles};")
            self.line(f"const {long} above = place / {self.index(wide * band)} * {band};")
            self.line(f"const {long} rest = place % {self.index(wide * band)};")
            within = self.d.minimum.format(f"({long})({self.index(high)} - above)", f"({long}){band}")
            self.line(f"const {long} within = {within};")
            self.line(f"const {long} r0 = (above + rest % within) * {tile}, c0 = rest / within * {tile};")
            self.decompose("item", k.batch)
            self.begin()
            with self.scope(f"for ({long} k0 = 0; k0 < {depth}; k0 += {POINTS.product_depth}) {{"):
                self.bring("lefts", k.left, k.rows, "r0", rows)
                self.bring("rights", k.right, k.columns, "c0", columns)
                self.line(self.d.barrier)
                self.multiply()
                self.line(self.d.barrier)
            self.end()
            with self.scope(f"for (int s = 0; s < {POINTS.product_each * POINTS.product_each}; ++s) {{", how=UNROLLED):
                self.line(f"const {long} row = r0 + mine_r + s / {POINTS.product_each} * {self.side};")
                self.line(f"const {long} column = c0 + mine_c + s % {POINTS.product_each} * {self.side};")
                with self.scope(f"if (row < {rows} && column < {columns}) {{", (*self.rows, *self.columns)):
                    self.decompose("row", self.rows)
                    self.decompose("column", self.columns)
                    self.finish(self.sum)
        return LaunchDraft(self, (b.padded(blocks) if b else blocks) * self.group, self.group)

    def begin(self) -> None:
        """Declares the sums and sets them to zero."""
        count = POINTS.product_each * POINTS.product_each
        self.line(f"{self.kind} sums[{count}];")
        self.line(f"for (int s = 0; s < {count}; ++s) sums[s] = 0;")

    def end(self) -> None:
        """Called when the sums are complete; nothing is left to do here."""

    def bring(self, array: str, factor: Expr, own: Sequence[Sym], start: str, end: str) -> None:
        """Loads a part of a factor into local memory; adjacent work-items load adjacent elements."""
        k, long, at, x, y = self.k, self.d.long, *(self.fresh(n) for n in ("at", "point", "deep"))
        places = (f"{at} / {POINTS.product_depth}", f"{at} % {POINTS.product_depth}") if is_deep(factor, own, k.depth) \
            else (f"{at} % {self.tile}", f"{at} / {self.tile}")
        value = self.fresh("v")
        with self.scope(f"for ({long} {at} = me; {at} < {self.tile * POINTS.product_depth}; {at} += {self.group}) {{"):
            self.line(f"const {long} {x} = {start} + {places[0]}, {y} = k0 + {places[1]};")
            self.line(f"{self.kind} {value} = 0;")
            own, (factor,) = joined(own, factor)
            depth, (factor,) = joined(k.depth, factor)
            with self.scope(f"if ({x} < {end} && {y} < {self.length(k.depth)}) {{", (*own, *depth)):
                self.decompose(x, own)
                self.decompose(y, depth)
                self.line(f"{value} = {self.value(factor)};")
            self.line(f"{array}[({y} - k0) * {self.row} + {x} - {start}] = {value};")

    def multiply(self) -> None:
        every = range(POINTS.product_each)
        with self.scope(f"for (int k = 0; k < {POINTS.product_depth}; ++k) {{"):
            self.line(self.d.contracted)
            for name, array, mine in (("l", "lefts", "mine_r"), ("r", "rights", "mine_c")):
                for i in every:
                    self.line(f"const {self.kind} {name}{i} = {array}[k * {self.row} + {mine} + {i * self.side}];")
            for i in every:
                for j in every:
                    self.line(f"sums[{i * POINTS.product_each + j}] += l{i} * r{j};")


class MatrixTiles(Tiles):
    """Tiles computed as products of small matrices, each held by work-items that run in step. The results go through
    local memory, to be read element by element."""

    sum = "whole[(row - r0) * {} + column - c0]"

    def __init__(self, dialect: SimtDialect, kernel: ContractKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        assert dialect.matrices is not None
        self.m = dialect.matrices
        self.row = self.tile + self.m.side  # padded: rows of a matrix begin where wide accesses may begin
        self.sum = self.sum.format(self.tile)
        steps, across = self.group // dialect.step, self.tile // self.m.side
        self.wide = 2 if steps % 2 == 0 else 1  # sets of work-items in step, side by side
        self.columns_each, self.rows_each = across // self.wide, across * self.wide // steps

    def begin(self) -> None:
        m = self.m
        self.scopes[0].lines.append(f"{self.d.local} {self.kind} whole[{self.tile * self.tile}];")
        self.line(f"const int mine = me / {self.d.step};")
        self.line(f"const int at_r = mine / {self.wide} * {self.rows_each * m.side};")
        self.line(f"const int at_c = mine % {self.wide} * {self.columns_each * m.side};")
        for s in range(self.rows_each * self.columns_each):  # not an array: they stay in registers
            self.line(f"{m.kind} sums{s} = {m.kind}(0.0f);")

    def multiply(self) -> None:
        m = self.m
        with self.scope(f"for (int k = 0; k < {POINTS.product_depth}; k += {m.side}) {{"):
            for name, array, start, count, turned in (("l", "lefts", "at_r", self.rows_each, "true"),
                                                      ("r", "rights", "at_c", self.columns_each, "false")):
                for i in range(count):
                    self.line(f"{m.kind} {name}{i};")
                    place = f"{array} + k * {self.row} + {start} + {i * m.side}"
                    self.line(m.load.format(f"{name}{i}", place, self.row, turned))
            for i in range(self.rows_each):
                for j in range(self.columns_each):
                    self.line(m.multiply.format(f"sums{i * self.columns_each + j}", f"l{i}", f"r{j}"))

    def end(self) -> None:
        m = self.m
        for i in range(self.rows_each):
            for j in range(self.columns_each):
                place = f"whole + (at_r + {i * m.side}) * {self.tile} + at_c + {j * m.side}"
                self.line(m.store.format(f"sums{i * self.columns_each + j}", place, self.tile))
        self.line(self.d.barrier)
