"""Maps and reductions along a table in Triton: a program for each block, whichever row it is of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flambeau.ir.nodes import Combine
from flambeau.ir.program import CHUNK, Item, TableKernel, reductions_of

from ..tuning import Tuning
from .blocks import BlockWriter, Draft
from .loops import THREADS, per_thread

WARPS = THREADS // 32


class TableBlocks(BlockWriter):
    """Addresses come out of memory, so nothing is known of them: blocks that are whole and of aligned tensors are told
    so, which is what accesses of 16 bytes take; the others go element by element."""

    def __init__(self, k: TableKernel, tuning: Tuning) -> None:
        super().__init__(k.params, k.sizes, wide=False)
        self.kernel, self.k = k, k.body
        self.tuning = tuning
        self.steps = k.steps()
        self.dtypes |= {p.name: p.dtype for p in self.k.params}
        self.columns = k.columns
        self.short |= {p.name: f"q{at}" for at, p in enumerate(self.columns)}

    def render(self) -> Draft:
        k = self.k
        self.line("rows = rows2 >> 1")
        self.line("block = tl.program_id(0)")
        self.line("row = tl.load(p1 + 2 * block)")
        self.line("first = tl.load(p1 + 2 * block + 1)")
        moving = [at for at, p in enumerate(self.columns) if self.steps.get(p.name) == 1]
        for at, p in enumerate(self.columns):
            self.line(f"a{at} = tl.load(p0 + {at} * rows + row)")
            if at not in moving:
                self.line(f"q{at} = {self.typed(at)}{f' + first // {CHUNK}' if p.name in self.steps else ''}")
        vars = (*k.outer, *k.inner)
        if not vars:
            self.maps(k.items)
            return Draft(self, self.grid(), 1)
        self.line(f"length = tl.minimum(tl.load(p0 + {len(self.columns)} * rows + row) - first, {CHUNK}).to(tl.int32)")
        size = self.tuning.sized(THREADS * per_thread(k.everything()))
        self.blocks, self.axes = [size], {vars[0]: 0}
        aligned = " | ".join(f"a{at}" for at in moving)
        for header, whole in ((f"if (length == {CHUNK}) & ((({aligned}) & 15) == 0):", True), ("else:", False)):
            with self.scope(header, footer=""):
                for at in moving:
                    here = f"{self.typed(at)} + first"
                    self.line(f"q{at} = {f'tl.multiple_of({here}, 16)' if whole else here}")
                for items in k.stages:
                    if k.inner and items[0].level == "outer":
                        self.maps(items)
                    else:
                        self.pieces(items, size, whole)
        return Draft(self, self.grid(), WARPS)

    def grid(self) -> str:
        """A program for each block: the size says 2n + 1 for n of them."""
        return f"{self.sizes[self.kernel.sizes[1]]} >> 1"

    def typed(self, at: int) -> str:
        return f"a{at}.to(tl.pointer_type({self.d.types[self.columns[at].dtype]}))"

    def pieces(self, items: Sequence[Item], size: int, whole: bool) -> None:
        v = next(iter(self.axes))
        reductions = reductions_of(items)
        taken = {i.names[0]: self.start(i.joins, self.full()) for i in reductions}
        with self.scope(f"for piece in range(0, {CHUNK if whole else 'length'}, {size}):", (v,), footer=""):
            self.line(f"{self.sym(v)} = piece + {self.arange(0)}")
            self.masks = {}
            if not whole:
                self.masks[0] = self.fresh("m")
                self.line(f"{self.masks[0]} = {self.sym(v)} < length")
            for i in items:
                self.maps((i,)) if i.combine is None else self.join(i, i.combine, taken[i.names[0]])
        self.masks = {}
        for i in reductions:
            for name, text in zip(i.names, self.reduced(i.joins, taken[i.names[0]], 0), strict=True):
                self.scopes[-1].locals[name], self.local_axes[name] = text, frozenset()
                self.stored(name, text)

    def join(self, i: Item, c: Combine, slots: Sequence[str]) -> None:
        """What lies in this piece, lane by lane."""
        self.assign(slots, self.combined(c, slots, self.operands(c, i.exprs, 0)))

    def maps(self, items: Iterable[Item]) -> None:
        for i in items:
            self.stored(i.names[0], self.keep(i.names[0], i.exprs[0]))

    def stored(self, name: str, text: str) -> None:
        at = dict(self.k.stores).get(name)
        if at is not None:
            self.store(name, at, text, self.full() if at.symbols() else frozenset())
