"""Tensors whose tiles the GPU's copy engine moves: which accesses qualify, and how the kernel gets their description.

The host describes a tensor in an argument of the kernel (`source.TensorMap`). Without such a host, as in packages and
in the interpreter, the kernel describes the tensor itself, before its first tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.codegen.source import TensorMap
from flambeau.ir.expr import Expr
from flambeau.ir.index import ONE, ZERO, Index, Sym, as_index

from ..blocks import BlockWriter, padded_read
from ..dialect import POINTER

LINE = 16  # bytes; steps between lines have to be multiples of it
RANK = 5  # the most dimensions of a tensor


@dataclass(frozen=True)
class Matrix:
    """Memory whose tiles the copy engine reads or writes, with one variable along each dimension."""

    buffer: str
    start: Index
    vars: tuple[Sym, ...]  # the contiguous one last
    steps: tuple[Index, ...]
    even: frozenset[Sym]  # sizes known at run time that have to be divisible by 16


def matrix(buffer: str, address: Index, batch: Sequence[Sym], own: Sequence[Sym], itemsize: int) -> Matrix | None:
    """Returns an access as a matrix of two variables for each point of the batch, or None. One of the two has to be
    contiguous, and lines have to begin where the engine can read if the sizes in `even` are divisible by 16."""
    steps = {v: s for v in (*batch, *own) if (s := address.coefficient(v)) is not None and s is not ZERO}
    start = address - sum((s * v for v, s in steps.items()), as_index(0))
    lines = [s for s in steps.values() if s is not ONE]
    if len(own) != 2 or not all(v in steps for v in own) or len(lines) + 1 != len(steps) or len(steps) > RANK \
            or not start.is_const or start.const * itemsize % LINE:
        return None
    even: set[Sym] = set()
    for s in lines:
        for mono, count in (*s.terms, ((), s.const)):
            if count * itemsize % LINE:
                sizes = [a for a in mono if isinstance(a, Sym) and a.extent is None]
                if not sizes:
                    return None
                even.add(sizes[0])
        if any(v.extent is not None for v in s.symbols()) or s.is_const and s.const < 0:
            return None
    dims = sorted(steps, key=lambda v: (v in own, steps[v] is ONE))
    if steps[dims[-1]] is not ONE:
        return None
    return Matrix(buffer, start, tuple(dims), tuple(steps[v] for v in dims), frozenset(even))


def whole_line(e: Expr, depth: Sequence[Sym], deep: int) -> tuple[Sequence[Sym], Index | None, Expr]:
    """Undoes the split of a padded read along a depth that is cut into pieces, the last of them shorter. Returns the
    variable of the whole line, where the piece begins in it, and the read along it; beyond the line's end the copy
    engine reads zeros. Any other expression is returned unchanged, with None."""
    read = padded_read(e)
    test = e.args[0] if read is not None else e
    if read is None or len(depth) != 1 or test.op != "lt" or e.args[1] is not read or e.args[2].attr != 0 \
            or any(a.op not in ("index", "const") for a in test.args):
        return depth, None, e
    place, size = (as_index(a.attr) for a in test.args)
    piece, (v,) = place - depth[0], depth
    if v in piece.symbols() or any(n % deep for n in (piece.const, *(n for _, n in piece.terms))):
        return depth, None, e
    whole = Sym(f"{v.name}w", size)
    return (whole,), piece, Expr("load", e.dtype, (), (read.attr[0], (
        read.attr[1][0].subs({v: as_index(whole) - piece}),)))


class MapWriter(BlockWriter):
    """Reads and writes tiles with the copy engine."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.maps: dict[tuple[Matrix, tuple[int, ...]], TensorMap] = {}

    def described(self, m: Matrix, sides: tuple[int, ...]) -> TensorMap:
        """Returns the map of a tensor for tiles with these sides; describes the tensor in the kernel on first use."""
        if (m, sides) not in self.maps:
            number = len(self.maps)
            dtype, places = self.dtypes[m.buffer], {s: k for k, s in enumerate(self.sizes)}
            made = self.maps[m, sides] = TensorMap(
                f"map{number}", [*self.short].index(m.buffer), m.start.const, POINTER[dtype].removeprefix("*"),
                # A tensor without elements is never read, but its description has to be valid.
                dtype.itemsize, tuple(f"max({self.host(v.size)}, 1)" for v in m.vars),
                (*(f"max({self.host(s)}, {LINE // dtype.itemsize})" for s in m.steps[:-1]), "1"), sides,
                sum(1 << places[s] for s in m.even))
            shape, steps = (", ".join(map(self.index, given)) for given in ([v.size for v in m.vars], m.steps))
            start = f"{self.short[m.buffer]} + {m.start.const}" if m.start.const else self.short[m.buffer]
            self.scopes[0].lines += [
                f"if {made.name} is not None:", "  if HOSTED:", f"    matrix{number} = {made.name}", "  else:",
                f"    matrix{number} = tl.make_tensor_descriptor({start}, [{shape}], [{steps}], {[*sides]})"]
        return self.maps[m, sides]

    def moved(self, m: Matrix, places: Mapping[Sym, tuple[str, int]], value: str = "") -> tuple[str, str]:
        """Returns the condition under which the copy engine is used, and the text of a tile's load, or of the store of
        `value`."""
        sides = tuple(places[v][1] if v in places else 1 for v in m.vars)
        # The engine takes 32-bit coordinates, whatever the width of the sizes they are computed from.
        where = [f"tl.cast({places[v][0] if v in places else self.sym(v)}, tl.int32)" for v in m.vars]
        name = self.described(m, sides).name
        tensor, at, there = name.replace("map", "matrix"), ", ".join(where), f"if {name} is not None:"
        if value:
            return there, f"{tensor}.store([{at}], {value}.reshape({[*sides]}))"
        return there, f"{tensor}.load([{at}]).reshape({[*sides[-2:]]})"
