"""All passes of the scheduler, in order: inline, fuse, shape the loops, plan the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.errors import UnsupportedError
from flambeau.ir.attention import Attention
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import CHECKED, walk
from flambeau.ir.index import Index, Sym, as_index, offset_of
from flambeau.ir.nodes import (
    Buffer,
    Extern,
    Fetch,
    Graph,
    Node,
    Pointwise,
    Scan,
    Scatter,
    Send,
    Value,
    contiguous_strides,
    dim_vars,
)
from flambeau.ir.program import (
    AnyKernel,
    AttentionKernel,
    BufferPlan,
    Call,
    Kernel,
    Launch,
    LoopKernel,
    Program,
    Step,
    values_in,
)
from flambeau.ir.tuning import CpuTuning
from flambeau.ir.verify import verify

from .attention import shape_attention
from .buffer_reuse import write_mutations, write_over
from .contractions import prepare_contractions, shape_contract
from .forms import formed
from .fusion.fuse import Group, Single, fuse, reads_elsewhere
from .fusion.inline import COMPARED, inline, materialised
from .layout import settle_layouts
from .loop_nests import is_empty, shape_group, shape_scan, shape_scatter
from .memory import ProgramDraft, lifetimes, plan_memory
from .numerics_policy import apply_policy
from .rewrites.ordered_scatters import order_scatters
from .rewrites.wide_columns import widen_columns
from .rewrites.wide_windows import share_windows
from .split_reductions import split_reductions
from .streams.order import check_order
from .streams.waits import plan_streams, sections
from .tensor_tables import join_launches


def strided(v: Value, buffer: Buffer) -> tuple[tuple[Index, ...], Index] | None:
    """(strides, offset) of a value as a strided view of its buffer's memory, or None if it is not one."""
    assert buffer.strides is not None
    at = offset_of(v.index, buffer.strides)
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
    """Whether a value walks a dimension of its buffer backwards: torch has no negative strides."""
    steps = (i.coefficient(var) for i in v.index)
    return any(s is not None and (s.bounds()[1] or 0) < 0 for s in steps)


def may_alias(n: Extern) -> bool:
    """Whether a result can share memory with an argument; assumed so if the operator has no schema."""
    schema = getattr(n.target, "_schema", None)
    if isinstance(n, (Send, Fetch)):
        return False
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def make_views_real(graph: Graph, results: bool = True, arguments: bool = True) -> None:
    """Copy the arguments of externs and the outputs that are not strided views of memory."""
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
        if isinstance(n, Extern) and arguments:
            added.clear()
            n = replace(n, args=real(n.args), kwargs=tuple((k, real(v)) for k, v in n.kwargs))
            nodes.extend(added)
        nodes.append(n)
    added.clear()
    if results:
        graph.outputs = [real(o) for o in graph.outputs]
        graph.mutations = [(name, real(v)) for name, v in graph.mutations]
    graph.nodes = [*nodes, *added]


def schedule(graph: Graph, caps: Capabilities, check: bool = False) -> Program:
    p = ProgramDraft([], [], [])
    seen: dict[AnyKernel, int] = {}
    if graph.turns:
        settle_layouts(graph)
        made = len(graph.nodes)
        make_views_real(graph, arguments=False)
        if len(graph.nodes) > made:  # unknown: on which stream to copy, and before which of the caller's events
            raise UnsupportedError("a result that is laid out anew, in a function that uses streams")
    for section in sections(graph):
        p.steps += section.steps
        p.steps += steps_of(section.graph, caps, check, p, seen, section.stream)
    p.outputs = list(graph.outputs)
    count = len(p.steps)
    write_mutations(p, graph)
    if caps.tables and not graph.turns:
        join_launches(p, caps.tuning.table_launches)
    place_buffers(p, graph)
    if not graph.turns:
        write_over(p, graph.donated, caps.arena_most)
    forget_unused_kernels(p)
    if graph.turns:
        plan_streams(p, graph, caps.arena_most, count)
    else:
        plan_memory(p, caps.arena_most)
    program = p.finished(graph)
    if check or graph.turns:
        check_order(program)
    return program


def steps_of(graph: Graph, caps: Capabilities, check: bool, p: ProgramDraft, seen: dict[AnyKernel, int], stream: int
             ) -> list[Step]:
    """The launches and calls of a graph on one stream. Kernels, and notes on values kept in memory, go to the draft."""
    notes = p.notes
    order_scatters(graph, caps)
    settle_layouts(graph)
    make_views_real(graph)
    if check:
        verify(graph, "after lowering")
    inline(graph, notes, caps)
    share_windows(graph, caps)
    apply_policy(graph)
    prepare_contractions(graph, caps)
    split_reductions(graph, caps)
    if isinstance(caps.tuning, CpuTuning):
        widen_columns(graph, caps.tuning)
    if check:
        verify(graph, "after inlining")
    hard = materialised(graph)
    groups = fuse(graph, caps.tuning, hard)
    stored = set(reads_elsewhere(groups, set(hard)))
    within = {name for name, why in hard.items() if why == COMPARED} - set(reads_elsewhere(groups, set()))
    steps: list[Step] = []
    for g in groups:
        kernel: Kernel
        if isinstance(g, Single) and isinstance(g.node, Attention):
            made = shape_attention(g.node, graph.buffers, stored, caps, graph.typical)
            steps += [launched(k, p, seen, stream) for k in made]
            continue
        if isinstance(g, Group) and g.is_contract:
            kernel = shape_contract(g, graph.buffers, stored, caps.tuning, graph.typical, caps.shares)
        elif isinstance(g, Group):
            kernel, extra = shape_group(g, graph.buffers, stored, caps, graph.typical, graph.policy.exact)
            stored |= extra
            kernel = without_stores(kernel, within - extra)
        else:
            n = g.node
            if isinstance(n, Extern):
                steps.append(Call(n.target, n.args, n.kwargs, n.names, n.outputs, n.kind, n.origin, n.out,
                                  may_alias(n), stream))
                continue
            if isinstance(n, Scan):
                kernel = shape_scan(n, graph.buffers, stored, caps, graph.typical)
            else:
                assert isinstance(n, Scatter)
                kernel = shape_scatter(n, graph.buffers, graph.typical)
        if all(is_empty(graph.buffers[x.name]) for x in kernel.params if x.written) and not checks(g):
            continue
        steps.append(launched(formed(kernel, caps.tuning), p, seen, stream))
    return steps


def without_stores(k: LoopKernel, within: set[str]) -> LoopKernel:
    """The kernel without stores of the values `within` that none of its stages reads back. They were kept only to be
    computed in a single place, and that place is this kernel."""
    names = within.intersection(dict(k.stores)).difference(*map(k.read_back, k.stages))
    return k if not names else replace(k, stores=tuple((n, at) for n, at in k.stores if n not in names),
                                       params=tuple(p for p in k.params if p.name not in names))


def launched(kernel: Kernel | AttentionKernel, p: ProgramDraft, seen: dict[AnyKernel, int], stream: int) -> Launch:
    """A launch of the kernel; equal kernels are added to the draft only once."""
    at = seen.setdefault(kernel, len(p.kernels))
    if at == len(p.kernels):
        p.kernels.append(kernel)
    return Launch(at, tuple(x.name for x in kernel.params), kernel.origins, stream=stream)


def checks(g: Group | Single) -> bool:
    """Whether the group's kernel checks its data for errors."""
    return any(e.op in CHECKED for n in g.nodes for e in walk(*n.exprs()))


def forget_unused_kernels(p: ProgramDraft) -> None:
    used = sorted({s.kernel for s in p.steps if isinstance(s, Launch)})
    place = {old: new for new, old in enumerate(used)}
    p.kernels = [p.kernels[k] for k in used]
    p.steps = [replace(s, kernel=place[s.kernel]) if isinstance(s, Launch) else s for s in p.steps]


def place_buffers(p: ProgramDraft, graph: Graph) -> None:
    used = set(lifetimes(p)) | {v.buffer for v in values_in(p.outputs)} | set(graph.inputs)
    returned = {v.buffer for v in values_in(p.outputs)}
    from_calls = {n for s in p.steps if isinstance(s, Call) and s.out is None for n in s.names}
    # Memory that a call's result may share must live as long as that result, so it does not come from the arena.
    shared = {v.buffer for s in p.steps if isinstance(s, Call) and s.aliases for v in values_in((s.args, s.kwargs))}
    for name, b in graph.buffers.items():
        if name not in used:
            continue
        place = ("input" if name in graph.inputs else "seed" if name in graph.seeds else "extern" if name in from_calls
                 else "output" if name in returned else "alloc" if name in shared or b.alone else "arena")
        assert b.strides is not None
        p.buffers[name] = BufferPlan(name, b.dtype, b.shape, b.strides, place)
