"""Products of few rows with a factor that is contiguous along the depth, as the weights of a linear layer are.

Copying such a factor into the order of `blocks.py` crosses cache lines, which takes longer than the product if few rows
use it. Here vectors go along the depth of both factors: a tile is some rows times some columns of sums, each a vector
whose lanes are added at the end. The right factor is read in place; the left one, which all columns use, is copied into
an array first, whatever expression it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flambeau.ir.expr import Expr
from flambeau.ir.index import ONE, ZERO, Index, Sym, about, volume
from flambeau.ir.lines import is_deep, joined
from flambeau.ir.program import ContractKernel
from flambeau.ir.tuning import CPU

from ...dialect import Dialect
from .blocks import ACROSS, COLUMNS, HIGH, ROWS, Blocks
from .tiles import USUAL, WIDE, Cut, Registers, Tile, fitted


def contraction(dialect: Dialect, kernel: ContractKernel) -> Blocks:
    """The writer of a contraction."""
    turned = replace(kernel, rows=kernel.columns, columns=kernel.rows, left=kernel.right, right=kernel.left)
    fits = [k for k in (kernel, turned) if not dialect.bounded and is_for_dots(k)]
    return Dots(dialect, min(fits, key=rows_of)) if fits else Blocks(dialect, kernel)


def rows_of(k: ContractKernel) -> int:
    return about(volume(k.rows), dict(k.typical), CPU.dot_rows + 1)


def is_for_dots(k: ContractKernel) -> bool:
    depth = about(volume(k.depth), dict(k.typical), CPU.dot_depth)
    return (rows_of(k) <= min(CPU.dot_rows, depth // CPU.dot_steps) and is_deep(k.left, k.rows, k.depth)
            and place_of(k) is not None)


def place_of(k: ContractKernel) -> tuple[str, Index, Sym | None, Sym] | None:
    """The place of the right factor: its buffer, an address, and the variables for columns and depth in it; None unless
    it is a plain read, contiguous along the depth."""
    columns, (e,) = joined(k.columns, k.right)
    depth, (e,) = joined(k.depth, e)
    stored = {p.name: p.dtype for p in k.params}
    if not is_plain(e, stored) or len(columns) > 1 or len(depth) != 1:
        return None
    address = e.attr[1][0]
    step = address.coefficient(columns[0]) if columns else ONE
    return (e.attr[0], address, columns[0] if columns else None, depth[0]) if (
        address.coefficient(depth[0]) is ONE and step is not None) else None


def is_plain(e: Expr, stored: Mapping[str, object]) -> bool:
    return e.op == "load" and not e.args and stored[e.attr[0]] is e.dtype and e.dtype.is_floating_point


def dot_tile(registers: Registers, itemsize: int, rows: int, columns: int, depth: int) -> Tile:
    """The tile that takes the least time in total: for products, reads, and adding up the lanes at the end."""
    lanes = registers.bytes // itemsize
    shapes = [Tile(high, wide, 1) for high in range(1, CPU.dot_side + 1) for wide in range(1, CPU.dot_side + 1)
              if high * wide + high < registers.count]

    def cost(t: Tile) -> tuple[float, int]:
        step = (max(t.high * t.vectors, CPU.tile_sums) + CPU.dot_reads * (t.high + t.vectors)) * -(-depth // lanes)
        return -(-rows // t.high) * -(-columns // t.vectors) * (step + CPU.dot_join * t.high * t.vectors), t.vectors

    return min(shapes, key=cost)


class Dots(Blocks):
    def __init__(self, dialect: Dialect, kernel: ContractKernel) -> None:
        super().__init__(dialect, kernel)
        found = place_of(kernel)
        assert found is not None
        self.place, self.stays, self.masks, self.deep_left = found, False, None, True
        typical = dict(kernel.typical)
        rows, columns, depth = (max(1, about(volume(vars), typical, CPU.dot_depth))
                                for vars in (kernel.rows, kernel.columns, kernel.depth))
        parts = max(1, round(depth / CPU.dot_depth)) if volume(kernel.depth).is_const else 1
        self.depth = -(-depth // parts) if volume(kernel.depth).is_const else CPU.dot_depth
        self.left_row = f"{self.depth + self.gap}"
        self.cuts = []
        for registers in (WIDE, USUAL) if dialect.preprocessed else (USUAL,):
            tile = dot_tile(registers, self.dtype.itemsize, rows, columns, depth)
            high = fitted(rows, tile.high, CPU.dot_block)
            wide = fitted(-(-columns // (4 * CPU.block_units)), tile.vectors, CPU.dot_columns)
            self.cuts.append(Cut(registers, tile, high, wide))

    def arrays(self) -> dict[str, str]:
        return {"lefts": f"{ROWS} * {self.left_row}", "sums": f"{ROWS} * {COLUMNS}"}

    def bring_left(self) -> None:
        super().bring_left()
        lanes, long = self.gap, self.d.long  # zeros fill up the last vector
        self.line(f"for ({long} x = 0; x < r1 - r0; ++x) for ({long} k = k1 - k0; k % {lanes} != 0; ++k) "
                  f"lefts[x * {self.left_row} + k] = 0;")

    def multiply(self) -> None:
        depth, long = self.length(self.k.depth), self.d.long
        buffer, address, column, along = self.place
        with self.scope(f"for ({long} k0 = 0; k0 < {self.fl}imax({depth}, 1); k0 += {self.depth}) {{", (along,)):
            self.line(f"const {long} k1 = {self.fl}imin(k0 + {self.depth}, {depth}), {self.sym(along)} = k0;")
            self.bring_left()
            with self.scope(f"for ({long} c = 0; c < c1 - c0; c += {ACROSS}) {{", (column,) if column else ()):
                step = address.coefficient(column) if column else ZERO
                assert step is not None
                if column:
                    self.line(f"const {long} {self.sym(column)} = c0 + c;")
                self.line(f"const {self.kind}* right = {self.short[buffer]} + {self.index(address)};")
                with self.scope(f"for ({long} r = 0; r < r1 - r0; r += {HIGH}) {{"):
                    self.line(f"KERNEL_NAME_tile(sums + r * {COLUMNS} + c, lefts + r * {self.left_row}, right, "
                              f"{self.index(step)}, c1 - c0 - c, k1 - k0, k0 == 0);")

    def tile_of(self, one: Cut) -> list[str]:
        t, lanes = one.tile, one.registers.bytes // self.dtype.itemsize
        v, loose = (f"fl::vector<{self.kind}, {lanes}>::{x}" for x in ("type", "loose"))
        each, row = [(r, c) for c in range(t.vectors) for r in range(t.high)], self.depth + self.gap
        out = [f"enum {{ {HIGH} = {t.high}, {ACROSS} = {t.vectors}, {ROWS} = {one.rows}, {COLUMNS} = {one.columns} }};",
               f"{self.d.inlined} void KERNEL_NAME_tile({self.kind}* sums, const {self.kind}* l, const {self.kind}* r, "
               f"{self.d.long} step, {self.d.long} wide, {self.d.long} n, bool first) {{", f"  {self.d.contracted}",
               # Beyond the last column the first one is read again, and its sum is not used.
               *(f"  const {self.kind}* r{c} = r + ({c} < wide ? {c} * step : 0);" for c in range(t.vectors)),
               *(f"  {v} s{r}_{c} = {{}};" for r, c in each), f"  {self.d.long} k = 0;",
               f"  for (; k + {lanes} <= n; k += {lanes}) {{",
               *(f"    const {v} a{r} = *(const {loose}*)(l + {r} * {row} + k);" for r in range(t.high))]
        for c in range(t.vectors):
            out.append(f"    const {v} b{c} = *(const {loose}*)(r{c} + k);")
            out += [f"    s{r}_{c} += a{r} * b{c};" for r in range(t.high)]
        out += ["  }", "  if (k < n) {"]
        for c in range(t.vectors):  # beyond the end there may be no memory
            out += [f"    {v} b{c};", f"    for (int i = 0; i < {lanes}; ++i) b{c}[i] = k + i < n ? r{c}[k + i] : 0;",
                    *(f"    s{r}_{c} += *(const {loose}*)(l + {r} * {row} + k) * b{c};" for r in range(t.high))]
        out.append("  }")
        for r, c in each:
            place, sum = f"sums[{r} * {COLUMNS} + {c}]", f"fl::total<{self.kind}, {lanes}>(s{r}_{c})"
            out.append(f"  {place} = first ? {sum} : {place} + {sum};")
        return [*out, "}"]
