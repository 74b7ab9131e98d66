"""Functions over lists of tensors, such as the steps of torch's optimizers, as one kernel for all tensors of a class.

Such a function computes each row of its lists (a parameter, its gradient, its states) by itself. So one row of each
class, that is of each combination of dtypes, is traced, with numbers that may change (a learning rate, the count of
steps) as symbols, and compiled into kernels along a table of all rows. How many rows there are, and of which sizes,
costs nothing. What cannot be done this way is left to torch, with the reason in `DECLINED`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import operator
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._sympy.printers import PythonPrinter

from flambeau.config import config
from flambeau.errors import CompileError, UnsupportedError
from flambeau.ir.dtypes import SUPPORTED
from flambeau.ir.nodes import Extern, Graph, Node, Pointwise
from flambeau.ir.program import Call, Launch, Program
from flambeau.schedule.plan import schedule
from flambeau.schedule.tables import Rows, as_row
from flambeau.targets.base import get_target, target_for

from .capture import capture
from .package import as_number
from .pipeline import LOCK
from .symbols import Host
from .tables import Mirror, blocks_of, sizes_of

SCALARS = frozenset(("state_steps",))  # lists with one number for each parameter
MUST_BE_OFF = ("fused", "differentiable", "has_complex", "has_sparse_grad", "grad_scale", "found_inf")
CHANGING = ("grads", "d_p_list")
COUNT = "_get_value"  # makes a Python number of a count of steps
SIZE = 1009  # of the row that is traced; it stands for any

DECLINED: Counter[str] = Counter()  # reasons why calls were left to torch


class Declined(Exception):
    """This call is torch's."""


@dataclass(frozen=True)
class Pointer:
    """A column of a kernel's table: the tensors of a list, a number for each row, or a place for one."""

    kind: str  # "list", "number" or "temporary"
    which: Any  # the list's name, else a position


@dataclass
class TableLaunch:
    launch: Callable[[Sequence[int], Sequence[int]], int]
    pointers: tuple[Pointer, ...]
    single: bool  # touches one element of each row
    apart: bool  # runs on the CPU, where the scalars are and the other tensors are not


@dataclass
class Variant:
    """The kernels of a class, for as long as decisions that depend on numbers are the same."""

    holds: Callable[..., bool]
    numbers: Callable[..., tuple[float, ...]]
    launches: list[TableLaunch]
    temporaries: int
    sources: list[Any]


@dataclass
class Class:
    """Rows whose tensors have the same dtypes."""

    device: torch.device
    dtypes: dict[str, torch.dtype]
    scalars: torch.device | None  # where those are
    rows: list[int]
    variants: list[Variant | Declined]
    tables: dict[Any, Tables] = field(default_factory=dict)


@dataclass
class Prepared:
    """What is known of the lists of a call, for as long as their tensors live."""

    ids: tuple[int, ...]
    lengths: list[int]
    strides: list[tuple[int, ...]]  # of the tensors that change, as are the shapes
    shapes: list[torch.Size]
    classes: list[Class]
    left: list[int]  # rows that are not dense, or laid out in different ways
    refs: list[Any]
    addresses: dict[str, list[int]] | None = None


class ListFunction:
    """One of torch's functions, and what was compiled for it."""

    def __init__(self, original: Callable[..., None], module: str) -> None:
        self.original, self.module = original, importlib.import_module(module)
        self.name = original.__name__
        self.names = list(inspect.signature(self.original).parameters)
        # The list whose tensors are others in every call: they are compared one by one.
        self.changing = self.names[1] if self.names[1] in CHANGING else self.names[0]
        self.compiled: dict[Any, list[Variant | Declined]] = {}
        self.prepared: dict[Any, Prepared] = {}
        self.lock = threading.RLock()

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], options: tuple[str | None, str]) -> None:
        """`options`: the target, if not that of the tensors' device, and the numerics."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        try:
            with self.lock:
                left = _Call(self, given, options).run()
        except Declined as reason:
            DECLINED[f"{self.name}: {reason}"] += 1
            self.original(*args, **kwargs)
            return
        if left:
            DECLINED[f"{self.name}: rows that are not laid out alike"] += len(left)
            self.original(**{k: [v[row] for row in left] if isinstance(v, list) and v else v for k, v in given.items()})


@cache
def list_function(original: Callable[..., None], module: str) -> ListFunction:
    """One for a process."""
    return ListFunction(original, module)


class _Call:
    """One call of such a function."""

    def __init__(self, function: ListFunction, given: dict[str, Any], options: tuple[str | None, str]) -> None:
        self.f, self.given = function, given
        self.target_name, self.numerics = options
        if torch._C._len_torch_dispatch_stack():
            raise Declined("a dispatch mode is active")
        for name in MUST_BE_OFF:
            if given.get(name):
                raise Declined(name)
        every = {name: value for name, value in given.items() if isinstance(value, list)}
        self.lists = {name: value for name, value in every.items() if value and any(t is not None for t in value)}
        self.empty = {name: [None] if value else [] for name, value in every.items() if name not in self.lists}
        self.numbers = {name: value for name, value in given.items() if isinstance(value, float)}
        self.shared = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        self.rest = {name: value for name, value in given.items()
                     if not isinstance(value, (list, float, torch.Tensor))}
        for name, t in self.shared.items():
            check_plain(name, t)
            if t.dim() or t.device != given["params"][0].device:
                raise Declined(f"{name} is no scalar, or is elsewhere")
        self.rows = len(given["params"])
        if any(len(x) != self.rows for x in self.lists.values()):
            raise Declined("lists of different lengths")
        self.fixed = [name for name in self.lists if name != self.f.changing]
        self.scalars = [name for name in self.lists if name in SCALARS]
        self.counts = "state_steps" in self.lists and not given.get("capturable") and hasattr(self.f.module, COUNT)

    # ---- what the lists hold ---------------------------------------------------------------------------

    def kind(self) -> tuple[Any, ...]:
        """All that kernels depend on, but for the tensors."""
        shared = ((name, t.dtype, t.device) for name, t in self.shared.items())
        return (self.target_name, self.numerics, *self.lists, *self.numbers, *self.rest.items(), *shared)

    def prepare(self) -> Prepared:
        ids = tuple(map(id, chain.from_iterable(self.lists[n] for n in self.fixed)))
        key = (ids[0] if ids else self.rows, self.kind())
        found = self.f.prepared.get(key)
        if found is None or found.ids != ids or not self.unchanged(found):
            found = self.f.prepared[key] = self.classify(ids, key)
        return found

    def unchanged(self, p: Prepared) -> bool:
        """Whether tensors still have their sizes, and those that change the layouts of the ones before."""
        new, name = self.lists[self.f.changing], self.f.changing
        return ([t.numel() for t in self.lists["params"]] == p.lengths
                and all(type(t) is torch.Tensor and t.layout is torch.strided and not t.is_neg() for t in new)
                and all(map(operator.eq, (t.stride() for t in new), p.strides))
                and all(map(operator.eq, (t.shape for t in new), p.shapes))
                and all(new[row].dtype is c.dtypes[name] and new[row].device == c.device
                        for c in p.classes for row in c.rows))

    def classify(self, ids: tuple[int, ...], key: Any) -> Prepared:
        groups: dict[Any, list[int]] = {}
        left = []
        for k in range(self.rows):
            row = {name: tensors[k] for name, tensors in self.lists.items()}
            if not is_row(row):
                left.append(k)
                continue
            places = [row[n].device for n in self.scalars]
            groups.setdefault((row["params"].device, *places, *(t.dtype for t in row.values())), []).append(k)
        classes = []
        for what, rows in groups.items():
            device, *rest = what
            places, dtypes = rest[: len(self.scalars)], rest[len(self.scalars):]
            if len(set(places)) > 1:
                raise Declined("numbers of one parameter on several devices")
            compiled = self.f.compiled.setdefault((self.kind(), what), [])
            classes.append(Class(device, dict(zip(self.lists, dtypes, strict=True)), places[0] if places else None,
                                 rows, compiled))
        of = weakref.ref(self.f)

        def forget(_: Any) -> None:
            if (f := of()) is not None:
                f.prepared.pop(key, None)

        refs = [weakref.ref(t, forget) for n in self.fixed for t in self.lists[n]]
        new = self.lists[self.f.changing]
        return Prepared(ids, [t.numel() for t in self.lists["params"]], [t.stride() for t in new],
                        [t.shape for t in new], classes, left, refs)

    # ---- the run -----------------------------------------------------------------------------------------

    def run(self) -> list[int]:
        """All rows that can be; those that cannot are returned."""
        if not self.rows:
            return []
        prepared = self.prepare()
        addresses = {name: [t.data_ptr() for t in tensors] for name, tensors in self.lists.items()}
        if addresses != prepared.addresses:
            check_apart(self.lists, addresses)
            prepared.addresses = addresses
        addresses |= {name: [t.data_ptr()] * self.rows for name, t in self.shared.items()}
        # All are compiled before the first of them runs: what cannot be compiled, is left to torch as a whole.
        parts = [(c, *part) for c in prepared.classes for part in self.parts(c)]
        for c, variant, rows, counts in parts:
            key = (id(variant), tuple(rows) if len(rows) < len(c.rows) else None)
            if key not in c.tables:
                c.tables[key] = Tables(variant, c, rows, prepared.lengths, target_name(c.device, self.target_name))
            tables = c.tables[key]
            with tables.target.on(c.device):
                tables.run(self, addresses, counts)
        written = [t for name in {*self.fixed, "params"} for t in self.lists[name]]
        torch._C._increment_version(written)
        return prepared.left

    def parts(self, c: Class) -> list[tuple[Variant, list[int], list[float]]]:
        """Rows with the kernels that hold for their numbers, and for each row the count of steps after this one."""
        if not self.counts:
            return [(self.variant(c, 0.0), c.rows, [])]
        if c.scalars is not None and c.scalars.type != "cpu":
            raise Declined("counts of steps on a device, and capturable is not set")
        steps = self.lists["state_steps"]
        after = [steps[row].item() + 1.0 for row in c.rows]
        chosen = {count: self.variant(c, count) for count in set(after)}
        if len(chosen) == 1:
            return [(chosen[after[0]], c.rows, after)]
        parts: dict[int, tuple[Variant, list[int], list[float]]] = {}
        for row, count in zip(c.rows, after, strict=True):
            v = chosen[count]
            _, rows, counts = parts.setdefault(id(v), (v, [], []))
            rows.append(row)
            counts.append(count)
        return list(parts.values())

    def variant(self, c: Class, count: float) -> Variant:
        for v in c.variants:
            if isinstance(v, Declined):
                raise v
            if v.holds(step=count, **self.numbers):
                return v
        try:
            with LOCK:
                made = compile_class(self, c, count)
        except Exception as e:  # whatever is wrong with the compiler, the optimizer runs
            if config.verify and not isinstance(e, (Declined, UnsupportedError)):
                raise
            c.variants.append(e if isinstance(e, Declined) else Declined(f"{type(e).__name__}: {e}"))
            raise c.variants[-1] from e  # type: ignore[misc]
        c.variants.append(made)
        return made


class Tables:
    """The tables of a class's kernels: what of them stays from call to call."""

    def __init__(self, v: Variant, c: Class, rows: list[int], lengths: list[int], target: str) -> None:
        self.v, self.rows = v, rows
        self.whole = rows is c.rows and rows == list(range(len(lengths)))
        self.lengths = [lengths[row] for row in rows]
        self.target = get_target(target)
        targets = {False: (self.target, c.device), True: (get_target("cpu"), torch.device("cpu"))}
        self.mirrors: dict[bool, Mirror] = {}
        self.blocks: dict[tuple[bool, bool], torch.Tensor] = {}
        for apart in {t.apart for t in v.launches}:
            self.mirrors[apart] = Mirror(*targets[apart])
        for t in v.launches:
            if (t.apart, t.single) not in self.blocks:
                blocks = blocks_of([1] * len(rows) if t.single else self.lengths)
                self.blocks[t.apart, t.single] = blocks.to(targets[t.apart][1])
        self.places = torch.empty(v.temporaries * len(rows), dtype=torch.float64, device=c.device)

    def run(self, call: _Call, addresses: dict[str, list[int]], counts: list[float]) -> None:
        v, rows = self.v, self.rows
        counted = list(dict.fromkeys(counts)) or [0.0]
        numbers = [x for count in counted for x in v.numbers(step=count, **call.numbers)]
        each = len(numbers) // len(counted)
        which = {count: k * each for k, count in enumerate(counted)}
        for apart, mirror in self.mirrors.items():
            launches = [t for t in v.launches if t.apart is apart]
            tables = sum(even((len(t.pointers) + 1) * len(rows)) for t in launches)
            memory = mirror.memory(even(len(numbers)) + tables)
            base = memory.data_ptr()
            words = array("q", array("d", numbers).tobytes())
            starts = []
            for t in launches:
                words.extend([0] * (len(words) % 2))
                starts.append(base + 8 * len(words))
                for p in t.pointers:
                    if p.kind == "list":
                        column = addresses[p.which]
                        words.extend(column if self.whole else [column[row] for row in rows])
                    elif p.kind == "temporary":
                        first = self.places.data_ptr() + 8 * p.which * len(rows)
                        words.extend(range(first, first + 8 * len(rows), 8))
                    elif len(counted) == 1:
                        words.extend([base + 8 * p.which] * len(rows))
                    else:
                        words.extend([base + 8 * (which[count] + p.which) for count in counts])
                words.extend([1] * len(rows) if t.single else self.lengths)
            words.extend([0] * (len(words) % 2))
            mirror.send(torch.frombuffer(words, dtype=torch.int64), memory)
            for t, start in zip(launches, starts, strict=True):
                blocks = self.blocks[apart, t.single]
                if len(blocks):
                    t.launch((start, blocks.data_ptr()), sizes_of(len(rows), blocks))


def even(count: int) -> int:
    """Words up to where an address is a multiple of 16 again, as kernels may assume."""
    return count + count % 2


def target_name(device: torch.device, wanted: str | None) -> str:
    name = wanted or target_for(device)
    if name is None:
        raise Declined(f"there is no target for {device}")
    return name


def check_plain(name: str, t: torch.Tensor) -> None:
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout is not torch.strided or t.is_neg():
        raise Declined(f"{name} holds what is no plain tensor")
    if t.dtype not in SUPPORTED or not t.is_floating_point():
        raise Declined(f"{name} of {t.dtype}")


def is_row(row: dict[str, torch.Tensor]) -> bool:
    """Whether one element after the other of its tensors belongs together. What is no plain tensor is torch's."""
    p = row["params"]
    for name, t in row.items():
        check_plain(name, t)
        if name in SCALARS:
            if t.dim():
                raise Declined(f"{name} that are no scalars")
        elif t.device != p.device or t.shape != p.shape:
            raise Declined(f"{name} that differ from their parameters")
        elif t.stride() != p.stride() and not (t.is_contiguous() and p.is_contiguous()):
            return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense(p))


def check_apart(lists: dict[str, list[torch.Tensor]], addresses: dict[str, list[int]]) -> None:
    """No two tensors may share memory: rows are computed in no order."""
    starts = torch.tensor([a for name in lists for a in addresses[name]], dtype=torch.int64)
    sizes = torch.tensor([t.numel() * t.element_size() for tensors in lists.values() for t in tensors])
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    order = torch.argsort(starts)
    starts, sizes = starts[order], sizes[order]
    if bool((starts[1:] < starts[:-1] + sizes[:-1]).any()):
        raise Declined("tensors that share memory")


# ---- compiling a class -----------------------------------------------------------------------------------


def compile_class(call: _Call, c: Class, count: float) -> Variant:
    apart = c.scalars is not None and c.scalars != c.device
    if apart and (not call.counts or c.scalars != torch.device("cpu")):
        raise Declined("numbers of parameters on another device")
    target = get_target(target_name(c.device, call.target_name))
    if not target.capabilities().tables:
        raise Declined(f"the target {target.name} has no tables")
    gm, guards, symbols = trace(call, c, count)
    names = [*call.lists, *call.shared]
    with target.on(c.device):
        captured = capture(gm, target.capabilities(), device=c.device)
        keep_scalars(captured.graph)
        program = schedule(captured.graph, target.capabilities(), call.numerics, config.verify)
        inputs = dict(zip(program.inputs, names, strict=True))
        numbers, launches = steps_of(program)
        sources: list[Any] = []
        drafts = []
        temporaries: dict[str, int] = {}
        for k, rows in enumerate(launches):
            single = not rows.kernel.body.outer
            pointers = tuple(
                Pointer("list", inputs[a]) if a in inputs else Pointer("number", list(numbers).index(a)) if a in numbers
                else Pointer("temporary", temporaries.setdefault(a, len(temporaries))) for a in rows.args)
            written = {p.which for p, x in zip(pointers, rows.kernel.columns, strict=True) if x.written}
            if written & {*call.shared, *(() if call.f.changing == "params" else (call.f.changing,))}:
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
                   function_of(text, f"({''.join(h.text + ', ' for h in numbers.values())})"), made,
                   len(temporaries), sources)


def function_of(names: dict[str, str], text: str) -> Callable[..., Any]:
    """A function of numbers by name, from an expression over their symbols."""
    scope: dict[str, Any] = {"math": math}
    exec(f"def inner({', '.join(names)}): return {text}", scope)
    inner, order = scope["inner"], list(names.values())
    return lambda **given: inner(*[given[name] for name in order])


def trace(call: _Call, c: Class, count: float) -> tuple[torch.fx.GraphModule, list[str], dict[str, Any]]:
    """One row as a graph; what must hold of the numbers for it to be right; the numbers' symbols."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    sources = {name: ConstantSource(f"number_{name}") for name in (*call.numbers, "step", "length")}
    length = env.create_symintnode(env.create_symbol(SIZE, sources["length"], dynamic_dim=DimDynamic.DYNAMIC,
                                                     constraint_dim=None), hint=SIZE, source=sources["length"])
    values = {**call.numbers, **({"step": count} if call.counts else {})}
    symbols = {name: env.create_unspecified_symbol(value, sources[name], dynamic_dim=DimDynamic.DYNAMIC)
               for name, value in values.items()}
    given = {name: env.create_symfloatnode(symbols[name], hint=value, source=sources[name])
             for name, value in values.items()}
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True):
        # Numbers of parameters on the CPU are traced as if they were not: their kernels are the same.
        row = [torch.empty(() if name in SCALARS else (length,), dtype=c.dtypes[name], device=c.device)
               for name in call.lists]
        row += [torch.empty((), dtype=t.dtype, device=c.device) for t in call.shared.values()]

    def step(tensors: list[torch.Tensor], numbers: list[Any]) -> None:
        named = dict(zip(given, numbers, strict=True))
        count_now = named.pop("step", None)
        lists: dict[str, list[Any]] = {name: list(value) for name, value in call.empty.items()}
        lists |= {name: [t] for name, t in zip(call.lists, tensors, strict=False)}
        named |= dict(zip(call.shared, tensors[len(call.lists):], strict=True))
        before = {name: list(value) for name, value in lists.items()}
        with ExitStack() as stack:
            if call.counts:
                stack.enter_context(patch.object(call.f.module, COUNT, lambda _: count_now))
            call.f.original(**(call.given | lists | named))
        if any(a is not b for name in lists for a, b in zip(before[name], lists[name], strict=True)):
            raise Declined("states that this step makes")

    # Under `capturable` torch asks for a GPU, unless it is being compiled.
    compiling = patch.object(torch.compiler, "_is_compiling_flag", bool(call.given.get("capturable")))
    with torch.no_grad(), compiling:
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
    if any(program.buffers[name].shape for name in inside):
        raise Declined("it needs memory for intermediate results")
    return numbers, launches
