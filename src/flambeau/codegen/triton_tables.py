"""Maps and reductions along a table in Triton: a program for each block, whichever row it is of."""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.program import CHUNK, Item, TableKernel, reductions_of

from .triton import BlockWriter, Draft
from .triton_loops import THREADS, per_thread
from .tuning import Tuning

WARPS = THREADS // 32
GRID = "count2 >> 1"


def write_table(k: TableKernel, tuning: Tuning) -> list[Draft]:
    return [TableBlocks(k, tuning).render()]


class TableBlocks(BlockWriter):
    """Addresses come out of memory, so nothing is known of them: blocks that are whole and of aligned tensors are told
    so, which is what accesses of 16 bytes take; the others go element by element."""

    def __init__(self, k: TableKernel, tuning: Tuning) -> None:
        super().__init__(k.params, wide=False)
        self.kernel, self.k = k, k.body
        self.tuning = tuning
        self.moves = k.moves()
        self.dtypes |= {p.name: p.dtype for p in self.k.params}
        self.columns = k.columns
        self.short |= {p.name: f"q{at}" for at, p in enumerate((*self.columns, *k.results))}

    def render(self) -> Draft:
        k = self.k
        self.line("rows = rows2 >> 1")
        self.line("block = tl.program_id(0)")
        self.line("row = tl.load(p1 + 2 * block)")
        self.line("first = tl.load(p1 + 2 * block + 1)")
        for at in range(len(self.kernel.results)):
            self.line(f"q{len(self.columns) + at} = p{2 + at} + block")
        for at, p in enumerate(self.columns):
            self.line(f"a{at} = tl.load(p0 + {at} * rows + row)")
            if p.name not in self.moves:
                self.line(f"q{at} = {self.typed(at)}")
        vars = (*k.outer, *k.inner)
        if not vars:
            self.items()
            return Draft(self, GRID, 1)
        self.line(f"length = tl.minimum(tl.load(p0 + {len(self.columns)} * rows + row) - first, {CHUNK}).to(tl.int32)")
        moving = [at for at, p in enumerate(self.columns) if p.name in self.moves]
        size = self.tuning.sized(THREADS * per_thread(k.everything()))
        self.blocks, self.axes = [size], {vars[0]: 0}
        aligned = " | ".join(f"a{at}" for at in moving)
        for header, whole in ((f"if (length == {CHUNK}) & ((({aligned}) & 15) == 0):", True), ("else:", False)):
            with self.scope(header, footer=""):
                for at in moving:
                    here = f"{self.typed(at)} + first"
                    self.line(f"q{at} = {f'tl.multiple_of({here}, 16)' if whole else here}")
                self.pieces(size, whole)
        return Draft(self, GRID, WARPS)

    def typed(self, at: int) -> str:
        return f"a{at}.to(tl.pointer_type({self.d.types[self.columns[at].dtype]}))"

    def pieces(self, size: int, whole: bool) -> None:
        v = next(iter(self.axes))
        reductions = reductions_of(self.k.items)
        taken = {i.names[0]: self.start(i.joins, self.full()) for i in reductions}
        with self.scope(f"for piece in range(0, {CHUNK if whole else 'length'}, {size}):", (v,), footer=""):
            self.line(f"{self.sym(v)} = piece + {self.arange(0)}")
            self.masks = {}
            if not whole:
                self.masks[0] = self.fresh("m")
                self.line(f"{self.masks[0]} = {self.sym(v)} < length")
            if reductions:
                self.join(reductions, taken)
            else:
                self.items()
        for i in reductions:
            for name, text in zip(i.names, self.reduced(i.joins, taken[i.names[0]], 0), strict=True):
                self.line(f"tl.store({self.short[name]}, {text})")

    def join(self, reductions: Sequence[Item], taken: dict[str, list[str]]) -> None:
        """What lies in this piece, lane by lane."""
        for i in reductions:
            slots = taken[i.names[0]]
            values = self.operands(i.joins, i.exprs, 0)
            self.assign(slots, self.combined(i.joins, slots, values))

    def items(self) -> None:
        places = dict(self.k.stores)
        for i in self.k.items:
            text = self.keep(i.names[0], i.exprs[0])
            if i.names[0] in places:
                self.store(i.names[0], places[i.names[0]], text, self.full())
