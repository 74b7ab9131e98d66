"""Reuses memory for results: a new value of an input overwrites the old one, and a large result overwrites a buffer
that is no longer read.

A kernel can do so if it reads the old value at the very place that it writes, and before it writes. Memory that a
caller donates (tensors saved for this backward) can be reused like our own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from flambeau.ir.expr import Expr, loads, rewrite, where
from flambeau.ir.index import Dyn
from flambeau.ir.nodes import Graph, Value
from flambeau.ir.program import (
    AttentionKernel,
    BufferPlan,
    Call,
    ContractKernel,
    Copy,
    Item,
    Kernel,
    Launch,
    LoopKernel,
    ScanKernel,
    TableKernel,
    buffers_read,
    values_in,
)

from .loop_nests import is_empty
from .memory import ProgramDraft, lifetimes, nbytes

HEAVY = 1 << 20  # bytes: smaller results are not worth it

# ---- an input's new value --------------------------------------------------------------------------------


def write_mutations(p: ProgramDraft, graph: Graph) -> None:
    """Update inputs: the kernels that compute new values write them in place, or they are copied at the end."""
    users: dict[str, list[int]] = {}  # the steps that read or write a buffer or a call's view of it
    lies_in: dict[str, set[str]] = {}
    for k, step in enumerate(p.steps):
        read = buffers_read(step)
        if isinstance(step, Call) and step.aliases:
            lies_in |= {name: set(read).union(*(lies_in.get(b, ()) for b in read)) - {name} for name in step.names}
        for b in {x for name in read for x in (name, *lies_in.get(name, ()))}:
            users.setdefault(b, []).append(k)
    returned = {x.buffer for x in values_in(p.outputs)}
    for name, v in graph.mutations:
        if is_empty(graph.buffers[name]):
            continue
        if v.buffer in returned or not write_in_place(p, graph, name, v, users):
            for b in (name, v.buffer):
                users.setdefault(b, []).append(len(p.steps))
            p.steps.append(Copy(name, v))


def write_in_place(p: ProgramDraft, graph: Graph, name: str, v: Value, users: dict[str, list[int]]) -> bool:
    """Let the kernel that computes an input's new value write it straight into that input, if no later step needs the
    old value. The kernel itself may read it, at the very place that it writes and not in a later stage."""
    b, target = graph.buffers[v.buffer], graph.buffers[name]
    if not v.is_whole(b) or b.strides != target.strides:
        return False
    mine = [(k, s) for k in users.get(v.buffer, ()) if isinstance(s := p.steps[k], Launch)]
    makers = [(k, s) for k, s in mine
              if any(x.name == v.buffer and x.written for x in p.kernels[s.kernel].params)]
    if len(makers) != 1 or any(k > makers[0][0] for k in users.get(name, ())):
        return False
    at, launch = makers[0]
    made = p.kernels[launch.kernel]
    if isinstance(made, (AttentionKernel, TableKernel)):  # their programs read memory that other programs write
        return False
    kernel = in_place(made, name, v.buffer)
    if kernel is None:
        return False
    p.kernels.append(sharing(kernel, name, v.buffer))
    p.steps[at] = replace(launch, kernel=len(p.kernels) - 1)
    moved = users.pop(v.buffer)
    for k in moved:
        s = p.steps[k]
        if isinstance(s, Launch):
            p.steps[k] = replace(s, args=tuple(name if a == v.buffer else a for a in s.args))
        elif isinstance(s, Call):
            p.steps[k] = replace(s, args=renamed(s.args, v.buffer, name), kwargs=renamed(s.kwargs, v.buffer, name))
    users.setdefault(name, []).extend(moved)
    return True


def in_place(k: Kernel, name: str, new: str) -> Kernel | None:
    """A form of the kernel in which `new` may share the memory of its input `name`; None if there is none."""
    if isinstance(k, LoopKernel):
        return held(k, name, new) if reads_before_write(k, name, new) else None
    if isinstance(k, ContractKernel):
        writer = next(t for t, i in enumerate(k.items) if new in i.names)
        inside = loads(*k.factors(), *(e for i in k.items[writer + 1:] for e in i.exprs),
                       *(e for r in k.reductions for e in r.item.exprs))
        after = loads(*(e for i in k.items for e in i.exprs))
        at = dict(k.stores)[new]
        return None if any(e.attr[0] == name for e in inside) or any(
            e.attr[0] == name and e.attr[1][0] is not at for e in after) else k
    if isinstance(k, ScanKernel):
        at = dict(k.stores)[new]
        return k if all(e.attr[1][0] is at for e in loads(*k.exprs) if e.attr[0] == name) else None
    places = (a.expr for a in k.address.atoms() if isinstance(a, Dyn))
    own = k.address if k.unique else None  # if only one point writes an element, it may read it first
    if any(e.attr[0] == name for e in loads(*places, *(() if k.mask is None else (k.mask,)))) \
            or any(e.attr[0] == name and e.attr[1][0] is not own for e in loads(k.value)):
        return None
    start = [] if k.init is None else [e for e in loads(k.init) if e.attr[0] == name]
    if not start:
        return k
    # The initial values are in that memory already.
    return replace(k, init=None) if start == [k.init] and start[0].attr[1][0] is k.init_address else None


def reads_before_write(k: LoopKernel, name: str, new: str) -> bool:
    at = dict(k.stores)[new]
    stage = next(t for t, items in enumerate(k.stages) if any(new in i.names for i in items))
    for t, items in enumerate(k.stages):
        for e in loads(*(e for i in items for e in i.exprs)):
            if e.attr[0] == name and (e.attr[1][0] is not at or t > stage):
                return False
    return k.bounds is None or all(e.attr[0] != name for e in loads(*k.bounds))


def held(k: LoopKernel, name: str, new: str) -> LoopKernel:
    """The kernel with its reads of `name`, in the stage that writes `new`, moved before all writes."""
    t, writer = next((t, i) for t, items in enumerate(k.stages) for i in items if new in i.names)
    reads = [e for i in k.stages[t] for e in loads(*i.exprs) if e.attr[0] == name]
    if not reads or writer is k.stages[t][-1]:
        return k
    old = f"old {name}"
    memo: dict[Expr, Expr] = {}

    def stay(e: Expr) -> Expr:
        if e.op != "load" or e.attr[0] != name:
            return e
        value = Expr("local", e.dtype, (), old)
        return where(e.args[0], value, 0) if e.args else value

    items = [Item((old,), writer.level, (Expr("load", reads[0].dtype, (), reads[0].attr),))]
    items += [replace(i, exprs=tuple(rewrite(e, stay, None, memo) for e in i.exprs)) for i in k.stages[t]]
    return replace(k, stages=(*k.stages[:t], tuple(items), *k.stages[t + 1:]))


def renamed(x: Any, old: str, new: str) -> Any:
    if isinstance(x, Value):
        return replace(x, buffer=new) if x.buffer == old else x
    return type(x)(renamed(y, old, new) for y in x) if isinstance(x, (list, tuple)) else x


# ---- results over buffers that are no longer read --------------------------------------------------------


def write_over(p: ProgramDraft, donated: Collection[str], most: int | None) -> None:
    """Give large results the memory of buffers that their kernel is the last to read. Buffers in the arena (of at most
    `most` bytes) are left out, because their places are reused anyway."""
    lives = lifetimes(p)
    calls = [s for s in p.steps if isinstance(s, Call) and s.aliases]
    shared = {n for s in calls for n in s.names} | {v.buffer for s in calls for v in values_in((s.args, s.kwargs))}
    taken: set[str] = set()

    def is_free(name: str, after: int) -> bool:
        b = p.buffers[name]
        alone = b.place == "arena" and most is not None and (nbytes(b) or 0) > most
        own = alone or name in donated or b.place in ("extern", "alloc", "over")
        return own and name not in shared | taken and lives[name][1] == after

    for k, step in enumerate(p.steps):
        if not isinstance(step, Launch) or isinstance(
                made := p.kernels[step.kernel], (AttentionKernel, TableKernel)):
            continue
        kernel: Kernel = made
        names = dict(zip(step.args, (x.name for x in made.params), strict=True))
        new = [a for a, x in zip(step.args, made.params, strict=True) if x.written and lives[a][0] == k
               and p.buffers[a].place in ("arena", "alloc", "output") and (nbytes(p.buffers[a]) or 0) >= HEAVY]
        # Excludes buffers that the kernel writes and reads again (a row that is too long to be kept in registers).
        read = [a for a, x in zip(step.args, made.params, strict=True) if not x.written]
        for a in new:
            for old in read:
                if is_free(old, k) and fills(p.buffers[a], p.buffers[old]) and (
                        found := in_place(kernel, names[old], names[a])) is not None:
                    kernel = sharing(found, names[old], names[a])
                    p.buffers[a] = replace(p.buffers[a], place="over", over=old)
                    taken.add(old)
                    break
        if kernel is not made:
            p.kernels.append(kernel)
            p.steps[k] = replace(step, kernel=len(p.kernels) - 1)


def fills(new: BufferPlan, old: BufferPlan) -> bool:
    """Whether the buffers have the same elements, one for one. A returned result must be the old buffer itself, because
    a view of it would be a view to autograd too."""
    if new.place == "output" and (old.place == "input" or (new.shape, new.strides) != (old.shape, old.strides)):
        return False
    count = nbytes(new)
    return new.dtype is old.dtype and count is not None and count == nbytes(old) and all(
        elements(b) * b.dtype.itemsize == count for b in (new, old))


def elements(b: BufferPlan) -> int:
    return math.prod(n.const for n in b.shape)


def sharing(k: Kernel, *names: str) -> Kernel:
    return replace(k, params=tuple(replace(x, aliased=True) if x.name in names else x for x in k.params))
