"""Maps and reductions over a table of tensors in Triton: one program for each block of any tensor."""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.ir.program import CHUNK, Item, TableKernel
from flambeau.ir.tuning import BLOCKS, Scale

from ..stages import StageWriter
from .blocks import NARROWED, BlockWriter, PartDraft
from .loops import Carries, per_thread

WARPS = BLOCKS.threads // BLOCKS.warp


class TableBlocks(StageWriter[Carries], BlockWriter):
    """Kernels over a table of tensors. Addresses are loaded from memory, so the compiler knows nothing of their
    alignment: a branch for whole blocks of aligned tensors states it, which accesses of 16 bytes need. Other blocks are
    accessed element by element."""

    def __init__(self, k: TableKernel, scale: Scale) -> None:
        super().__init__(k.params, k.sizes, NARROWED)
        self.kernel, self.k = k, k.body
        self.scale = scale
        self.steps = k.steps()
        self.dtypes |= {p.name: p.dtype for p in self.k.params}
        self.columns = k.columns
        self.address = dict(self.k.stores)
        self.is_whole = False  # whether all elements of the block exist
        self.short |= {p.name: f"q{at}" for at, p in enumerate(self.columns)}

    def render(self) -> PartDraft:
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
            self.once(k.items)
            return PartDraft(self, self.grid(), 1)
        self.line(f"length = tl.minimum(tl.load(p0 + {len(self.columns)} * rows + row) - first, {CHUNK}).to(tl.int32)")
        size = self.scale.sized(BLOCKS.threads * per_thread(k.everything()))
        self.blocks, self.axes = [size], {vars[0]: 0}
        aligned = " | ".join(f"a{at}" for at in moving)
        for header, whole in ((f"if (length == {CHUNK}) & ((({aligned}) & 15) == 0):", True), ("else:", False)):
            with self.scope(header, footer=""):
                for at in moving:
                    here = f"{self.typed(at)} + first"
                    self.line(f"q{at} = {f'tl.multiple_of({here}, 16)' if whole else here}")
                self.is_whole = whole
                for items in k.stages:
                    if k.inner:
                        self.stage(items)
                    else:
                        self.walk(items, (), {})
        return PartDraft(self, self.grid(), WARPS)

    def grid(self) -> str:
        """The grid: a program for each block. The size argument is 2n + 1 for n blocks."""
        return f"{self.sizes[self.kernel.sizes[1]]} >> 1"

    def typed(self, at: int) -> str:
        return f"a{at}.to(tl.pointer_type({self.d.types[self.columns[at].dtype]}))"

    def declare(self, items: Sequence[Item], reductions: Sequence[Item]) -> Carries:
        return {i.names[0]: self.start(i.joins, self.full()) for i in reductions}

    def walk(self, items: Sequence[Item], reductions: Sequence[Item], states: Carries) -> None:
        v, size = next(iter(self.axes)), self.blocks[0]
        with self.scope(f"for piece in range(0, {CHUNK if self.is_whole else 'length'}, {size}):", (v,), footer=""):
            self.line(f"{self.sym(v)} = piece + {self.arange(0)}")
            self.masks = {}
            if not self.is_whole:
                self.masks[0] = self.fresh("m")
                self.line(f"{self.masks[0]} = {self.sym(v)} < length")
            self.body(items, states)
        self.masks = {}

    def take(self, i: Item, states: Carries) -> None:
        """Accumulates the elements of this piece, lane by lane."""
        slots = states[i.names[0]]
        self.assign(slots, self.combined(i.joins, slots, self.operands(i.joins, i.exprs, (0,))))

    def together(self, i: Item, states: Carries) -> list[str]:
        return self.reduced(i.joins, states[i.names[0]], 0)

    def become(self, name: str, text: str) -> None:
        self.local_axes[name] = frozenset()
        super().become(name, text)

    def map_item(self, item: Item) -> None:
        text = self.keep_value(item.names[0], item.exprs[0])
        if item.names[0] in self.address:
            self.keep(item.names[0], item.level, text)

    def keep(self, name: str, level: str, text: str) -> None:
        at = self.address[name]
        self.store(name, at, text, self.full() if at.symbols() else frozenset())
