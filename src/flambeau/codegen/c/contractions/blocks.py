"""Contractions on CPUs: each thread computes blocks of the result, in tiles that fit into registers.

For each block and each stretch of the depth, both factors are copied into small arrays, whatever expressions they are,
in the order in which tiles read them. A tile is some rows times some vectors: each step of the depth reads the vectors
of the right factor, and one number of the left factor for each row. `tiles.py` chooses the sizes of tiles and blocks
for each kind of registers; the C++ compiler knows which kind it compiles for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from flambeau.ir.expr import Expr
from flambeau.ir.index import Index, Sym, volume
from flambeau.ir.lines import is_deep, joined
from flambeau.ir.program import ContractKernel
from flambeau.ir.tuning import CPU

from ...dialect import LANES, TEAM, Dialect
from .range_guards import MASK, Masks, guard_of, masks_of
from .tiles import USUAL, WIDE, Cut, cut
from .writer import ContractWriter

HIGH, ACROSS, ROWS, COLUMNS = (f"KERNEL_NAME_{x}" for x in ("high", "wide", "rows", "columns"))


class Blocks(ContractWriter):
    def __init__(self, dialect: Dialect, kernel: ContractKernel, units: int = CPU.block_units) -> None:
        super().__init__(dialect, kernel)
        rows, columns, depth = (volume(vars) for vars in (kernel.rows, kernel.columns, kernel.depth))
        batch = volume(kernel.batch)
        self.depth = self.stretch(depth)
        # The right factor stays in its array for all blocks of rows, if its whole depth fits.
        self.stays = depth.is_const and depth.const <= CPU.panel_depth
        self.panel = depth.const if self.stays else self.depth
        self.small = all(n.is_const for n in (rows, columns, depth, batch)) and \
            (rows * columns * depth * batch).const < CPU.small_product
        items = batch.const if batch.is_const else 1
        self.cuts = [cut(registers, self.dtype.itemsize, rows, columns, self.panel, items, units)
                     for registers in ((WIDE, USUAL) if dialect.preprocessed else (USUAL,))]
        self.gap = CPU.block_gap // self.dtype.itemsize
        self.deep_left = is_deep(kernel.left, kernel.rows, kernel.depth)
        self.left_row = f"{self.depth + self.gap}" if self.deep_left else f"({ROWS} + {self.gap})"
        self.right_row = f"({COLUMNS} + {self.gap})"
        deep = is_deep(kernel.right, kernel.columns, kernel.depth)
        self.masks = None if deep else masks_of(kernel.right, kernel.columns, kernel.depth)

    def stretch(self, depth: Index) -> int:
        """The length of a stretch of the depth. Stretches are about equal, and whole lines of the innermost variable if
        these are short."""
        n = depth.const if depth.is_const and depth.const else CPU.block_depth
        line = volume(self.k.depth[-1:])
        whole = line.const if line.is_const and 1 < line.const < CPU.block_depth else 1
        parts = max(1, round(n / CPU.block_depth))
        return min(n, -(-n // (parts * whole)) * whole)

    # ---- the whole -------------------------------------------------------------------------------------

    def render(self) -> list[str]:
        with self.scope("{", how=None if self.small else TEAM):
            self.blocks()
        return self.scopes[0].lines

    def blocks(self) -> None:
        """Computes the blocks of one thread, those of different rows first, for which the right factor stays."""
        k = self.k
        for name, length in self.arrays().items():
            self.line(f"alignas(64) {self.kind} {name}[{length}];")
        if self.masks is not None:
            kind = self.d.types[torch.int32 if self.dtype.itemsize <= 4 else torch.int64]
            self.line(f"alignas(64) {kind} masks[{self.masks.count} * {COLUMNS}];")
        rows, columns = self.length(k.rows), self.length(k.columns)
        high, wide = (f"(({n} + {b} - 1) / {b})" for n, b in ((rows, ROWS), (columns, COLUMNS)))
        self.line(f"const {self.d.long} all = {high} * {wide} * {self.length(k.batch)};")
        self.line(f"const {self.d.long} last = all * ({self.d.thread} + 1) / {self.d.threads};")
        first = f"all * {self.d.thread} / {self.d.threads}"
        if self.stays:
            self.line(f"{self.d.long} there = -1;")
        with self.scope(f"for ({self.d.long} block = {first}; block < last; ++block) {{", k.batch):
            self.line(f"const {self.d.long} r0 = block % {high} * {ROWS}, line = block / {high};")
            self.line(f"const {self.d.long} c0 = line % {wide} * {COLUMNS};")
            self.line(f"const {self.d.long} r1 = {self.fl}imin(r0 + {ROWS}, {rows});")
            self.line(f"const {self.d.long} c1 = {self.fl}imin(c0 + {COLUMNS}, {columns});")
            self.line(f"const {self.d.long} item = line / {wide};")
            self.decompose("item", k.batch)
            self.multiply()
            with self.walk(self.rows, "r0", "r1") as r, self.walk(self.columns, "c0", "c1", LANES) as c:
                self.finish(f"sums[{r} * {COLUMNS} + {c}]")

    def arrays(self) -> dict[str, str]:
        """The arrays of a thread, with their lengths."""
        return {"lefts": f"{ROWS} * {self.left_row}" if self.deep_left else f"{self.depth} * {self.left_row}",
                "rights": f"{self.panel} * {self.right_row}", "sums": f"{ROWS} * {COLUMNS}"}

    def multiply(self) -> None:
        """Computes the sums of a block, one stretch of the depth after the other."""
        depth = self.length(self.k.depth)
        if self.stays:
            with self.scope("if (there != line) {"):
                self.line(f"const {self.d.long} k0 = 0, k1 = {depth};")
                self.line("there = line;")
                if self.masks is not None:
                    self.find_masks(self.masks)
                self.bring_right()
        elif self.masks is not None:
            self.find_masks(self.masks)
        with self.scope(f"for ({self.d.long} k0 = 0; k0 < {self.fl}imax({depth}, 1); k0 += {self.depth}) {{"):
            self.line(f"const {self.d.long} k1 = {self.fl}imin(k0 + {self.depth}, {depth});")
            self.bring_left()
            if not self.stays:
                self.bring_right()
            begin = f" + k0 * {self.right_row}" if self.stays and self.depth < self.panel else ""
            with self.scope(f"for ({self.d.long} c = 0; c < c1 - c0; c += {ACROSS}) "
                            f"for ({self.d.long} r = 0; r < r1 - r0; r += {HIGH}) {{"):
                left = f"r * {self.left_row}" if self.deep_left else "r"
                self.line(f"KERNEL_NAME_tile(sums + r * {COLUMNS} + c, lefts + {left}, rights{begin} + c, "
                          "k1 - k0, k0 == 0);")

    # ---- factors ---------------------------------------------------------------------------------------

    def bring_left(self) -> None:
        deep = self.deep_left
        place = f"lefts[{{r}} * {self.left_row} + {{k}}]" if deep else f"lefts[{{k}} * {self.left_row} + {{r}}]"
        self.bring(self.k.left, self.k.rows, "r", place, HIGH, deep, not deep)

    def bring_right(self) -> None:
        place = f"rights[{{k}} * {self.right_row} + {{c}}]"
        deep = is_deep(self.k.right, self.k.columns, self.k.depth)
        self.bring(self.k.right, self.k.columns, "c", place, ACROSS, deep, True)

    def bring(self, factor: Expr, own: Sequence[Sym], name: str, place: str, step: str, deep: bool, lined: bool
              ) -> None:
        """Copies a factor of the block into its array; zeros fill up the last tile.

        `deep`: the depth is contiguous in memory; `lined`: the points are contiguous in the array."""
        lo, hi = f"{name}0", f"{name}1"
        with self.scope(f"if (({hi} - {lo}) % {step} != 0) {{"):
            long = self.d.long
            self.line(f"for ({long} k = 0; k < k1 - k0; ++k) for ({long} x = {hi} - {lo}; x % {step} != 0; ++x) "
                      f"{place.format(**{name: 'x', 'k': 'k'})} = 0;")
        lanes = LANES if deep != lined else None
        if own is self.k.columns and self.masks is not None:
            self.bring_masked(place, self.masks)
            return
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

    def bring_masked(self, place: str, m: Masks) -> None:
        """Copies the right factor, in lines that do not end where its mask changes."""
        with self.walk(m.depth, "k0", "k1") as k, self.walk(m.own, "c0", "c1", LANES) as c:
            self.scopes[-1].locals[MASK] = f"(masks[{self.index(m.which)} * {COLUMNS} + {c}] != 0)"
            self.line(f"{place.format(c=c, k=k)} = {self.value(m.factor)};")

    def find_masks(self, m: Masks) -> None:
        """Computes the mask of the right factor's points, for each value of the other variables that it depends on."""
        with ExitStack() as loops:
            for u in m.vars:
                loops.enter_context(self.loop(u, "0", self.extent(u)))
            c = loops.enter_context(self.walk(self.k.columns, "c0", "c1", LANES))
            self.line(f"masks[{self.index(m.which)} * {COLUMNS} + {c}] = {self.value(m.mask)};")

    def parts(self, factor: Expr, v: Sym, first: str, end: str) -> list[tuple[str, str, Expr | None]]:
        """The parts of a line from first to end, with the expression of each; None if a mask makes the factor zero."""
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
        """The function of a tile: it keeps rows times vectors of sums in registers while it walks the depth. One for
        each kind of registers."""
        out: list[str] = []
        for k, one in enumerate(self.cuts):
            if len(self.cuts) > 1:
                out.append(f"#{'elif' if k else 'if'} defined({one.registers.condition})" if one.registers.condition
                           else "#else")
            out += self.tile_of(one)
        return [*out, "#endif"] if len(self.cuts) > 1 else out

    def tile_of(self, one: Cut) -> list[str]:
        t = one.tile
        v, each = self.d.vector(self.kind, t.lanes), [(r, c) for r in range(t.high) for c in range(t.vectors)]
        row, right = (self.depth if self.deep_left else one.rows) + self.gap, one.columns + self.gap
        left = f"l[{{}} * {row} + k]" if self.deep_left else f"l[k * {row} + {{}}]"
        place = f"*({v}*)(sums + {{}} * {one.columns} + {{}})"
        out = [f"enum {{ {HIGH} = {t.high}, {ACROSS} = {t.wide}, {ROWS} = {one.rows}, {COLUMNS} = {one.columns} }};",
               f"{self.d.inlined} void KERNEL_NAME_tile({self.kind}* sums, const {self.kind}* l, const {self.kind}* r, "
               f"{self.d.long} n, bool first) {{", f"  {self.d.contracted}"]
        zeros = self.d.zeros.format(v)
        out += [f"  {v} s{r}_{c} = first ? {zeros} : {place.format(r, c * t.lanes)};" for r, c in each]
        out.append(f"  for ({self.d.long} k = 0; k < n; ++k) {{")
        out += [f"    const {v} v{c} = *(const {v}*)(r + k * {right} + {c * t.lanes});" for c in range(t.vectors)]
        out += [f"    s{r}_{c} += {left.format(r)} * v{c};" for r, c in each]
        out.append("  }")
        out += [f"  {place.format(r, c * t.lanes)} = s{r}_{c};" for r, c in each]
        return [*out, "}"]


def is_long(v: Sym) -> bool:
    """Whether finding the bounds of a line once pays, compared with testing each element."""
    return not v.size.is_const or v.size.const >= CPU.vector_bytes // 2
