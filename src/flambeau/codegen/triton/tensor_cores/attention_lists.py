"""The launches of attention: buffers to clear first, lists of the blocks that a mask leaves, and the kernel itself.

Some masks are more than limits (a padding mask in memory, documents). Such a mask is computed once for each block, and
only for those points of the batch that it depends on: it holds nowhere, everywhere, or in a part of the block. Then
every block of one side lists the blocks of the other side that it has to visit. These two launches take little time
compared with the products that they save.
"""

from __future__ import annotations

from flambeau.ir.expr import const
from flambeau.ir.index import Index, Sym
from flambeau.ir.program import AttentionKernel, Form, Item, LoopKernel
from flambeau.ir.tuning import Scale

from ..blocks import PartDraft
from ..loops import LoopBlocks
from .attention import AttentionBlocks, OutBlocks, Walk
from .attention_gradient import KeysBlocks, QueriesBlocks

ROLES: dict[str, type[OutBlocks] | type[QueriesBlocks] | type[KeysBlocks]] = {
    "out": OutBlocks, "queries": QueriesBlocks, "keys": KeysBlocks}
ENTRIES = 256  # entries of a list that are found in one step


def write_attention(k: AttentionKernel, scale: Scale) -> list[PartDraft]:
    drafts = [LoopBlocks(cleared(k, *given)).render() for given in k.cleared]
    writer = ROLES[k.role](k, scale)
    if writer.has_lists:
        drafts += [StateBlocks(k, scale).render(), ListBlocks(k, scale).render()]
    made = writer.render()
    if writer.has_lists:
        _, other, lists = writer.list_sizes(writer.host)
        made.workspace = f"4 * {lists} * (2 * {other} + 2)"
    return [*drafts, made]


def cleared(k: AttentionKernel, name: str, vars: tuple[Sym, ...], at: Index) -> LoopKernel:
    """Returns a kernel that fills a buffer with zeros."""
    zero = const(0, next(p.dtype for p in k.params if p.name == name))
    return LoopKernel(vars, (), vars[-1] if vars else None, ((Item((name,), "full", (zero,)),),), ((name, at),),
                      frozenset(), k.params, k.sizes, form=Form("map"), typical=k.typical)


class StateBlocks(AttentionBlocks):
    """The kernel that classifies blocks by where the mask holds: 0 nowhere, 1 in parts, 2 everywhere."""

    def render(self) -> PartDraft:
        own, other, lists = self.list_sizes(self.index)
        self.line("pid = tl.program_id(0)" + self.widened())
        self.line(f"block, at = pid // {other} % {own}, pid % {other}")
        self.decompose(f"(pid // ({own} * {other}))", self.list_vars())
        self.line(f"first = block * {self.length}")
        self.side(self.own, "first", 0, self.length)
        self.side(self.other, f"at * {self.step}", 1, self.step)
        self.line(f"holds = {self.spread(self.conditions(Walk('', ends=True, asks=True)), self.full())}")
        inside, beyond = (f" & {self.masks[0]}", f" | ~{self.masks[0]}") if 0 in self.masks else ("", "")
        self.line(f"some = tl.max(tl.cast(holds{inside}, tl.int32))")
        self.line(f"every = tl.min(tl.cast(holds{beyond}, tl.int32))")
        base = f"work.to(tl.pointer_type(tl.int32)) + {lists} * ({other} + 2)"
        self.line(f"tl.store({base} + pid, some + some * every)")
        _, other, lists = self.list_sizes(self.host)
        return PartDraft(self, f"{lists} * {other}", 4)


class ListBlocks(AttentionBlocks):
    """The kernel that writes, for each block of one side, the list of blocks of the other side: whole blocks at the end
    of the list, the others at its beginning."""

    def render(self) -> PartDraft:
        _, other, lists = self.list_sizes(self.index)
        self.line("pid = tl.program_id(0)" + self.widened())
        self.line("memory = work.to(tl.pointer_type(tl.int32))")
        self.line(f"here, states = memory + pid * ({other} + 2), memory + {lists} * ({other} + 2) + pid * {other}")
        self.line("parts, wholes = 0, 0")
        with self.scope(f"for base in range(0, {other}, {ENTRIES}):", footer=""):
            self.line(f"at = base + tl.arange(0, {ENTRIES})")
            self.line(f"state = tl.load(states + at, at < {other}, 0)")
            self.line("part, whole = tl.cast(state == 1, tl.int32), tl.cast(state == 2, tl.int32)")
            self.line("tl.store(here + 1 + parts + tl.cumsum(part, 0), at, state == 1)")
            self.line(f"tl.store(here + {other} + 2 - wholes - tl.cumsum(whole, 0), at, state == 2)")
            self.line("parts += tl.sum(part)")
            self.line("wholes += tl.sum(whole)")
        self.line("tl.store(here, parts)")
        self.line("tl.store(here + 1, wholes)")
        _, _, lists = self.list_sizes(self.host)
        return PartDraft(self, lists, 1)
