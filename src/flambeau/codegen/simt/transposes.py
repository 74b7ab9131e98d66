"""Maps on GPUs whose inputs are contiguous in different variables, such as transposes.

A group takes a tile of both. Data that is contiguous along the second variable goes through local memory: it is read
along the second variable, and used along the first.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flambeau.ir.index import ONE, Sym, ceildiv, volume
from flambeau.ir.program import LoopKernel
from flambeau.ir.tuning import POINTS

from ..dialect import Dialect
from .dialect import Shape
from .group_order import bands
from .points import PointLoops
from .wide_access import Several


class Transpose(Several, PointLoops):
    def __init__(self, dialect: Dialect, kernel: LoopKernel, shape: Shape) -> None:
        super().__init__(dialect, kernel, shape)
        assert kernel.vector is not None and kernel.tile is not None
        self.along, self.across = kernel.vector, kernel.tile
        self.reads = kernel.transposed_reads(masked=True)
        # Tiles that share cache lines of data that is contiguous along a third variable follow one another.
        third = {v for _, a in kernel.accesses() for v in kernel.outer if a.coefficient(v) is ONE}
        self.beside = [v for v in kernel.outer if v in third - {self.along, self.across}]
        self.apart = [v for v in kernel.outer if v not in {*self.beside, self.along, self.across}]
        side = POINTS.transpose_side
        while side > 1 and self.bytes(side) > shape.local:
            side //= 2
        self.long, self.high = side_of(self.along, side), side_of(self.across, side)
        self.group = min(shape.group, self.long * self.high)
        self.each = self.long * self.high // self.group
        self.wide, self.many = ceildiv(self.along.size, self.long), ceildiv(self.across.size, self.high)
        tiles = self.wide * self.many * volume(self.beside)
        every = [*self.apart, *self.beside, self.across, self.along]
        b = bands(kernel, every, self.long * self.high, outer=len(self.apart))
        if b is not None:  # tiles that read the same data are walked side by side
            self.bands = replace(b, groups=tiles * volume(self.apart[len(b.outer):]))
        self.tiles = tiles * volume(self.apart)

    def bytes(self, side: int) -> int:
        return sum(e.dtype.itemsize for e in self.reads) * side * (side + 1)

    def write(self) -> None:
        long, along, across, b = self.d.long, self.along, self.across, self.bands
        beside, wide, many = map(self.index, (volume(self.beside), self.wide, self.many))
        self.total = (self.tiles if b is None else b.padded(self.tiles)) * self.group
        arrays = {e: self.fresh("transposed") for e in self.reads}
        for e, array in arrays.items():  # padded by a column: neighbours are in different banks, whichever way
            self.line(f"{self.d.local} {self.d.stored[e.dtype]} {array}[{self.long * (self.high + 1)}];")
        turn = b.turn(f"({self.d.types[torch.int64]}){self.d.group}", self.index) if b else self.d.group
        self.line(f"const {long} {self.me} = {self.d.lane}, tile = {turn}, block = tile / {beside};")
        self.line(f"const {long} x0 = block % {wide} * {self.long}, rest = block / {wide};")
        self.line(f"const {long} y0 = rest % {many} * {self.high}, other = rest / {many};")
        with self.scope(f"if (tile < {self.index(self.tiles)}) {{" if b else "{", (*self.apart, *self.beside)):
            self.decompose("other", self.apart)
            self.decompose(f"tile % {beside}", self.beside)
            with self.every() as s:
                x, y = self.places(s, f"/ {self.high}", f"% {self.high}")
                with self.scope("{", (along, across)):
                    for v, at in ((along, f"x0 + {x}"), (across, f"y0 + {y}")):
                        last = self.d.minimum.format(f"({long})({at})", f"({long})({self.extent(v)} - 1)")
                        self.line(f"const {long} {self.sym(v)} = {last};")
                    for e, array in arrays.items():
                        self.line(f"{array}[{x} * {self.high + 1} + {y}] = {self.value(e)};")
            self.line(self.d.barrier)
            with self.every() as s:
                x, y = self.places(s, f"% {self.long}", f"/ {self.long}")
                with self.scope("{", (along, across)) as scope:
                    self.line(f"const {long} {self.sym(along)} = x0 + {x}, {self.sym(across)} = y0 + {y};")
                    for e, array in arrays.items():
                        scope.known[e] = self.as_value(f"{array}[{x} * {self.high + 1} + {y}]", e.dtype)
                    with self.scope(f"if ({self.sym(along)} < {self.extent(along)} && "
                                    f"{self.sym(across)} < {self.extent(across)}) {{", (along, across)):
                        for stage in self.k.stages:
                            self.stage(stage)

    def places(self, s: str, of_x: str, of_y: str) -> tuple[str, str]:
        """The coordinates in the tile of a work-item's element, by its number."""
        x, y, at = self.fresh("x"), self.fresh("y"), f"({s} * {self.group} + {self.me})"
        self.line(f"const int {x} = {at} {of_x}, {y} = {at} {of_y};")
        return x, y


def side_of(v: Sym, most: int) -> int:
    """The side of a tile: at most `most`, and the least power of two that holds the variable, if it is short."""
    return min(most, 1 << (v.size.const - 1).bit_length()) if v.size.is_const and v.size.const else most
