"""Tile and block sizes of contractions: tiles fit into registers, blocks into caches."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.ir.index import Index
from flambeau.ir.tuning import CPU


@dataclass(frozen=True)
class Registers:
    """The vector registers of a kind of CPU: `condition` is the macro that its compilers define (empty: any other CPU),
    `bytes` the size of a vector, `count` the number of vectors."""

    condition: str
    bytes: int
    count: int


WIDE = Registers("__AVX512F__", 64, 32)
USUAL = Registers("", CPU.vector_bytes, 16)


@dataclass(frozen=True)
class Tile:
    """A tile: rows times vectors of sums."""

    high: int
    vectors: int
    lanes: int

    @property
    def wide(self) -> int:
        return self.vectors * self.lanes


def best_tile(registers: Registers, itemsize: int, rows: Index, columns: Index) -> Tile:
    """The tile that takes the least time in total: for each step of the depth, it multiplies for each sum and reads its
    rows and vectors. The padding of the last tile of a row or column is multiplied as well."""
    lanes = registers.bytes // itemsize
    shapes = [Tile(high, vectors, lanes) for vectors in range(1, CPU.tile_vectors + 1)
              for high in range(1, CPU.tile_highest + 1) if high * vectors + vectors < registers.count]

    def cost(t: Tile) -> tuple[float, int]:
        step = max(t.high * t.vectors, t.high + t.vectors, CPU.tile_sums) + 1
        down = -(-rows.const // t.high) if rows.is_const else 1 / t.high
        across = -(-columns.const // t.wide) if columns.is_const else 1 / t.wide
        return down * across * step, t.vectors

    return min(shapes, key=cost)


def fitted(size: int, step: int, most: int) -> int:
    """The side of blocks of about equal size, in whole steps and not above `most`."""
    size, most = max(size, 1), max(most, step)
    blocks = -(-size // most)
    each = -(-size // blocks)
    return -(-each // step) * step


@dataclass(frozen=True)
class Cut:
    """The sizes of one kernel for one kind of registers: its tile, and the rows and columns of its blocks."""

    registers: Registers
    tile: Tile
    rows: int
    columns: int


def cut(registers: Registers, itemsize: int, rows: Index, columns: Index, panel: int, batch: int, units: int) -> Cut:
    """Chooses the tile and the blocks of a kernel. `panel`: the steps of the depth for which an array holds the right
    factor of a block at once."""
    tile = best_tile(registers, itemsize, rows, columns)
    most = min(CPU.block_columns * 4, CPU.panel_bytes // max(panel, 1)) // itemsize
    high = fitted(rows.const if rows.is_const else CPU.block_rows, tile.high, CPU.block_rows)
    wide = fitted(columns.const if columns.is_const else most, tile.wide, most)
    if rows.is_const and columns.is_const:
        # Smaller blocks if there would be too few for all cores.
        while batch * -(-rows.const // high) * -(-columns.const // wide) < 4 * units:
            if wide >= max(high, 8 * tile.wide):
                wide = fitted(wide // 2, tile.wide, most)
            elif high >= 8 * tile.high:
                high = fitted(high // 2, tile.high, high)
            else:
                break
    return Cut(registers, tile, high, wide)
