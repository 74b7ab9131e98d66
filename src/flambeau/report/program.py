"""Summary of a compiled graph as plain data: its steps, the operators in each, memory, compile times."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from flambeau.ir.index import Sym
from flambeau.ir.program import (
    AnyKernel,
    AttentionKernel,
    Call,
    ContractKernel,
    Copy,
    Fresh,
    Keep,
    Launch,
    LoopKernel,
    Record,
    ScanKernel,
    Synchronize,
    TableKernel,
    Wait,
    values_in,
)
from flambeau.ops.facts import facts
from flambeau.pipeline import Compiled
from flambeau.schedule.memory import nbytes
from flambeau.torch_compat.ops import OpOverload

SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
         torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
         torch.bool: "bool", torch.complex64: "c64"}
NAMES = {"kernel": "kernel(s)", "library": "library call(s)", "ATen": "ATen call(s)",
         "copy": "update(s) of inputs", "order": "step(s) that order streams"}
KINDS = {"library": "library", "extern": "ATen", "sort": "ATen", "send": "send", "fetch": "fetch"}
MOVES = ("view",)  # families that only change the index: they cost nothing, and are not shown as fused


@dataclass
class Step:
    """One launch, call, copy, or synchronisation of streams. Only our kernels have loops."""

    kind: str  # kernel, library, ATen, copy or order
    name: str  # of a kernel: its name in the graph, k0, k1, ...
    operators: list[str]
    reads: list[str]
    writes: list[str]
    outer: str = ""
    inner: str = ""
    vector: str = ""
    same_as: str = ""  # an earlier kernel with the same source, which is compiled once
    title: str = ""  # of a kernel: its name in profilers
    stream: int = 0


@dataclass
class Memory:
    """A buffer, and why it is needed."""

    buffer: str
    type: str
    place: str
    bytes: int | None  # None: only known at run time
    operator: str
    why: str


@dataclass
class Summary:
    direction: str
    operators: list[str]  # the ATen graph, one line for each call
    steps: list[Step]
    memory: list[Memory]
    local: dict[str, str]  # operators whose value is computed once inside a kernel, and why
    arena_bytes: int
    externs: dict[str, int]
    seconds: dict[str, float]
    choices: list[str]  # for matrix products: which kernel was chosen, and why
    texts: dict[str, str] = field(default_factory=dict)

    def count(self, kind: str) -> int:
        return sum(step.kind == kind for step in self.steps)

    def headline(self) -> str:
        parts = [f"{n} {name}" for kind, name in NAMES.items() if (n := self.count(kind)) or kind == "kernel"]
        return f"{self.direction}: {len(self.operators)} operators became {', '.join(parts)}"


@dataclass
class Explanation:
    """The result of `flambeau.debug.explain`: a `Summary` of each graph. Prints as text, and as tables in notebooks."""

    graphs: list[Summary]

    def __str__(self) -> str:
        """For each graph, a headline and one line per step."""
        lines = []
        for s in self.graphs:
            lines.append(s.headline())
            several = any(step.stream for step in s.steps)
            lines += [f"  {f'stream {step.stream} ' * several}{step.kind:8} {step.name}"
                      f"{': ' * bool(step.operators)}{', '.join(step.operators)}" for step in s.steps]
        return "\n".join(lines)

    def texts(self) -> dict[str, str]:
        """The source of each kernel, by the name that profilers show."""
        return {step.title or step.name: s.texts[step.name] for s in self.graphs for step in s.steps
                if step.kind == "kernel"}

    def _repr_html_(self) -> str:
        return "".join(graph_html(s) for s in self.graphs)


def graph_html(s: Summary) -> str:
    """A table of steps. Kernels can be unfolded to show their source."""
    rows = []
    for step in s.steps:
        name, text = html.escape(step.title or step.name), s.texts.get(step.name, "")
        shown = f"<details><summary>{name}</summary><pre>{html.escape(text)}</pre></details>" if text else name
        cells = (step.kind, shown, html.escape(", ".join(step.operators)), step.outer, step.inner)
        rows.append("<tr>" + "".join(f"<td style='text-align:left'>{c}</td>" for c in cells) + "</tr>")
    heads = "".join(f"<th>{h}</th>" for h in ("", "step", "operators", "outer", "inner"))
    return f"<p><b>{html.escape(s.headline())}</b></p><table><tr>{heads}</tr>{''.join(rows)}</table>"


def summarise(graph: Compiled) -> Summary:
    """Summarise a compiled graph. Nothing is run or changed."""
    p = graph.program
    calls = [n for n in graph.gm.graph.nodes if n.op == "call_function" and not is_getitem(n)]
    origins = {name: node.origin for node in graph.captured.graph.nodes for name in node.names}
    why = reasons(graph)
    memory = [Memory(b.name, typed(b.dtype, b.shape), b.place, nbytes(b), origins.get(b.name, ""), why[b.name])
              for b in p.buffers]
    local = {origins[name]: why for name, why in why.items() if name not in p.places and name in origins}
    return Summary("backward" if is_backward(graph.gm) else "forward", [line(n) for n in calls], steps(graph), memory,
                   local, p.arena_bytes, dict(graph.captured.externs), dict(graph.seconds),
                   list(graph.captured.choices), {t.name: t.text for t in graph.texts})


def is_backward(gm: fx.GraphModule) -> bool:
    return any(n.op == "placeholder" and n.name.startswith("tangents") for n in gm.graph.nodes)


def reasons(graph: Compiled) -> dict[str, str]:
    """For each value that was not fused into its consumer: why it was not."""
    p = graph.program
    out = dict.fromkeys(p.places, "read by a later step")
    out |= {name: reason for name, _, reason in (note.partition(" is kept: ") for note in p.notes)}
    for step in p.steps:
        if isinstance(step, Call):
            out |= {v.buffer: f"argument of {step.target}" for v in values_in((step.args, step.kwargs))}
            out |= dict.fromkeys(step.names, f"result of {step.target}")
    out |= {v.buffer: "output" for v in values_in(p.outputs)}
    return out | dict.fromkeys(p.inputs, "input") | dict.fromkeys(p.seeds, "seed of random numbers")


def is_getitem(n: fx.Node) -> bool:
    return not isinstance(n.target, OpOverload)


def typed(dtype: torch.dtype, shape: Iterable[Any]) -> str:
    return f"{SHORT.get(dtype, str(dtype).removeprefix('torch.'))}[{', '.join(map(str, shape))}]"


def line(n: fx.Node) -> str:
    """A node as text: `gelu: f32[32, 256] = aten.gelu.default(add)`."""
    val = n.meta.get("val")
    results = val if isinstance(val, (list, tuple)) else [val]
    types = ", ".join(typed(v.dtype, v.shape) if isinstance(v, torch.Tensor) else str(v) for v in results)
    return f"{n.name}: {types} = {n.target}({', '.join(str(a) for a in n.args)})"


# ---- steps -----------------------------------------------------------------------------------------------


def steps(graph: Compiled) -> list[Step]:
    p, inlined = graph.program, absorbed(graph)
    order = {n.name: k for k, n in enumerate(graph.gm.graph.nodes)}  # names such as "copy" are ours: last
    out: list[Step] = []
    first: dict[str, str] = {}
    for at, step in enumerate(p.steps):
        if isinstance(step, Launch):
            kernel, text = p.kernels[step.kernel], graph.texts[step.kernel]
            outer, inner, vector = loops(kernel)
            same = first.setdefault(text.text, text.name)
            params = kernel.params
            names = sorted([*inlined[at], *step.origins], key=lambda name: order.get(name, len(order)))
            out.append(Step("kernel", text.name, names,
                            [q.name for q in params if not q.written], [q.name for q in params if q.written],
                            outer, inner, vector, same if same != text.name else "", text.title, step.stream))
        elif isinstance(step, Call):
            reads = [v.buffer for v in values_in((step.args, step.kwargs))]
            out.append(Step(KINDS[step.kind], str(step.target).removesuffix(".default"), [step.origin], reads,
                            list(step.names), stream=step.stream))
        elif isinstance(step, Copy):
            out.append(Step("copy", f"{step.dst} <- {step.src.buffer}", [], [step.src.buffer], [step.dst],
                            stream=step.stream))
        elif isinstance(step, Fresh):
            out.append(Step("order", f"memory for {step.buffer}", [], [], [step.buffer], stream=step.stream))
        else:
            out.append(Step("order", ordering(step), [], [], [], stream=step.stream or 0))
    return out


def ordering(s: Record | Wait | Synchronize | Keep) -> str:
    """A step that orders streams, as text."""
    if isinstance(s, Keep):
        return f"stream {s.stream} keeps {s.buffer}"
    if isinstance(s, Synchronize) and s.event is None and s.place is None:
        return f"the host waits for {'the device' if s.stream is None else f'stream {s.stream}'}"
    event = f"event {s.event}" if s.event is not None else "an event from before"
    who = "the host" if isinstance(s, Synchronize) else f"stream {s.stream}"
    return f"{who} {'records' if isinstance(s, Record) else 'waits for'} {event}"


def loops(kernel: AnyKernel) -> tuple[str, str, str]:
    """Outer loops (parallel), inner loops, and the vectorised variable of a kernel, as text."""

    def extents(variables: Iterable[Sym]) -> str:
        return " ".join(f"{v.name}:{v.extent}" for v in variables)

    if isinstance(kernel, LoopKernel):
        inner = extents(kernel.inner) + (" (a range read from memory)" if kernel.bounds else "")
        vectors = [v.name for v in (kernel.vector, kernel.tile) if v]  # two: the loops go over square tiles
        return extents(kernel.outer), inner, " x ".join(vectors)
    if isinstance(kernel, ContractKernel):
        points = " x ".join(extents(vars) for vars in (kernel.batch, kernel.rows, kernel.columns) if vars)
        return points, extents(kernel.depth), extents(kernel.columns[-1:])
    if isinstance(kernel, AttentionKernel):
        n = kernel.node
        own, other = (n.row, n.column) if kernel.role in ("out", "queries") else (n.column, n.row)
        return extents((*n.batch, n.group, own)), extents((other, n.depth, n.width)), ""
    if isinstance(kernel, ScanKernel):
        inner = f"scan {extents([kernel.axis])}{' reversed' if kernel.reverse else ''}"
        return extents(kernel.outer), inner, kernel.vector.name if kernel.vector else ""
    if isinstance(kernel, TableKernel):
        return "rows of a table", extents(kernel.body.outer), kernel.body.vector.name if kernel.body.vector else ""
    free = [v for v in kernel.vars if v in kernel.free]
    rest = [v for v in kernel.vars if v not in kernel.free]
    return extents(free), f"scatter {kernel.mode} {extents(rest)}", ""


def absorbed(graph: Compiled) -> dict[int, list[str]]:
    """The operators that were fused into their consumers, by the step that computes them.

    A step only names the operators whose results it writes. An operator that no step names, and that is not a view, is
    computed inside the steps of its users.
    """
    named: dict[str, set[int]] = {}
    for at, step in enumerate(graph.program.steps):
        names = step.origins if isinstance(step, Launch) else (step.origin,) if isinstance(step, Call) else ()
        for name in names:
            named.setdefault(name, set()).add(at)
    homes: dict[fx.Node, set[int]] = {}
    out: dict[int, list[str]] = {at: [] for at in range(len(graph.program.steps))}
    for n in reversed(graph.gm.graph.nodes):
        if n.op != "call_function":
            continue
        homes[n] = named.get(n.name) or set().union(*(homes.get(u, set()) for u in n.users))
        if n.name not in named and not is_getitem(n) and facts(n.target).family not in MOVES:
            for at in homes[n]:
                if isinstance(graph.program.steps[at], Launch):
                    out[at].append(n.name)
    return out
