"""Plans memory: lifetimes of buffers, and a place in one memory block for each intermediate of known size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flambeau.ir.index import Index, as_index
from flambeau.ir.nodes import Graph
from flambeau.ir.program import (
    AnyKernel,
    BufferPlan,
    Call,
    Program,
    Step,
    buffers_read,
    values_in,
)

ALIGN = 256  # bytes: libraries choose kernels by the alignment of pointers, up to this one


@dataclass
class ProgramDraft:
    """A program that passes are still changing."""

    kernels: list[AnyKernel]
    steps: list[Step]
    outputs: list[Any]
    buffers: dict[str, BufferPlan] = field(default_factory=dict)
    arena_bytes: int = 0
    frees: dict[int, tuple[str, ...]] = field(default_factory=dict)  # step -> buffers dead after it
    notes: list[str] = field(default_factory=list)

    def finished(self, graph: Graph | Program) -> Program:
        """The finished program, with the inputs of a graph or of another program."""
        steps = (replace(s, args=frozen(s.args), kwargs=frozen(s.kwargs)) if isinstance(s, Call) else s
                 for s in self.steps)
        return Program(tuple(graph.inputs), tuple(graph.arguments or graph.inputs), tuple(dict(graph.numbers).items()),
                       tuple(self.kernels), tuple(steps), tuple(self.buffers.values()), frozen(self.outputs),
                       tuple(graph.seeds), self.arena_bytes,
                       tuple(self.frees.get(k, ()) for k in range(len(self.steps))), tuple(self.notes),
                       tuple(graph.streams), tuple(graph.arriving), tuple(graph.leaving), graph.ticket)


def frozen(x: Any) -> Any:
    return tuple(map(frozen, x)) if isinstance(x, (list, tuple)) else x


def lifetimes(p: Program | ProgramDraft) -> dict[str, tuple[int, int]]:
    """The first and last step of each buffer; outputs live past the end."""
    out: dict[str, tuple[int, int]] = {}
    for k, step in enumerate(p.steps):
        names = buffers_read(step)
        if isinstance(step, Call):
            names |= set(step.names)
        for n in names:
            first, _ = out.get(n, (k, k))
            out[n] = (first, k)
    for v in values_in(p.outputs):
        if v.buffer in out:
            out[v.buffer] = (out[v.buffer][0], len(p.steps))
    return out


def nbytes(b: BufferPlan) -> int | None:
    """The bytes that a buffer spans; None if not known before the run."""
    top = span(b)
    return top.const * b.dtype.itemsize if top.is_const else None


def span(b: BufferPlan) -> Index:
    """The number of elements from a buffer's first to its last."""
    if any(n.is_const and n.const == 0 for n in b.shape):
        return as_index(0)
    return sum(((n - 1) * s for n, s in zip(b.shape, b.strides, strict=True)), as_index(1))


def plan_memory(p: ProgramDraft, most: int | None = None, apart: Callable[[str, str], bool] | None = None) -> None:
    """Assign offsets to arena buffers: largest first, at the lowest place free during their whole life. Buffers of more
    than `most` bytes are allocated separately. `apart`: whether the lifetimes of two buffers are disjoint; needed if
    steps of several streams overlap, because the order of the steps does not tell then."""
    lives = lifetimes(p)
    arena = [b for b in p.buffers.values() if b.place == "arena"]
    known = []
    for b in arena:
        size = nbytes(b)
        # Tensors over the arena are made once, so all their sizes must be known, and not just a zero product.
        fixed = all(x.is_const for x in (*b.shape, *b.strides))
        if size is None or not fixed or b.name not in lives or (most is not None and size > most):
            p.buffers[b.name] = replace(b, place="alloc")
        else:
            known.append((size, b))
    placed: list[tuple[int, int, int, int, str]] = []  # offset, end, first, last
    top = 0
    for size, b in sorted(known, key=lambda sb: (-sb[0], sb[1].name)):
        first, last = lives[b.name]
        size = -(-max(size, 1) // ALIGN) * ALIGN
        busy = sorted((o, e) for o, e, f, la, other in placed
                      if (f <= last and first <= la if apart is None else not apart(b.name, other)))
        at = 0
        for o, e in busy:
            if at + size <= o:
                break
            at = max(at, e)
        p.buffers[b.name] = replace(b, offset=at)
        placed.append((at, at + size, first, last, b.name))
        top = max(top, at + size)
    p.arena_bytes = top
    frees: dict[int, list[str]] = {}
    for n, (_, last) in lives.items():
        b = p.buffers[n]
        if b.place in ("extern", "alloc", "input", "over") and last < len(p.steps):
            frees.setdefault(last, []).append(n)
    p.frees = {k: tuple(sorted(v)) for k, v in frees.items()}
