"""Compiles a function over lists of tensors: traces it for one tensor, and makes kernels over a table of all.

Numbers that may change from call to call (a learning rate, the step count) are symbols in the trace and arguments at
run time, and are computed as Python computes them. Decisions that depend on them become conditions of a `Variant`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from flambeau.capture.graph import capture
from flambeau.config import config
from flambeau.errors import CompileError
from flambeau.ir.nodes import Graph, Node, Pointwise
from flambeau.ir.numerics import policy_of
from flambeau.ir.program import Launch, Program
from flambeau.pipeline import LOCK
from flambeau.runtime.executor import executable
from flambeau.runtime.placement import CPU
from flambeau.schedule.plan import schedule
from flambeau.schedule.tensor_tables import Rows, along_lists, as_row
from flambeau.targets.base import Run, Target, get_target, target_for
from flambeau.torch_compat import patches
from flambeau.torch_compat.fx import PythonPrinter

SCALARS = frozenset(("state_steps",))  # lists with one number for each parameter
SIZE = 1009  # length of the traced row; it stands for any length


class Declined(Exception):
    """Raised if a call is left to torch's function."""


@dataclass(frozen=True)
class RowForm:
    """Everything about a call except its tensors."""

    original: Callable[..., None]
    module: ModuleType
    changing: str  # the list whose tensors are new in every call
    given: dict[str, Any]  # all arguments by name
    lists: tuple[str, ...]
    empty: dict[str, list[None]]  # lists that are empty or hold only None, cut to one row
    shared: dict[str, torch.dtype]  # scalars that all rows read
    numbers: dict[str, float]
    counts: bool  # Python numbers are computed from the step count
    target: str | None
    numerics: str


@dataclass(frozen=True)
class RowKind:
    """The properties of a row's tensors that its kernels depend on."""

    device: torch.device
    scalars: torch.device | None  # the device of its scalars, if there are any
    dtypes: tuple[torch.dtype, ...]  # for each list


@dataclass(frozen=True)
class RowProgram:
    """The launches of one row on one device."""

    target: Target
    device: torch.device
    program: Program
    lists: tuple[str, ...]  # inputs that each row has its own of
    launches: tuple[Rows, ...]

    def along(self, lengths: Sequence[int]) -> Run:
        """A run function for rows of these lengths: takes the lists' addresses, the shared tensors, and numbers."""
        return built(along_lists(self.program, self.launches, self.lists, lengths), self.target, self.device)


@dataclass(frozen=True)
class Variant:
    """The kernels of a row kind, valid while all decisions that depend on numbers come out the same."""

    holds: Callable[..., bool]
    programs: tuple[RowProgram, ...]  # the device's first, so that it starts before the host counts


def target_of(device: torch.device, wanted: str | None) -> Target:
    name = wanted or target_for(device)
    if name is None or not get_target(name).capabilities().tables:
        raise Declined(f"the target {name} has no tables" if name else f"there is no target for {device}")
    return get_target(name)


def compile_row(f: RowForm, c: RowKind, count: float) -> Variant:
    apart = c.scalars is not None and c.scalars != c.device
    if apart and (f.given.get("capturable") or c.scalars != torch.device("cpu")):
        raise Declined("numbers of parameters on another device")
    target = target_of(c.device, f.target)
    target.prepare()
    gm, guards, symbols = trace(f, c, count)
    with target.on(c.device):
        captured = capture(gm, target.capabilities(), device=c.device, policy=policy_of(f.numerics, c.device.type))
        keep_scalars(captured.graph)
        program = schedule(captured.graph, target.capabilities(), bool(config.verify))
        inputs = dict(zip(program.inputs, (*f.lists, *f.shared), strict=True))
        kept = {*f.shared, *(() if f.changing == "params" else (f.changing,))}
        places: dict[bool, list[Rows]] = {False: [], True: []}
        for row in rows_of(program):
            if any(x.written and inputs.get(a) in kept for a, x in zip(row.args, row.kernel.columns, strict=True)):
                raise Declined("what it updates is not its parameters or states")
            scalars = {inputs.get(a) in SCALARS for a in row.args}
            if apart and scalars == {True, False}:
                raise Declined("numbers on the CPU meet tensors elsewhere")
            places[apart and scalars == {True}].append(row)
        where = (target, c.device), (get_target("cpu"), CPU)
        programs = [RowProgram(*there, program, program.inputs[: len(f.lists)], tuple(rows))
                    for there, rows in zip(where, places.values()) if rows]
    text = {str(s): name for name, s in symbols.items()}
    return Variant(function_of(text, " and ".join(f"({g})" for g in guards) or "True"), tuple(programs))


def built(p: Program, target: Target, device: torch.device) -> Run:
    try:
        with LOCK:
            return executable(p, target, device)
    except CompileError as error:
        raise Declined(f"a kernel did not build: {error}") from error


def function_of(names: dict[str, str], text: str) -> Callable[..., Any]:
    """Compile an expression over symbols into a function of numbers by name."""
    scope: dict[str, Any] = {"math": math}
    exec(f"def inner({', '.join(names)}): return {text}", scope)
    inner, order = scope["inner"], list(names.values())
    return lambda **given: inner(*[given[name] for name in order])


def trace(f: RowForm, c: RowKind, count: float) -> tuple[torch.fx.GraphModule, list[str], dict[str, Any]]:
    """Trace one row; returns its graph, the guards on the numbers that it depends on, and the numbers' symbols."""
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
        # CPU scalars of parameters are traced as if on the device: their kernels are the same.
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
    """Compute values that are the same for a whole row once, ahead of the row's kernels and not in each of their
    blocks. Values that depend only on numbers of the run stay inline."""
    large = {name for n in graph.nodes if isinstance(n, Pointwise) and n.vars for name in n.reads()}
    known, numbers = set(graph.inputs), set[str]()
    singles: list[Node] = []
    others: list[Node] = []
    for n in graph.nodes:
        if isinstance(n, Pointwise) and not n.vars and n.reads() <= known:
            known |= set(n.names)
            if n.reads() <= numbers:
                numbers |= set(n.names)
            singles.append(replace(n, laid=True) if n.names[0] in large - numbers else n)
        else:
            others.append(n)
    graph.nodes = [*singles, *others]


def rows_of(program: Program) -> list[Rows]:
    """The program's launches, as rows of tables."""
    sizes = set(program.inputs)  # and numbers that follow from these
    sizes |= {s.name for s, h in program.numbers if h.needs & sizes}
    launches = []
    for s in program.steps:
        row = as_row(program.kernels[s.kernel], s.args) if isinstance(s, Launch) else None
        if row is None or any(n.name in sizes for n in row.numbers):
            raise Declined(f"its step {s} is not a map of whole tensors")
        launches.append(row)
    inside = {a for row in launches for a in row.args} - set(program.inputs)
    if any(program.places[name].shape for name in inside):
        raise Declined("it needs memory for intermediate results")
    return launches
