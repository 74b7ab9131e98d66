"""Contractions on CPUs: a thread takes blocks of the result, and computes them in tiles that registers hold.

For each block and each stretch of the depth both factors are brought into small arrays, whatever expressions they are,
in the order in which tiles read them. A tile is some rows times two vectors: each step of the depth reads two vectors
of the right factor, and one number of the left factor for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.expr import Expr
from flambeau.ir.index import Index, Sym, volume
from flambeau.ir.lines import is_deep, joined
from flambeau.ir.program import ContractKernel
from flambeau.ir.tuning import CPU

from ...dialect import LANES, TEAM, Dialect
from .range_guards import guard_of
from .writer import ContractWriter


class Blocks(ContractWriter):
    def __init__(self, dialect: Dialect, kernel: ContractKernel, units: int = CPU.block_units) -> None:
        super().__init__(dialect, kernel)
        size = self.dtype.itemsize
        self.lanes = CPU.vector_bytes // size
        self.vector = dialect.vector(self.kind, self.lanes)
        self.wide = CPU.tile_vectors * self.lanes
        rows, columns, depth = (volume(vars) for vars in (kernel.rows, kernel.columns, kernel.depth))
        self.high = best_height(rows.const) if rows.is_const else CPU.tile_high
        self.most_columns = CPU.block_columns * 4 // size
        self.block_rows = fitted(rows.const if rows.is_const else CPU.block_rows, self.high, CPU.block_rows)
        self.block_columns = fitted(columns.const if columns.is_const else self.most_columns, self.wide,
                                    self.most_columns)
        if rows.is_const and columns.is_const:
            self.balance(rows.const, columns.const, units)
        self.depth = self.stretch(depth)
        self.small = all(n.is_const for n in (rows, columns, depth, volume(kernel.batch))) and \
            (rows * columns * depth * volume(kernel.batch)).const < CPU.small_product
        gap = CPU.block_gap // size
        self.deep_left = is_deep(kernel.left, kernel.rows, kernel.depth)
        self.left_row = (self.depth if self.deep_left else self.block_rows) + gap
        self.right_row = self.block_columns + gap

    def stretch(self, depth: Index) -> int:
        """Of the depth at once: whole lines of the innermost variable, if they are short."""
        n = depth.const if depth.is_const and depth.const else CPU.block_depth
        line = volume(self.k.depth[-1:])
        whole = line.const if line.is_const and 1 < line.const < CPU.block_depth else 1
        return min(n, CPU.block_depth // whole * whole)

    def balance(self, rows: int, columns: int, units: int) -> None:
        """Smaller blocks where there would be too few for all cores."""
        batch = volume(self.k.batch)
        known = batch.const if batch.is_const else 1
        while known * -(-rows // self.block_rows) * -(-columns // self.block_columns) < 4 * units:
            if self.block_columns >= max(self.block_rows, 8 * self.wide):
                self.block_columns = fitted(self.block_columns // 2, self.wide, self.most_columns)
            elif self.block_rows >= 8 * self.high:
                self.block_rows = fitted(self.block_rows // 2, self.high, self.block_rows)
            else:
                return

    # ---- the whole -------------------------------------------------------------------------------------

    def render(self) -> list[str]:
        with self.scope("{", how=None if self.small else TEAM):
            self.blocks()
        return self.scopes[0].lines

    def blocks(self) -> None:
        """Those of one thread."""
        k = self.k
        arrays = {"lefts": (self.block_rows if self.deep_left else self.depth) * self.left_row,
                  "rights": self.depth * self.right_row, "sums": self.block_rows * self.block_columns}
        for name, length in arrays.items():
            self.line(f"alignas(64) {self.kind} {name}[{length}];")
        rows, columns = self.length(k.rows), self.length(k.columns)
        high, wide = (f"(({n} + {b - 1}) / {b})" for n, b in ((rows, self.block_rows), (columns, self.block_columns)))
        self.line(f"const {self.d.long} all = {high} * {wide} * {self.length(k.batch)};")
        self.line(f"const {self.d.long} last = all * ({self.d.thread} + 1) / {self.d.threads};")
        first = f"all * {self.d.thread} / {self.d.threads}"
        with self.scope(f"for ({self.d.long} block = {first}; block < last; ++block) {{", k.batch):
            self.line(f"const {self.d.long} c0 = block % {wide} * {self.block_columns}, line = block / {wide};")
            self.line(f"const {self.d.long} r0 = line % {high} * {self.block_rows};")
            self.line(f"const {self.d.long} r1 = {self.fl}imin(r0 + {self.block_rows}, {rows});")
            self.line(f"const {self.d.long} c1 = {self.fl}imin(c0 + {self.block_columns}, {columns});")
            self.line(f"const {self.d.long} item = line / {high};")
            self.decompose("item", k.batch)
            self.multiply()
            with self.walk(self.rows, "r0", "r1") as r, self.walk(self.columns, "c0", "c1", LANES) as c:
                self.finish(f"sums[{r} * {self.block_columns} + {c}]")

    def multiply(self) -> None:
        """The sums of a block, stretch by stretch of the depth."""
        depth = self.length(self.k.depth)
        with self.scope(f"for ({self.d.long} k0 = 0; k0 < {self.fl}imax({depth}, 1); k0 += {self.depth}) {{"):
            self.line(f"const {self.d.long} k1 = {self.fl}imin(k0 + {self.depth}, {depth});")
            self.bring_left()
            self.bring_right()
            with self.scope(f"for ({self.d.long} c = 0; c < c1 - c0; c += {self.wide}) "
                            f"for ({self.d.long} r = 0; r < r1 - r0; r += {self.high}) {{"):
                left = f"r * {self.left_row}" if self.deep_left else "r"
                self.line(f"KERNEL_NAME_tile(sums + r * {self.block_columns} + c, lefts + {left}, rights + c, "
                          "k1 - k0, k0 == 0);")

    # ---- factors ---------------------------------------------------------------------------------------

    def bring_left(self) -> None:
        deep = self.deep_left
        place = f"lefts[{{r}} * {self.left_row} + {{k}}]" if deep else f"lefts[{{k}} * {self.left_row} + {{r}}]"
        self.bring(self.k.left, self.k.rows, "r", place, self.high, deep, not deep)

    def bring_right(self) -> None:
        place = f"rights[{{k}} * {self.right_row} + {{c}}]"
        deep = is_deep(self.k.right, self.k.columns, self.k.depth)
        self.bring(self.k.right, self.k.columns, "c", place, self.wide, deep, True)

    def bring(self, factor: Expr, own: Sequence[Sym], name: str, place: str, step: int, deep: bool, lined: bool
              ) -> None:
        """A factor of the block into its array; what fills the last tile up is zero.

        `deep`: in memory the depth is contiguous; `lined`: in the array the points are."""
        lo, hi = f"{name}0", f"{name}1"
        with self.scope(f"if (({hi} - {lo}) % {step} != 0) {{"):
            long = self.d.long
            self.line(f"for ({long} k = 0; k < k1 - k0; ++k) for ({long} x = {hi} - {lo}; x % {step} != 0; ++x) "
                      f"{place.format(**{name: 'x', 'k': 'k'})} = 0;")
        lanes = LANES if deep != lined else None
        own, (factor,) = joined(own, factor)
        depth, (factor,) = joined(self.k.depth, factor)
        outer, inner = ((own, lo, hi), (depth, "k0", "k1"))[::1 if deep else -1]
        v = inner[0][-1]
        with self.walk(*outer) as x, self.lines(*inner) as (first, end, off):
            y = f"({off} + {self.sym(v)})"
            at, k = (x, y) if deep else (y, x)
            for begin, until, value in self.parts(factor, v, first, end):
                with self.loop(v, begin, until, how=lanes):
                    self.line(f"{place.format(**{name: at, 'k': k})} = {'0' if value is None else self.value(value)};")

    def parts(self, factor: Expr, v: Sym, first: str, end: str) -> list[tuple[str, str, Expr | None]]:
        """A line from first to end, divided where a factor begins and ends to be zero (None), if it is at all."""
        guard = guard_of(factor, v) if is_long(v) else None
        if guard is None:
            return [(first, end, factor)]
        lo, hi = self.fresh("lo"), self.fresh("hi")
        holds = "" if guard.holds.op == "const" else f"!{self.value(guard.holds)} ? {end} : "
        low = high = ""
        for bound in guard.lows:
            low = f"{self.fl}imax({low or first}, {self.index(bound)})"
        for bound in guard.highs:
            high = f"{self.fl}imin({high or end}, {self.index(bound)})"
        self.line(f"const {self.d.long} {lo} = {holds}{self.fl}imin({low or first}, {end});")
        self.line(f"const {self.d.long} {hi} = {self.fl}imax({lo}, {high or end});")
        return [(first, lo, None), (lo, hi, guard.inside), (hi, end, None)]

    # ---- a tile ----------------------------------------------------------------------------------------

    def tile(self) -> list[str]:
        """A function: rows times vectors of sums in registers, while the depth goes past."""
        v, each = self.vector, [(r, c) for r in range(self.high) for c in range(CPU.tile_vectors)]
        left = "l[{} * " + str(self.left_row) + " + k]" if self.deep_left else "l[k * " + str(self.left_row) + " + {}]"
        place = f"*({v}*)(sums + {{}} * {self.block_columns} + {{}})"
        out = [f"{self.d.inlined} void KERNEL_NAME_tile({self.kind}* sums, const {self.kind}* l, const {self.kind}* r, "
               f"{self.d.long} n, bool first) {{", f"  {self.d.contracted}"]
        zeros = self.d.zeros.format(v)
        out += [f"  {v} s{r}_{c} = first ? {zeros} : {place.format(r, c * self.lanes)};" for r, c in each]
        out.append(f"  for ({self.d.long} k = 0; k < n; ++k) {{")
        out += [f"    const {v} v{c} = *(const {v}*)(r + k * {self.right_row} + {c * self.lanes});"
                for c in range(CPU.tile_vectors)]
        out += [f"    s{r}_{c} += {left.format(r)} * v{c};" for r, c in each]
        out.append("  }")
        out += [f"  {place.format(r, c * self.lanes)} = s{r}_{c};" for r, c in each]
        return [*out, "}"]


def is_long(v: Sym) -> bool:
    """Whether it pays to find out where a line begins and ends, rather than to ask for each element."""
    return not v.size.is_const or v.size.const >= CPU.vector_bytes // 2


def best_height(rows: int) -> int:
    """Of a tile: that which wastes the least of its last one."""
    return min(range(CPU.tile_high, 0, -1), key=lambda h: -(-rows // h) * (h + 1))


def fitted(size: int, step: int, most: int) -> int:
    """The side of blocks of about equal size, none above `most`, in whole steps."""
    size = max(size, 1)
    blocks = -(-size // most)
    each = -(-size // blocks)
    return -(-each // step) * step
