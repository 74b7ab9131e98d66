"""Maps and reductions over a table of tensors in C++: threads share the blocks of all tensors."""

from __future__ import annotations

from flambeau.ir.program import CHUNK, TableKernel
from flambeau.ir.tuning import CPU

from ..dialect import Dialect, Shares
from .dialect import CPP
from .rows import RowWriter


class TableWriter(RowWriter):
    """Writes the body for one block; its buffers are the pointers in a row of the table."""

    def __init__(self, dialect: Dialect, kernel: TableKernel) -> None:
        super().__init__(dialect, kernel.body)
        self.kernel = kernel
        self.short = {p.name: f"q{at}" for at, p in enumerate(kernel.columns)}

    def render(self) -> list[str]:
        k = self.k
        items = k.items
        if k.inner:
            self.rows()
        elif k.outer:
            self.vector_loop(k.outer[0], "0", "length", items)
        else:
            for i in items:
                self.map_item(i)
        body = self.scopes[0].lines
        columns = self.kernel.columns
        row = ["const int64_t row = p1[2*block], first = p1[2*block + 1];",
               f"const int64_t length = {self.fl}imin(p0[{len(columns)}*rows + row] - first, {CHUNK});"]
        steps = self.kernel.steps()
        for at, p in enumerate(columns):
            kind = f"{'' if p.written else 'const '}{CPP.stored[p.dtype]}*"
            apart = "" if p.aliased else " __restrict__"
            column = f"p0[{at}*rows + row]" if at else "p0[row]"
            step = {None: "", 1: " + first"}.get(steps.get(p.name), f" + first / {CHUNK}")
            row.append(f"{kind}{apart} q{at} = ({kind}){column}{step};")
        return ["const int64_t rows = rows2 >> 1, count = count2 >> 1;",
                self.d.pragma(Shares(1, f"count > {CPU.table_blocks}"), False, False),
                "for (int64_t block = 0; block < count; ++block) {", *("  " + x for x in (*row, *body)), "}"]
