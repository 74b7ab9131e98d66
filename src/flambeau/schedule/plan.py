"""Graph in, Program out: inline, fuse, shape the loops, plan the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import CHECKED, Expr, loads, rewrite, walk, where
from flambeau.ir.index import ZERO, Dyn, Index, Sym, as_index
from flambeau.ir.nodes import (
    Buffer,
    Extern,
    Graph,
    Node,
    Pointwise,
    Scan,
    Scatter,
    Value,
    contiguous_strides,
    dim_vars,
)
from flambeau.ir.program import (
    AnyKernel,
    BufferPlan,
    Call,
    ContractKernel,
    Copy,
    Item,
    Kernel,
    Launch,
    LoopKernel,
    Program,
    ScanKernel,
    TableKernel,
)
from flambeau.ir.verify import verify

from .contract import prepare_contractions, shape_contract
from .fuse import Group, Single, fuse, reads_elsewhere
from .inline import inline, materialised
from .layout import settle_layouts
from .loops import is_empty, shape_group, shape_scan, shape_scatter
from .memory import buffers_read, lifetimes, plan_memory, values_in
from .numerics import apply_policy
from .ordered import order_scatters
from .split import split_reductions
from .tables import join_launches


def strided(v: Value, buffer: Buffer) -> tuple[tuple[Index, ...], Index] | None:
    """(strides, offset) of a value as a strided view of its buffer's memory, or None if it is not one."""
    assert buffer.strides is not None
    at = ZERO
    for i, s in zip(v.index, buffer.strides, strict=True):
        at = at + i * s
    strides = []
    rest = at
    for var in dim_vars(v.shape):
        c = at.coefficient(var)
        if c is None or is_flipped(v, var) or any(s.extent is not None for s in c.symbols()):
            return None
        strides.append(c)
        rest = rest - c * var
    return (tuple(strides), rest) if not any(s.extent is not None for s in rest.symbols()) else None


def is_flipped(v: Value, var: Sym) -> bool:
    """Whether it walks a dimension of its buffer backwards: torch has no negative strides."""
    steps = (i.coefficient(var) for i in v.index)
    return any(s is not None and (s.bounds()[1] or 0) < 0 for s in steps)


def may_alias(n: Extern) -> bool:
    """Whether a result can share memory with an argument; without a schema nobody knows."""
    schema = getattr(n.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def make_views_real(graph: Graph) -> None:
    """Externs and outputs take strided memory: anything else is copied first."""
    added: list[Pointwise] = []

    def real(x: Any) -> Any:
        if isinstance(x, Value):
            if strided(x, graph.buffers[x.buffer]) is not None:
                return x
            vars = dim_vars(x.shape)
            b = graph.add_buffer(x.shape, x.dtype, strides=contiguous_strides(x.shape))
            added.append(Pointwise((b.name,), vars, x.load([as_index(v) for v in vars]), origin="copy"))
            return graph.whole(b.name)
        if isinstance(x, (list, tuple)):
            return type(x)(real(y) for y in x)
        return x

    nodes: list[Node] = []
    for n in graph.nodes:
        if isinstance(n, Extern):
            added.clear()
            n = replace(n, args=real(n.args), kwargs=tuple((k, real(v)) for k, v in n.kwargs))
            nodes.extend(added)
        nodes.append(n)
    added.clear()
    graph.outputs = [real(o) for o in graph.outputs]
    graph.mutations = [(name, real(v)) for name, v in graph.mutations]
    graph.nodes = [*nodes, *added]


def schedule(graph: Graph, caps: Capabilities, check: bool = False) -> Program:
    notes: list[str] = []
    order_scatters(graph, caps)
    settle_layouts(graph)
    make_views_real(graph)
    if check:
        verify(graph, "after lowering")
    inline(graph, notes, caps)
    apply_policy(graph)
    prepare_contractions(graph, caps)
    split_reductions(graph, caps)
    if check:
        verify(graph, "after inlining")
    groups = fuse(graph)
    hard = set(materialised(graph))
    stored = set(reads_elsewhere(groups, hard))
    kernels: list[AnyKernel] = []
    steps: list[Launch | Call | Copy] = []
    seen: dict[Kernel, int] = {}
    for g in groups:
        kernel: Kernel
        if isinstance(g, Group) and g.is_contract:
            kernel = shape_contract(g, graph.buffers, stored)
        elif isinstance(g, Group):
            kernel, extra = shape_group(g, graph.buffers, stored, caps)
            stored |= extra
        else:
            n = g.node
            if isinstance(n, Extern):
                steps.append(Call(n.target, n.args, n.kwargs, n.names, n.outputs, n.kind, n.origin, n.out,
                                  may_alias(n)))
                continue
            if isinstance(n, Scan):
                kernel = shape_scan(n, graph.buffers, stored, caps)
            else:
                assert isinstance(n, Scatter)
                kernel = shape_scatter(n, graph.buffers)
        if all(is_empty(graph.buffers[p.name]) for p in kernel.params if p.written) and not checks(g):
            continue
        at = seen.setdefault(kernel, len(kernels))
        if at == len(kernels):
            kernels.append(kernel)
        steps.append(Launch(at, tuple(p.name for p in kernel.params), kernel.origins))
    p = Program(list(graph.inputs), list(graph.symbols), kernels, steps, {}, list(graph.outputs),
                list(graph.seeds), notes=notes)
    write_mutations(p, graph)
    if caps.tables:
        join_launches(p)
    forget_unused_kernels(p)
    place_buffers(p, graph)
    plan_memory(p, caps.arena_most)
    return p


def checks(g: Group | Single) -> bool:
    """Whether its kernel looks for what is wrong with its data."""
    return any(e.op in CHECKED for n in g.nodes for e in walk(*n.exprs()))


def forget_unused_kernels(p: Program) -> None:
    used = sorted({s.kernel for s in p.steps if isinstance(s, Launch)})
    place = {old: new for new, old in enumerate(used)}
    p.kernels = [p.kernels[k] for k in used]
    for s in p.steps:
        if isinstance(s, Launch):
            s.kernel = place[s.kernel]


def write_mutations(p: Program, graph: Graph) -> None:
    """New values of inputs: written there by the kernels that compute them, else copied at the end."""
    users: dict[str, list[int]] = {}  # the steps that read or write a buffer
    for k, step in enumerate(p.steps):
        for b in buffers_read(step):
            users.setdefault(b, []).append(k)
    returned = {x.buffer for x in values_in(p.outputs)}
    for name, v in graph.mutations:
        if is_empty(graph.buffers[name]):
            continue
        if v.buffer in returned or not write_in_place(p, graph, name, v, users):
            for b in (name, v.buffer):
                users.setdefault(b, []).append(len(p.steps))
            p.steps.append(Copy(name, v))


def write_in_place(p: Program, graph: Graph, name: str, v: Value, users: dict[str, list[int]]) -> bool:
    """Let the kernel that computes an input's new value write it straight into that input, where nobody needs the
    old value any more: the kernel itself may read it, at the very place it writes and not in a later stage."""
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
    assert not isinstance(made, TableKernel)
    kernel = in_place(made, name, v.buffer)
    if kernel is None:
        return False
    params = tuple(replace(x, aliased=True) if x.name in (name, v.buffer) else x for x in kernel.params)
    p.kernels.append(replace(kernel, params=params))
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
    """The kernel in a form in which `new` may be the memory of its input `name`, if there is one."""
    if isinstance(k, LoopKernel):
        return held(k, name, new) if reads_before_write(k, name, new) else None
    if isinstance(k, ContractKernel):
        writer = next(t for t, i in enumerate(k.items) if new in i.names)
        inside = loads(k.left, k.right, *(e for i in k.items[writer + 1:] for e in i.exprs))
        after = loads(*(e for i in k.items for e in i.exprs))
        at = dict(k.stores)[new]
        return None if any(e.attr[0] == name for e in inside) or any(
            e.attr[0] == name and e.attr[1][0] is not at for e in after) else k
    if isinstance(k, ScanKernel):
        at = dict(k.stores)[new]
        return k if all(e.attr[1][0] is at for e in loads(*k.exprs) if e.attr[0] == name) else None
    places = (a.expr for a in k.address.atoms() if isinstance(a, Dyn))
    own = k.address if k.unique else None  # a point that alone writes an element may read it before
    if any(e.attr[0] == name for e in loads(*places, *(() if k.mask is None else (k.mask,)))) \
            or any(e.attr[0] == name and e.attr[1][0] is not own for e in loads(k.value)):
        return None
    start = [] if k.init is None else [e for e in loads(k.init) if e.attr[0] == name]
    if not start:
        return k
    # What it starts from lies there already.
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
    """The same kernel; what it reads of `name` where it also writes `new`, it reads before it writes anything."""
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


def place_buffers(p: Program, graph: Graph) -> None:
    used = set(lifetimes(p)) | {v.buffer for v in values_in(p.outputs)} | set(p.inputs)
    returned = {v.buffer for v in values_in(p.outputs)}
    from_calls = {n for s in p.steps if isinstance(s, Call) and s.out is None for n in s.names}
    # Memory that a call's result may share must live as long as that result: it is not the arena's.
    shared = {v.buffer for s in p.steps if isinstance(s, Call) and s.aliases for v in values_in((s.args, s.kwargs))}
    for name, b in graph.buffers.items():
        if name not in used:
            continue
        place = ("input" if name in graph.inputs else "seed" if name in graph.seeds else "extern" if name in from_calls
                 else "output" if name in returned else "alloc" if name in shared else "arena")
        assert b.strides is not None
        p.buffers[name] = BufferPlan(name, b.dtype, b.shape, b.strides, place)
