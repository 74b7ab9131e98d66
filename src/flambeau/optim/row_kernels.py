"""One row of a function over lists of tensors, traced and compiled into kernels along a table of all rows.

Numbers that may change from call to call (a learning rate, the count of steps) are symbols of the trace: the kernels
read them from memory, computed as Python computes them. Decisions that depend on them become conditions of a `Variant`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from flambeau.capture.graph import capture
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.ir.nodes import Extern, Graph, Host, Node, Pointwise
from flambeau.ir.numerics import policy_of
from flambeau.ir.program import Call, Launch, Program
from flambeau.runtime.launch_plan import as_number
from flambeau.schedule.plan import schedule
from flambeau.schedule.tensor_tables import Rows, as_row
from flambeau.targets.base import Launch as TargetLaunch
from flambeau.targets.base import get_target, target_for
from flambeau.torch_compat import patches
from flambeau.torch_compat.fx import PythonPrinter

SCALARS = frozenset(("state_steps",))  # lists with one number for each parameter
SIZE = 1009  # of the row that is traced; it stands for any


class Declined(Exception):
    """This call is torch's."""


@dataclass(frozen=True)
class RowForm:
    """What a call is, but for its tensors."""

    original: Callable[..., None]
    module: ModuleType
    changing: str  # the list whose tensors are others in every call
    given: dict[str, Any]  # all arguments by name
    lists: tuple[str, ...]
    empty: dict[str, list[None]]  # lists that are empty or hold nothing, with one row
    shared: dict[str, torch.dtype]  # scalars that all rows read
    numbers: dict[str, float]
    counts: bool  # Python numbers are computed from the count of steps
    target: str | None
    numerics: str


@dataclass(frozen=True)
class RowKind:
    """The tensors of a row, as far as its kernels depend on them."""

    device: torch.device
    scalars: torch.device | None  # where those are
    dtypes: tuple[torch.dtype, ...]  # of each list


@dataclass(frozen=True)
class Pointer:
    """A column of a kernel's table: the tensors of a list, a number for each row, or a place for one."""

    kind: str  # "list", "number" or "temporary"
    which: Any  # the list's name, else a position


@dataclass(frozen=True)
class TableLaunch:
    launch: TargetLaunch
    pointers: tuple[Pointer, ...]
    single: bool  # touches one element of each row
    apart: bool  # runs on the CPU, where the scalars are and the other tensors are not


@dataclass(frozen=True)
class Variant:
    """The kernels of a kind of row, for as long as decisions that depend on numbers are the same."""

    holds: Callable[..., bool]
    numbers: Callable[..., tuple[float, ...]]
    launches: tuple[TableLaunch, ...]
    temporaries: int
    sources: tuple[Any, ...]


def target_name(device: torch.device, wanted: str | None) -> str:
    name = wanted or target_for(device)
    if name is None:
        raise Declined(f"there is no target for {device}")
    return name


def compile_row(f: RowForm, c: RowKind, count: float) -> Variant:
    apart = c.scalars is not None and c.scalars != c.device
    if apart and (f.given.get("capturable") or c.scalars != torch.device("cpu")):
        raise Declined("numbers of parameters on another device")
    target = get_target(target_name(c.device, f.target))
    if not target.capabilities().tables:
        raise Declined(f"the target {target.name} has no tables")
    target.prepare()
    gm, guards, symbols = trace(f, c, count)
    names = [*f.lists, *f.shared]
    with target.on(c.device):
        captured = capture(gm, target.capabilities(), device=c.device, policy=policy_of(f.numerics, c.device.type))
        keep_scalars(captured.graph)
        program = schedule(captured.graph, target.capabilities(), bool(config.verify))
        inputs = dict(zip(program.inputs, names, strict=True))
        numbers, launches = steps_of(program)
        sources = []
        drafts = []
        temporaries: dict[str, int] = {}
        for k, rows in enumerate(launches):
            single = not rows.kernel.body.outer
            pointers = tuple(
                Pointer("list", inputs[a]) if a in inputs else Pointer("number", list(numbers).index(a)) if a in numbers
                else Pointer("temporary", temporaries.setdefault(a, len(temporaries))) for a in rows.args)
            written = {p.which for p, x in zip(pointers, rows.kernel.columns, strict=True) if x.written}
            if written & {*f.shared, *(() if f.changing == "params" else (f.changing,))}:
                raise Declined("what it updates is not its parameters or states")
            scalars = {p.kind == "list" and p.which in SCALARS for p in pointers}
            if apart and scalars == {True, False}:
                raise Declined("numbers on the CPU meet tensors elsewhere")
            there = get_target("cpu") if apart and scalars == {True} else target
            source = there.render(rows.kernel, f"k{k}")
            sources.append(source)
            drafts.append((there, there.build([source]), pointers, single, apart and scalars == {True}))
        made = []
        for k, (_, build, pointers, single, elsewhere) in enumerate(drafts):
            launch = build.wait()[f"k{k}"]
            if isinstance(launch, CompileError):
                raise Declined(f"a kernel did not build: {launch}")
            made.append(TableLaunch(launch, pointers, single, elsewhere))
    text = {str(s): name for name, s in symbols.items()}
    return Variant(function_of(text, " and ".join(f"({g})" for g in guards) or "True"),
                   function_of(text, f"({''.join(h.text + ', ' for h in numbers.values())})"), tuple(made),
                   len(temporaries), tuple(sources))


def function_of(names: dict[str, str], text: str) -> Callable[..., Any]:
    """A function of numbers by name, from an expression over their symbols."""
    scope: dict[str, Any] = {"math": math}
    exec(f"def inner({', '.join(names)}): return {text}", scope)
    inner, order = scope["inner"], list(names.values())
    return lambda **given: inner(*[given[name] for name in order])


def trace(f: RowForm, c: RowKind, count: float) -> tuple[torch.fx.GraphModule, list[str], dict[str, Any]]:
    """One row as a graph; what must hold of the numbers for it to be right; the numbers' symbols."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    from flambeau.torch_compat.dynamo import ConstantSource
    from flambeau.torch_compat.fake import FakeTensorMode

    env = ShapeEnv()
    sources = {name: ConstantSource(f"number_{name}") for name in (*f.numbers, "step", "length")}
    length = env.create_symintnode(env.create_symbol(SIZE, sources["length"], dynamic_dim=DimDynamic.DYNAMIC,
                                                     constraint_dim=None), hint=SIZE, source=sources["length"])
    values = {**f.numbers, **({"step": count} if f.counts else {})}
    symbols = {name: env.create_unspecified_symbol(value, sources[name], dynamic_dim=DimDynamic.DYNAMIC)
               for name, value in values.items()}
    given = {name: env.create_symfloatnode(symbols[name], hint=value, source=sources[name])
             for name, value in values.items()}
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True):
        # Numbers of parameters on the CPU are traced as if they were not: their kernels are the same.
        row = [torch.empty(() if name in SCALARS else (length,), dtype=dtype, device=c.device)
               for name, dtype in zip(f.lists, c.dtypes, strict=True)]
        row += [torch.empty((), dtype=dtype, device=c.device) for dtype in f.shared.values()]

    def step(tensors: list[torch.Tensor], numbers: list[Any]) -> None:
        named = dict(zip(given, numbers, strict=True))
        count_now = named.pop("step", None)
        lists: dict[str, list[Any]] = {name: list(value) for name, value in f.empty.items()}
        lists |= {name: [t] for name, t in zip(f.lists, tensors, strict=False)}
        named |= dict(zip(f.shared, tensors[len(f.lists):], strict=True))
        before = {name: list(value) for name, value in lists.items()}
        counted = patches.COUNTS.applied(f.module, lists["state_steps"], count_now) if f.counts else nullcontext()
        with counted:
            f.original(**(f.given | lists | named))
        if any(a is not b for name in lists for a, b in zip(before[name], lists[name], strict=True)):
            raise Declined("states that this step makes")

    with torch.no_grad(), patches.COMPILING.applied(bool(f.given.get("capturable"))):
        gm = make_fx(torch.func.functionalize(step), tracing_mode="symbolic")(row, list(given.values()))
    gm.graph.eliminate_dead_code()
    text = PythonPrinter().doprint
    free = set(symbols.values())
    guards = [text(g.expr) for g in env.guards if g.expr.free_symbols & free]
    return gm, guards, symbols


def keep_scalars(graph: Graph) -> None:
    """What is one number for a whole row is known before its kernels: not computed in every block of it."""
    large = {name for n in graph.nodes if isinstance(n, Pointwise) and n.vars for name in n.reads()}
    numbers: list[Node] = [n for n in graph.nodes if isinstance(n, Extern) and n.target is as_number]
    known = {*graph.inputs, *(name for n in numbers for name in n.names)}
    singles: list[Node] = []
    others: list[Node] = []
    for n in graph.nodes:
        if isinstance(n, Pointwise) and not n.vars and n.reads() <= known:
            singles.append(replace(n, laid=True) if n.names[0] in large else n)
            known |= set(n.names)
        elif n not in numbers:
            others.append(n)
    graph.nodes = [*numbers, *singles, *others]


def steps_of(program: Program) -> tuple[dict[str, Host], list[Rows]]:
    """The numbers that a program reads, and its launches along tables."""
    numbers: dict[str, Host] = {}
    launches = []
    for s in program.steps:
        if isinstance(s, Call) and s.target is as_number:
            numbers[s.names[0]] = s.args[0]
            continue
        row = as_row(program.kernels[s.kernel], s.args) if isinstance(s, Launch) else None
        if row is None:
            raise Declined(f"its step {s} is not a map of whole tensors")
        launches.append(row)
    inside = {a for row in launches for a in row.args} - set(program.inputs) - set(numbers)
    if any(program.places[name].shape for name in inside):
        raise Declined("it needs memory for intermediate results")
    return numbers, launches
